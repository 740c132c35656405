"""`streamrl status DIR`: shows a run's state in any terminal; it only reads the run folder."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import click

if TYPE_CHECKING:
    from rich.console import Console

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
    from streamrl.report.gone_launcher import run_status
    from streamrl.report.terminal import terminal
    from streamrl.runtime.stop_signals import on_stop

    status = run_status(directory)
    if not watch:
        _show(directory, status, terminal())
        return
    previous = on_stop(_stop, signal.SIGTERM)
    try:
        _watch(directory, terminal())
    except KeyboardInterrupt:
        click.echo("Stopped watching; the run goes on.")
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    """End a picture as Ctrl-C does: the terminal gets its cursor back."""
    raise KeyboardInterrupt


def _show(directory: Path, status: RunStatus | None, console: Console) -> None:
    """Print the state once."""
    from streamrl.report import site_view
    from streamrl.report.gone_launcher import launcher_gone, site_status
    from streamrl.report.panels import render, render_start
    from streamrl.report.summary import duration
    from streamrl.run_dir import evaluations, layout
    from streamrl.run_dir.appended_lines import newest_rows
    from streamrl.run_dir.metrics import MetricsRow
    from streamrl.run_dir.start_stages import read_stages

    now, over = time.time(), launcher_gone(directory, status)
    if status is not None:
        rows = newest_rows(directory / layout.METRICS, MetricsRow)
        evaluated = evaluations.read_evaluations(directory / layout.EVALUATIONS)
        console.print(render(status, rows, now, evaluated, read_stages(directory)))
        if status.why_types:
            console.print(f"computes in: {status.why_types}", style="dim", highlight=False)
        if status.why_packing:
            console.print(f"packs groups: {status.why_packing}", style="dim", highlight=False)
    elif (site := site_status(directory)) is not None:
        console.print(f"{site_view.line(site)}; as of {duration(now - site.updated_at)} ago", soft_wrap=True)
    elif not over:
        console.print(render_start(directory.name, read_stages(directory), now))
    if over:
        console.print(over, soft_wrap=True)


def _watch(directory: Path, console: Console) -> None:
    """Show the state until the run has ended or its launcher is gone.

    Raises:
        UserError: the folder is gone.
    """
    from streamrl.report.gone_launcher import site_status

    if site_status(directory) is None and _watch_run(directory, console):
        return
    from streamrl.report.site_view import SiteView

    view = SiteView(directory, console)
    view.refresh()
    while not (over := _over(directory, None)):
        time.sleep(REFRESH_S)
        view.refresh()
    view.summary()
    view.say(over)


def _watch_run(directory: Path, console: Console) -> bool:
    """Show a run until its end; return False if it turns out to be a site that only generates.

    Raises:
        UserError: the folder is gone.
    """
    from streamrl.report.gone_launcher import site_status
    from streamrl.report.live_view import LiveView

    with LiveView(directory, console=console) as view:
        while True:
            status = view.refresh()
            over = _over(directory, status)
            if over or (status is not None and status.final) or site_status(directory) is not None:
                break
            time.sleep(REFRESH_S)
    if site_status(directory) is not None:
        return False
    view.summary()
    if over:
        view.say(over)
    return True


def _over(directory: Path, status: RunStatus | None) -> str:
    """Describe why nothing will change any more in a folder that is watched, as `launcher_gone` does; '': it may.

    Raises:
        UserError: the folder is gone.
    """
    from streamrl.errors import UserError
    from streamrl.report.gone_launcher import launcher_gone

    if not directory.exists():
        raise UserError(f"run folder {directory} is gone (moved or deleted?): there is nothing more to watch")
    return launcher_gone(directory, status)
