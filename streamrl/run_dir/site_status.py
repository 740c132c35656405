"""`site.json`: the current state of a site that does not train, written by its service."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from streamrl.atomic_files import overwrite, replace_json
from streamrl.plain_files import read_plain
from streamrl.run_dir import layout
from streamrl.run_dir.jsonl import finite
from streamrl.run_dir.remote_site import ABSENT_AFTER_S
from streamrl.run_dir.status_model import StatusModel

STARTING = "starting"
"""State of a site whose service does not serve yet."""


class SiteInstance(StatusModel):
    """One instance, as of its last heartbeat."""

    state: str = "starting"
    running: int = 0
    tokens_per_s: float = 0.0
    weight_version: int = -1


class SiteStatus(StatusModel):
    """The content of `site.json`; times are unix seconds of this site's clock."""

    site: str
    updated_at: float
    state: str
    trainer_silent_s: float = Field(description="seconds since the controller's last sign of life")
    publisher_silent_s: float | None = Field(
        None, description="seconds since the last sign of life of the trainer's publisher (`port + 1`); null: unknown"
    )
    empty_connections: int = Field(
        0, description="connections in a row over which only the hello and its answer got through"
    )
    unresolved: str = Field("", description="why the name of the silent trainer's site has no IP address; '': it has")
    rtt_ms: float | None = None
    clock_offset_s: float | None = Field(None, description="the controller's clock minus this site's")
    weight_version: int | None = None
    weight_bytes: int = Field(0, description="bytes of weights received since the start")
    samples_sent: int = 0
    samples_waiting: int = Field(0, description="samples finished, but not yet committed by the controller")
    sample_bytes: int = Field(0, description="bytes of samples sent since the start")
    compression: float | None = Field(None, description="raw bytes per byte sent; none: not compressed")
    congested: bool = False
    instances: dict[str, SiteInstance] = Field(default_factory=dict)
    agents_silent_s: float | None = Field(
        None, description="seconds since the last sign of life of its agents process; none: there is none, or no sign"
    )
    agents_session: str = Field("", description="the agents process that gave it: another text after each start")

    @property
    def away(self) -> bool:
        """Whether the trainer's site is unreachable."""
        return self.trainer_silent_s > ABSENT_AFTER_S

    @property
    def lacks_weights(self) -> bool:
        """Whether only the link for weights is dead."""
        return not self.away and (self.publisher_silent_s or 0.0) > ABSENT_AFTER_S


def started_again(run_dir: Path, site: str) -> Path | None:
    """Return the folder of the newest later launch of a site that only generates; None: there is none beside."""
    found = None
    for folder in layout.later_folders(run_dir.absolute()):
        with contextlib.suppress(OSError):
            if (status := _read(folder)) is not None and status.site == site:
                found = folder
    return found


def write_site(run_dir: Path, values: dict[str, Any]) -> None:
    """Replace the file.

    Raises:
        OSError: the file cannot be written.
        pydantic.ValidationError: a value that does not fit `SiteStatus`.
    """
    clean = finite(values)
    SiteStatus.model_validate(clean)
    replace_json(run_dir / layout.SITE_STATUS, clean)


def write_site_end(run_dir: Path, values: dict[str, Any]) -> None:
    """Replace the file by the last state, by which the launcher knows that the site has ended.

    On a full disk it is written in place of the old one, if need be without what it says of instances and samples.
    """
    try:
        write_site(run_dir, values)
    except OSError:
        least = starting(values["site"]) | {"updated_at": round(values["updated_at"]), "state": values["state"]}
        texts = ({**finite(values), "instances": {}}, least)
        overwrite(run_dir / layout.SITE_STATUS, (json.dumps(one).encode() for one in texts))


def starting(site: str) -> dict[str, Any]:
    """Return what a site's service writes until it serves: a sign of life, which says nothing of the site."""
    return {"site": site, "updated_at": time.time(), "state": STARTING, "trainer_silent_s": 0.0}


def touch_site(run_dir: Path) -> None:
    """Make the file, if there is one, seem written now: a full disk allows that, too."""
    with contextlib.suppress(OSError):
        os.utime(run_dir / layout.SITE_STATUS)


def touch_rewards(run_dir: Path) -> None:
    """Give a sign of life of a site's rewards process, by the time of a file; none if that cannot be written."""
    path = run_dir / layout.REWARDS_SIGN
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        os.utime(path, follow_symlinks=False)


def read_site(run_dir: Path) -> SiteStatus | None:
    """Read the newest state; None until the site serves.

    Raises:
        NotPlainFile: the file is a link or no regular file.
    """
    status = _read(run_dir)
    return None if status is None or status.state == STARTING else status


def _read(run_dir: Path) -> SiteStatus | None:
    """Return the newest state, of a site that starts as well; None: there is none.

    Raises:
        NotPlainFile: the file is a link or no regular file.
    """
    try:
        content = read_plain(run_dir / layout.SITE_STATUS, below=layout.whole_folder(run_dir))
        return SiteStatus.model_validate_json(content)
    except (FileNotFoundError, ValidationError):
        return None
