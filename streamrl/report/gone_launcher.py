"""Whether the launcher of a run or of a site is gone without having recorded an end, in words for a command."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from streamrl.config.load import load_resolved
from streamrl.errors import UserError
from streamrl.plain_files import NotReadable
from streamrl.report.start_lines import joined
from streamrl.run_dir import layout
from streamrl.run_dir.finished import nothing_left
from streamrl.run_dir.launcher_lock import has_launcher
from streamrl.run_dir.site_status import SiteStatus, read_site, started_again
from streamrl.run_dir.start_stages import read_stages
from streamrl.run_dir.status import RunStatus, read_status


def run_status(directory: Path) -> RunStatus | None:
    """Read the run's status; None: none was written yet, or it is a site that only generates.

    Raises:
        UserError: the folder holds no run, or its status cannot be read.
    """
    try:
        return read_status(directory)
    except NotReadable:
        raise
    except UserError:
        if not directory.is_dir() or os.path.lexists(directory / layout.STATUS):
            raise
        if not (directory / layout.SITE_STATUS).exists() and not read_stages(directory):
            raise
        return None


def site_status(directory: Path) -> SiteStatus | None:
    """Read the state of a site that only generates; None: it is none, or does not serve yet."""
    return None if (directory / layout.STATUS).exists() else read_site(directory)


def launcher_gone(directory: Path, status: RunStatus | None) -> str:
    """Describe that the launcher is gone and that nothing will change here any more; '': it lives, or the run is over.

    It is only looked for where it seems to be gone: no status is written, none for a while, or one
    that is dated in the future.

    Args:
        directory: the folder of the run, or of a site's own launcher.
        status: the run's status, as read last; None: there is none.

    Raises:
        UserError: the folder holds no run any more, or its status cannot be read.
    """
    if (status is not None and (status.final or status.is_live(time.time()))) or has_launcher(directory):
        return ""
    status = run_status(directory)  # the launcher may have written the run's end before it went
    if status is not None and status.final:
        return ""
    gone = f"no launcher runs {directory} any more"
    if status is not None:
        return f"{gone}; {_how_it_goes_on(directory)}"
    if (site := site_status(directory)) is not None:
        later = started_again(directory, site.site)
        return gone if later is None else f"{gone}; the site was started again, in {later.name}"
    doing = joined({name: stage.text for name, stage in read_stages(directory).items()})
    return f"{gone}: it ended before its controller reported ({doing}); see {directory / layout.LOGS}"


def _how_it_goes_on(directory: Path) -> str:
    with contextlib.suppress(OSError, UserError):
        if (done := nothing_left(directory, load_resolved(directory)[1])) is not None:
            return f"nothing is left to do: all {done} steps are done"
    return "streamrl launch --resume continues it"
