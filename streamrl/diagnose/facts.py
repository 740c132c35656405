"""What is seen of a run, its processes and its sites at one moment, and from when on that counts as late or silent.

`diagnose/snapshot.py` collects it; `diagnose/stuck.py` judges it.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

Loop = Literal["answers", "blocked", "none", "unknown"]
Alive = Literal["running", "sleeping", "disk-sleep", "stopped", "traced", "zombie", "gone", "unknown"]

FINAL = frozenset({"done", "interrupted", "failed"})
SILENT_AFTER_S = 10.0
"""The controller writes every half second, and sites say something every second: ten seconds are no hiccup."""
STARTING_SILENT_S = 120.0
"""A controller that starts loads libraries in one go, and with a cold disk that takes more than a minute."""
HANG_S = 10.0
"""For a process that does not turn and does not compute: ordinary pauses, as for a disk, are a few seconds long."""
PATIENCE_S = 30.0
"""Shorter waits for a process that seems to do nothing are not judged: CPU time is measured over a moment only."""
SLOW_FACTOR, SLOW_LEAST_S = 2.0, 10.0
"""A step is slow when it takes longer than so many medians, and by that many seconds more than one."""
NEAR_LIMIT = 0.8
"""Share of its limit from which on a wait is told."""
GRACE_S = 5.0
"""Beyond its limit: the owner of the wait is ending the run meanwhile."""
IDLE_CPU = 0.02
"""Share of a core: heartbeats take less."""
RECENT_STEPS = 20
"""Earlier steps have other output lengths."""
LITTLE_DISK_GB = 0.5


@dataclass(frozen=True)
class WaitFacts:
    """A registered wait; `since` in unix seconds."""

    owner: str
    waiting_for: str
    since: float
    limit_s: float


@dataclass(frozen=True)
class ChildFacts:
    """A process of a process, that cannot go on."""

    name: str
    pid: int
    alive: Alive


@dataclass(frozen=True)
class ProcessFacts:
    """One process, as seen from outside and as its last heartbeat told."""

    name: str
    role: str
    """As in status.json; 'launcher', 'elastic' (torch's launcher of the ranks) and 'proxy' beside."""
    pid: int | None = None
    """None: it is not of this machine, or has not been started."""
    site: str = ""
    alive: Alive = "unknown"
    exit_code: int | None = None
    last_words: str = ""
    """Of one that has ended, if the launcher has noticed."""
    cpu: float | None = None
    """Cores that it and its children have used."""
    loop: Loop = "unknown"
    """Whether its event loop turns; none: it does not have one (yet)."""
    children: tuple[ChildFacts, ...] = ()
    doing: str = ""
    stage: str = ""
    """What it does while it starts; '': it has started."""
    stage_s: float = 0.0
    """For how long."""
    running: int = 0
    """Requests that it works on."""
    tasks: tuple[str, ...] = ()
    """Awaits of its asyncio tasks, a line each."""
    threads: tuple[str, ...] = ()
    """Python stacks of its threads, the innermost frame first."""


@dataclass(frozen=True)
class RunFacts:
    """Of status.json; times in unix seconds."""

    state: str
    step: int
    steps: int
    started_at: float
    updated_at: float
    error: str | None = None
    cuda: bool = False
    waits: tuple[WaitFacts, ...] = ()
    silent_s: Mapping[str, float] = field(default_factory=dict)
    """Of sites behind links, as of `updated_at`."""


@dataclass(frozen=True)
class SiteFacts:
    """Of a site that only generates, and has a launcher of its own (site.json)."""

    site: str
    state: str
    updated_at: float
    trainer_silent_s: float
    samples_waiting: int = 0


@dataclass(frozen=True)
class Facts:
    """All that was seen of a run, at `now` (unix seconds)."""

    now: float
    run: RunFacts | None
    """None: the controller has not written yet, or is elsewhere."""
    processes: tuple[ProcessFacts, ...] = ()
    step_times: tuple[float, ...] = ()
    """Seconds that the steps so far took, oldest first."""
    step_began: float | None = None
    """When the step under way began."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """Which process listens at a ZeroMQ address."""
    site: SiteFacts | None = None
    disk_free_gb: float | None = None

    @cached_property
    def by_name(self) -> dict[str, ProcessFacts]:
        """The processes."""
        return {one.name: one for one in self.processes}

    @property
    def age(self) -> float:
        """Seconds since the controller last wrote; infinite if it never has."""
        return float("inf") if self.run is None else max(0.0, self.now - self.run.updated_at)

    @property
    def elsewhere(self) -> bool:
        """Whether the run's processes are not of this machine: one that is not here writes."""
        controller = self.by_name.get("controller")
        return controller is not None and controller.alive == "gone" and self.age <= SILENT_AFTER_S

    @property
    def usual_s(self) -> float | None:
        """Median time of the recent steps; None before there are any."""
        recent = self.step_times[-RECENT_STEPS:]
        return statistics.median(recent) if recent else None

    @property
    def elapsed_s(self) -> float | None:
        """Since the step under way began."""
        return None if self.step_began is None else max(0.0, self.now - self.step_began)

    @property
    def late(self) -> bool:
        """Whether the step under way takes longer than steps do; False while there is nothing to compare with."""
        usual, elapsed = self.usual_s, self.elapsed_s
        if usual is None or elapsed is None:
            return False
        return elapsed > SLOW_FACTOR * usual and elapsed - usual > SLOW_LEAST_S

    @property
    def patience(self) -> float:
        """Seconds for which nobody is suspected of doing nothing."""
        return max(PATIENCE_S, SLOW_FACTOR * (self.usual_s or 0.0))


def innermost(threads: Sequence[str]) -> str:
    """The innermost Python frame of the main thread, as 'function (file:line)'; '' without a stack.

    faulthandler writes the main thread last, and of each thread the innermost frame first.
    """
    found = ""
    for before, line in itertools.pairwise(threads):
        frame = re.match(r'\s*File "(.*?)", line (\d+) in (.*)', line)
        if frame and "(most recent call first)" in before:
            found = f"{frame[3]} ({'/'.join(frame[1].split('/')[-2:])}:{frame[2]})"
    return found
