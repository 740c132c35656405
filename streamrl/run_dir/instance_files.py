"""Two files in a site's folder, between its service and whoever starts its processes.

    instances.json   the service: which instances are to run now
    processes.json   the launcher: which processes of the site it has started, and how those that ended did

Both are replaced in one piece, so a reader never meets half of one. They outlive either process: whoever comes back
finds what the other has written. A process of an instance has a number: a higher one asks for a new process in place
of the one before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamrl.atomic_files import replace_json
from streamrl.run_dir import layout


@dataclass(frozen=True)
class WantedInstance:
    """An instance that is to run."""

    name: str
    process: int = 1
    """Number of its process."""
    leaving: bool = False
    """It gives back what it has, and then ends by itself."""


@dataclass(frozen=True)
class StartedProcess:
    """A process as the launcher sees it."""

    name: str
    role: str
    pid: int
    process: int = 1
    """Of an instance: see `WantedInstance`."""
    exit_code: int | None = None
    """None: it lives; negative: ended by that signal."""
    last_words: str = ""
    """Of one that has ended."""
    node: str = ""
    """Where it is; '': on the launcher's machine."""


def write_wanted(folder: Path, instances: Iterable[WantedInstance]) -> None:
    """Replaces the service's file.

    Raises:
        OSError: it cannot be written.
    """
    replace_json(folder / layout.WANTED_INSTANCES, [asdict(one) for one in instances])


def read_wanted(folder: Path) -> list[WantedInstance] | None:
    """What the service wants; None: it has not said so yet."""
    found = _read(folder / layout.WANTED_INSTANCES)
    return None if found is None else [WantedInstance(**one) for one in found]


def write_started(folder: Path, processes: Iterable[StartedProcess]) -> None:
    """Replaces the launcher's file.

    Raises:
        OSError: it cannot be written.
    """
    replace_json(folder / layout.PROCESSES, [asdict(one) for one in processes])


def read_started(folder: Path) -> list[StartedProcess]:
    """What the launcher has started; empty before it has said so."""
    return [StartedProcess(**one) for one in _read(folder / layout.PROCESSES) or []]


def site_folders(run_dir: Path) -> dict[str, Path]:
    """Folders of all sites of a run that are on this machine, by name; the run's own is called ''."""
    return {"": run_dir} | {path.name: path for path in sorted(run_dir.glob("sites/*/"))}


def forget(folder: Path) -> None:
    """Deletes what an earlier launch has left."""
    for name in (layout.WANTED_INSTANCES, layout.PROCESSES):
        (folder / name).unlink(missing_ok=True)


def _read(path: Path) -> list[dict[str, Any]] | None:
    try:
        found: list[dict[str, Any]] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return found
