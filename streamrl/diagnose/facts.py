"""Facts observed about a run, its processes and its sites at one moment, and the limits for "late" and "silent".

`diagnose/snapshot.py` collects the facts; `diagnose/stuck.py` judges them.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Literal

from streamrl.run_dir.remote_site import obstacle

Loop = Literal["answers", "blocked", "none", "unknown"]
Alive = Literal["running", "sleeping", "disk-sleep", "stopped", "traced", "zombie", "gone", "unknown"]

FINAL = frozenset({"done", "interrupted", "failed"})
SILENT_AFTER_S = 10.0
"""Seconds of silence that count. The controller writes every half second and sites report every second, so this is
no hiccup."""
STARTING_SILENT_S = 120.0
"""Seconds of silence allowed to a starting controller: loading libraries from a cold disk takes over a minute."""
HANG_S = 10.0
"""Seconds for which a process may neither run its event loop nor compute; disk pauses take a few."""
PATIENCE_S = 30.0
"""Seconds below which a wait for a seemingly idle process is not judged: CPU time is sampled only briefly."""
SLOW_FACTOR, SLOW_LEAST_S = 2.0, 10.0
"""A step is slow when it exceeds `SLOW_FACTOR` median step times and is `SLOW_LEAST_S` seconds above the median."""
NEAR_LIMIT = 0.8
"""Share of its limit at which a wait is reported."""
GRACE_S = 5.0
"""Seconds past its limit that a wait is tolerated, while its owner ends the run."""
IDLE_CPU = 0.02
"""Share of a core below which a process counts as idle; heartbeats take less."""
RECENT_STEPS = 20
"""Newest steps used for the median step time; output lengths of earlier ones differ."""
WORD = r"[\w-]+"
"""What a name of a process consists of, unless it has dots as well."""
LITTLE_DISK_GB = 0.5
"""Free space, in GB, below which the run's disk is reported as full."""
NO_DISK_GB = 0.001
"""Free space, in GB, below which the run's processes cannot be expected to write anything."""


@dataclass(frozen=True)
class WaitFacts:
    """A wait that its owner has registered; its limit counts from `since` (unix seconds), the latest progress."""

    owner: str
    waiting_for: str
    since: float
    limit_s: float


@dataclass(frozen=True)
class ChildFacts:
    """A child process that cannot continue."""

    name: str
    pid: int
    alive: Alive


@dataclass(frozen=True)
class ProcessFacts:
    """One process, as seen from outside and as its last heartbeat reported."""

    name: str
    role: str
    """A role of status.json, or 'launcher', 'rank launcher' (`launcher/trainer_ranks.py`) or 'proxy'."""
    pid: int | None = None
    """None: it runs on another machine, or has not been started."""
    site: str = ""
    alive: Alive = "unknown"
    exit_code: int | None = None
    last_words: str = ""
    """Its last output, if it has ended and the launcher has noticed."""
    cpu: float | None = None
    """Cores that it and its children are using."""
    loop: Loop = "unknown"
    """State of its event loop; none: it has no event loop (yet)."""
    children: tuple[ChildFacts, ...] = ()
    doing: str = ""
    stage: str = ""
    """Its current start-up stage; '': it has started."""
    stage_s: float = 0.0
    """Seconds in that stage."""
    running: int = 0
    """Requests in progress."""
    tasks: tuple[str, ...] = ()
    """The await chain of each asyncio task, one line each."""
    threads: tuple[str, ...] = ()
    """Python stacks of its threads, innermost frame first."""


@dataclass(frozen=True)
class RunFacts:
    """Contents of status.json; times in unix seconds."""

    state: str
    step: int
    steps: int
    started_at: float
    """Start of the controller."""
    updated_at: float
    first_started_at: float | None = None
    """Start of the run's first process; None: unknown."""
    elapsed_s: float | None = None
    """Seconds from that start to `updated_at`; None: unknown."""
    error: str | None = None
    cuda: bool = False
    waits: tuple[WaitFacts, ...] = ()
    silent_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of silence of each site behind a link, as of `updated_at`."""
    refused: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """What processes have refused since the controller started, by cause and peer."""
    absence_s: float | None = None
    """Seconds of such silence after which the run ends, whatever the limit of a wait; None: unknown."""
    left: frozenset[str] = frozenset()
    """Sites behind links that have said goodbye; they are silent since."""
    publisher_silent_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds for which each site behind a link has heard nothing of the trainer's publisher, as of `updated_at`."""
    controller_silent_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds for which each site behind a link has heard nothing of the controller, by its last heartbeat."""
    empty_connections: Mapping[str, int] = field(default_factory=dict)
    """Connections in a row over which only hellos got through, by the site behind the link."""

    def obstacle_to(self, site: str) -> str:
        """Describe what lets no large messages through the link to a site; '': nothing does."""
        return obstacle(self.empty_connections.get(site, 0))

    @property
    def lasted_s(self) -> float:
        """Seconds from the run's first start to `updated_at`."""
        if self.elapsed_s is not None:
            return self.elapsed_s
        return self.updated_at - (self.started_at if self.first_started_at is None else self.first_started_at)


@dataclass(frozen=True)
class SiteFacts:
    """Contents of site.json: a site that only generates and has its own launcher."""

    site: str
    state: str
    updated_at: float
    trainer_silent_s: float
    samples_waiting: int = 0
    publisher_silent_s: float | None = None
    """Seconds since it has heard the trainer's publisher; None: unknown."""
    empty_connections: int = 0
    """Connections in a row over which only its hello was answered."""
    unresolved: str = ""
    """Why the name of the silent trainer's site has no IP address; '': it has one."""
    later: str = ""
    """Name of the folder in which the site was started again; '': it was not."""


@dataclass(frozen=True)
class Facts:
    """Everything observed about a run at `now` (unix seconds)."""

    now: float
    run: RunFacts | None
    """None: the controller has not written yet, or runs elsewhere."""
    processes: tuple[ProcessFacts, ...] = ()
    step_times: tuple[float, ...] = ()
    """Durations of the steps so far, in seconds, oldest first."""
    step_began: float | None = None
    """Start of the current step, in unix seconds."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """Name of the process that listens at each ZeroMQ address."""
    site: SiteFacts | None = None
    launcher_gone: bool = False
    """Whether the launcher that had the run's lock last was on this machine, and is not there any more."""
    launcher_lives: bool = False
    """Whether that launcher is on this machine, and holds the lock."""
    disk_free_gb: float | None = None

    @property
    def disk_full(self) -> bool:
        """Whether what the run's folder says may be old because nothing can be written there."""
        return self.disk_free_gb is not None and self.disk_free_gb < NO_DISK_GB

    @cached_property
    def by_name(self) -> dict[str, ProcessFacts]:
        """Processes by name."""
        return {one.name: one for one in self.processes}

    @cached_property
    def names_in(self) -> Callable[[str], list[str]]:
        """Function that returns the processes that a text names, in their order; the list is not to be changed.

        It remembers its answers: of a thousand waits most have one of a few texts.
        """
        places = {name: place for place, name in enumerate(self.by_name)}
        unusual = [name for name in places if not re.fullmatch(WORD, name)]

        @cache
        def names_in(text: str) -> list[str]:
            found = set(re.findall(WORD, text)) & places.keys()
            found |= {name for name in unusual if name in text and _stands_alone(name, text)}
            return sorted(found, key=places.__getitem__)

        return names_in

    @property
    def waits(self) -> tuple[WaitFacts, ...]:
        """All registered waits."""
        return self.run.waits if self.run is not None else ()

    @cached_property
    def waits_by_owner(self) -> dict[str, list[WaitFacts]]:
        """All registered waits, by their owner."""
        found: dict[str, list[WaitFacts]] = {}
        for wait in self.waits:
            found.setdefault(wait.owner, []).append(wait)
        return found

    @property
    def starting(self) -> bool:
        """Whether the run is still starting."""
        return self.run is None or self.run.state == "starting"

    @property
    def age(self) -> float:
        """Seconds since the controller last wrote its status; infinite if it never has, negative: see `age_of`."""
        return float("inf") if self.run is None else age_of(self.now, self.run.updated_at)

    @property
    def elsewhere(self) -> bool:
        """Whether the run is on another machine: the status is being updated, but the controller is not here."""
        controller = self.by_name.get("controller")
        return controller is not None and controller.alive == "gone" and not is_silent(self.age)

    @property
    def usual_s(self) -> float | None:
        """Median duration of the recent steps, in seconds; None before there are any."""
        recent = self.step_times[-RECENT_STEPS:]
        return statistics.median(recent) if recent else None

    @property
    def elapsed_s(self) -> float | None:
        """Seconds since the current step began; None: unknown, as where its begin is dated in the future."""
        since = None if self.step_began is None else age_of(self.now, self.step_began)
        return None if since is None or since < 0 else since

    @property
    def late(self) -> bool:
        """Whether the current step takes longer than usual; False while there is nothing to compare with."""
        usual, elapsed = self.usual_s, self.elapsed_s
        if usual is None or elapsed is None:
            return False
        return elapsed > SLOW_FACTOR * usual and elapsed - usual > SLOW_LEAST_S

    @property
    def patience(self) -> float:
        """Seconds for which an idle process is not yet suspected."""
        return max(PATIENCE_S, SLOW_FACTOR * (self.usual_s or 0.0))


def age_of(now: float, written_at: float) -> float:
    """Return the seconds since something was written, by the clock of the machine that wrote it.

    Up to `SILENT_AFTER_S` seconds in the future count as just now, as clocks differ a little. What is dated later than
    that has an unknown age: a clock was set back, or the two machines' clocks differ. Its date is returned, as a
    negative number of seconds.
    """
    age = now - written_at
    return age if age < -SILENT_AFTER_S else max(0.0, age)


def is_silent(age: float, limit_s: float = SILENT_AFTER_S) -> bool:
    """Return whether an age of `age_of` is no sign of life: it is above the limit, or unknown."""
    return age < 0 or age > limit_s


def _stands_alone(name: str, text: str) -> bool:
    """Return whether a text has a name that is not a part of a longer one."""
    return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text) is not None


def innermost(threads: Sequence[str]) -> str:
    """Return the innermost Python frame of the main thread as 'function (file:line)'; '' without a stack.

    faulthandler writes the main thread last, and each thread's innermost frame first.
    """
    found = ""
    for before, line in itertools.pairwise(threads):
        frame = re.match(r'\s*File "(.*?)", line (\d+) in (.*)', line)
        if frame and "(most recent call first)" in before:
            found = f"{frame[3]} ({'/'.join(frame[1].split('/')[-2:])}:{frame[2]})"
    return found
