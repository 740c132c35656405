"""`streamrl status DIR`: shows a run's state in any terminal; it only reads the run folder."""

from __future__ import annotations

from pathlib import Path

import click

from streamrl.errors import UserError

REFRESH_S = 0.5
"""Seconds between two refreshes; the controller writes as often."""


@click.command(name="status")
@click.argument("directory", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--watch", is_flag=True, help="Keep the display updated until the run ends (Ctrl-C stops watching only).")
def command(directory: Path, watch: bool) -> None:
    """Show the state of the run in DIR: its processes, the current step, and the metrics of the last steps.

    \b
    Examples:
      streamrl status runs/demo
      streamrl status runs/demo --watch
    """
    import time

    from streamrl.report.live_view import LiveView
    from streamrl.report.panels import render, render_start
    from streamrl.report.terminal import terminal
    from streamrl.run_dir import evaluations, layout
    from streamrl.run_dir.metrics import read_metrics
    from streamrl.run_dir.start_stages import read_stages
    from streamrl.run_dir.status import read_status

    console, stages = terminal(), read_stages(directory)
    try:
        status = read_status(directory)
    except UserError:
        if not stages:
            raise
        status = None  # its processes are starting
    if not watch and status is None:
        console.print(render_start(directory.name, stages, time.time()))
        return
    if not watch and status is not None:
        evaluated = evaluations.read_evaluations(directory / layout.EVALUATIONS)
        console.print(render(status, read_metrics(directory / layout.METRICS), time.time(), evaluated, stages))
        if status.why_types:
            console.print(f"computes in: {status.why_types}", style="dim", highlight=False)
        if status.why_packing:
            console.print(f"packs groups: {status.why_packing}", style="dim", highlight=False)
        return
    try:
        with LiveView(directory, console=console) as view:
            while (shown := view.refresh()) is None or not shown.final:
                time.sleep(REFRESH_S)
    except KeyboardInterrupt:
        click.echo("Stopped watching; the run goes on.")
        return
    view.summary()
