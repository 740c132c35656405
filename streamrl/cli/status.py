"""`streamrl status DIR`: shows a run's state in any terminal; it only reads the run folder."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from streamrl.errors import UserError
from streamrl.plain_files import NotReadable

if TYPE_CHECKING:
    from rich.console import Console

    from streamrl.run_dir.site_status import SiteStatus
    from streamrl.run_dir.status import RunStatus

REFRESH_S = 0.5
"""Seconds between two refreshes; the controller writes as often."""


@click.command(name="status")
@click.argument("directory", type=click.Path(path_type=Path), metavar="DIR")
@click.option(
    "--watch",
    is_flag=True,
    help="Keep the display updated until the run or its launcher has ended (Ctrl-C stops watching only).",
)
def command(directory: Path, watch: bool) -> None:
    """Show the state of the run in DIR: its processes, the current step, and the metrics of the last steps.

    Of a site that only generates, DIR is the folder of its own launcher.

    \b
    Examples:
      streamrl status runs/demo
      streamrl status runs/demo --watch
    """
    from streamrl.report.terminal import terminal

    status = _status(directory)
    if not watch:
        _show(directory, status, terminal())
        return
    try:
        _watch(directory, terminal())
    except KeyboardInterrupt:
        click.echo("Stopped watching; the run goes on.")


def _status(directory: Path) -> RunStatus | None:
    """Read the run's status; None: none was written yet, or it is a site that only generates.

    Raises:
        UserError: the folder holds no run, or its status cannot be read.
    """
    from streamrl.run_dir import layout
    from streamrl.run_dir.start_stages import read_stages
    from streamrl.run_dir.status import read_status

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


def _site(directory: Path) -> SiteStatus | None:
    """Read the state of a site that only generates; None: it is none, or does not serve yet."""
    from streamrl.run_dir import layout
    from streamrl.run_dir.site_status import read_site

    return None if (directory / layout.STATUS).exists() else read_site(directory)


def _show(directory: Path, status: RunStatus | None, console: Console) -> None:
    """Print the state once."""
    from streamrl.report import site_view
    from streamrl.report.panels import render, render_start
    from streamrl.report.summary import duration
    from streamrl.run_dir import evaluations, layout
    from streamrl.run_dir.metrics import read_metrics
    from streamrl.run_dir.start_stages import read_stages

    now, over = time.time(), _launcher_gone(directory, status)
    if status is not None:
        rows = read_metrics(directory / layout.METRICS)
        evaluated = evaluations.read_evaluations(directory / layout.EVALUATIONS)
        console.print(render(status, rows, now, evaluated, read_stages(directory)))
        if status.why_types:
            console.print(f"computes in: {status.why_types}", style="dim", highlight=False)
        if status.why_packing:
            console.print(f"packs groups: {status.why_packing}", style="dim", highlight=False)
    elif (site := _site(directory)) is not None:
        console.print(f"{site_view.line(site)}; as of {duration(now - site.updated_at)} ago", soft_wrap=True)
    elif not over:
        console.print(render_start(directory.name, read_stages(directory), now))
    if over:
        console.print(over, soft_wrap=True)


def _watch(directory: Path, console: Console) -> None:
    """Show the state until the run has ended or its launcher is gone."""
    if _site(directory) is None and _watch_run(directory, console):
        return
    from streamrl.report.site_view import SiteView

    view = SiteView(directory, console)
    view.refresh()
    while not (over := _launcher_gone(directory, None)):
        time.sleep(REFRESH_S)
        view.refresh()
    view.summary()
    view.say(over)


def _watch_run(directory: Path, console: Console) -> bool:
    """Show a run until its end; return False if it turns out to be a site that only generates."""
    from streamrl.report.live_view import LiveView

    with LiveView(directory, console=console) as view:
        while True:
            status = view.refresh()
            over = _launcher_gone(directory, status)
            if over or (status is not None and status.final) or _site(directory) is not None:
                break
            time.sleep(REFRESH_S)
    if _site(directory) is not None:
        return False
    view.summary()
    if over:
        view.say(over)
    return True


def _launcher_gone(directory: Path, status: RunStatus | None) -> str:
    """Describe that the launcher is gone and that nothing will change here any more; '': it lives, or the run is over.

    It is only looked for where it seems to be gone: no status is written, or none for a while.
    """
    from streamrl.report.start_lines import joined
    from streamrl.run_dir import layout
    from streamrl.run_dir.launcher_lock import has_launcher
    from streamrl.run_dir.site_status import started_again
    from streamrl.run_dir.start_stages import read_stages

    if (status is not None and (status.final or status.is_live(time.time()))) or has_launcher(directory):
        return ""
    status = _status(directory)  # the launcher may have written the run's end before it went
    if status is not None and status.final:
        return ""
    gone = f"no launcher runs {directory} any more"
    if status is not None:
        return f"{gone}; {_how_it_goes_on(directory)}"
    if (site := _site(directory)) is not None:
        later = started_again(directory, site.site)
        return gone if later is None else f"{gone}; the site was started again, in {later.name}"
    doing = joined({name: stage.text for name, stage in read_stages(directory).items()})
    return f"{gone}: it ended before its controller reported ({doing}); see {directory / layout.LOGS}"


def _how_it_goes_on(directory: Path) -> str:
    from streamrl.config.load import load_resolved
    from streamrl.run_dir.finished import nothing_left

    with contextlib.suppress(OSError, UserError):
        if (done := nothing_left(directory, load_resolved(directory)[1])) is not None:
            return f"nothing is left to do: all {done} steps are done"
    return "streamrl launch --resume continues it"
