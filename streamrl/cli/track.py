"""`streamrl track RUN [NAMES...]`: sends a run to trackers that have not taken all of it."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import click

from streamrl.errors import RunFailed, UserError


@click.command(name="track")
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.argument("names", nargs=-1, metavar="[NAMES]...")
def command(run: Path, names: tuple[str, ...]) -> None:
    """Send the figures and samples of a run to trackers, as far as they do not have them.

    RUN is a run's folder, NAMES are tensorboard, wandb, mlflow or trackio (default: those of the run file; others get
    their defaults). A running job sends its figures by itself; this is for what could not be sent, and for runs that
    were launched without a tracker. Nothing is sent twice.

    \b
    Examples:
      streamrl track runs/demo
      streamrl track runs/demo tensorboard
    """
    from streamrl.config.load import load_resolved
    from streamrl.config.trackers import TRACKER_PACKAGES
    from streamrl.plain_files import check_plain
    from streamrl.run_dir.layout import FOREIGN
    from streamrl.trackers.backends.opener import missing_packages
    from streamrl.trackers.tracker_process import follow, tracker_keys

    _, config = load_resolved(run)
    check_plain(run, apart=FOREIGN)  # packages write there by themselves
    known = ", ".join(TRACKER_PACKAGES)
    if unknown := [name for name in names if name not in TRACKER_PACKAGES]:
        raise UserError(f"there is no tracker {unknown[0]!r}; expected {known}")
    chosen = names or tuple(tracker.name for tracker in config.trackers)
    if not chosen:
        raise UserError(f"the run file of {run} has no trackers: name one of {known}")
    if missing := list(missing_packages(tracker_keys(config, name) for name in chosen)):
        raise UserError("\n".join(missing))
    ended = threading.Event()
    ended.set()
    failed = []
    for name in chosen:
        if follow(run, name, ended, partial(_say, name)):
            _say(name, "has everything")
        else:
            failed.append(name)
    if failed:
        raise RunFailed(f"{', '.join(failed)} did not take everything")


def _say(name: str, text: str) -> None:
    from streamrl.rollouts.plain_text import shown

    click.echo(f"tracker {name} {shown(text)}")  # a server's own words may be in it
