"""The launcher's view of a site that does not train: one line whenever something has changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from rich.console import Console

from streamrl.report.start_lines import StartLines
from streamrl.report.summary import duration
from streamrl.report.terminal import TextConsole
from streamrl.run_dir import layout
from streamrl.run_dir.remote_site import obstacle
from streamrl.run_dir.site_status import SiteStatus, read_site
from streamrl.run_dir.start_stages import StageReader
from streamrl.run_dir.status import STALE_AFTER_S

WAITS_S = 60.0
"""Most seconds between two lines while nothing starts: a site may wait hours for the trainer's site."""
REPEATED_AFTER_S = 30.0
"""Seconds after which an unchanged line is written again."""


class SiteView:
    """A site's progress, line by line; use it as a context manager."""

    farewell = ""
    """What holds up the end of a run that is done: nothing that this site knows."""

    def __init__(self, run_dir: Path, console: Console | None = None, clock: Callable[[], float] = time.time) -> None:
        self.run_dir = run_dir
        self._console = console or TextConsole(highlight=False)
        self._clock = clock
        self._stages = StageReader(run_dir)
        self._start: StartLines | None = StartLines(WAITS_S)
        """None once the site has sent its first sample."""
        self._shown: tuple[object, ...] = ()
        self._shown_at = float("-inf")

    def __enter__(self) -> Self:
        (self.run_dir / layout.SITE_STATUS).unlink(missing_ok=True)
        self.say(f"{self.run_dir.name}: starting; the trainer's site may come later")
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing: the view holds nothing open."""

    def refresh(self) -> None:
        """Write a line if something has changed, or if there was none for a while."""
        status, now = read_site(self.run_dir), self._clock()
        if self._start is not None and not (status is not None and status.samples_sent):
            for text in self._start.lines(self._stages.read(), now):
                self.say(text)
        else:
            self._start = None
        if status is None:
            return
        mark = (status.state, status.away, status.lacks_weights, status.congested, status.weight_version)
        if mark != self._shown or now - self._shown_at > REPEATED_AFTER_S:
            self._shown, self._shown_at = mark, now
            age = now - status.updated_at
            self.say(line(status) + (f"; as of {duration(age)} ago" if age > STALE_AFTER_S else ""))

    def say(self, text: str) -> None:
        """Write a line of the launcher."""
        self._console.print(text, markup=False, soft_wrap=True)

    def summary(self) -> None:
        """Print how many samples the site has sent and how many bytes of weights it has received."""
        status = read_site(self.run_dir)
        if status is not None:
            weights = f"{status.weight_bytes / 1e6:.2f} MB, newest version {status.weight_version}"
            self.say(f"{status.site}: {status.state}")
            self.say(f"  samples sent      {status.samples_sent}, {status.sample_bytes / 1e6:.2f} MB")
            self.say(f"  weights received  {weights}")


def line(status: SiteStatus) -> str:
    """Describe a site's state in one line."""
    running = sum(one.running for one in status.instances.values())
    speed = sum(one.tokens_per_s for one in status.instances.values())
    parts = [
        f"{status.site}: {status.state}",
        f"{len(status.instances)} instances, {running} running, {speed:.0f} tokens/s",
        f"weights {status.weight_version if status.weight_version is not None else 'none yet'}",
        f"{status.samples_sent} samples sent, {status.samples_waiting} in flight",
    ]
    if status.rtt_ms is not None:
        parts.append(f"{status.rtt_ms:.0f} ms to the trainer's site")
    if status.clock_offset_s is not None and abs(status.clock_offset_s) > 1:
        parts.append(f"its clock is {status.clock_offset_s:+.1f} s off ours")
    if status.congested:
        parts.append("the link is congested: nothing new is started")
    if status.away:
        parts.append(f"no sign of the trainer's site for {status.trainer_silent_s:.0f} s")
    if status.lacks_weights:
        parts.append(f"no sign of the trainer's publisher of weights for {status.publisher_silent_s:.0f} s")
    parts += [text for text in (status.unresolved, obstacle(status.empty_connections)) if text]
    return "; ".join(parts)
