"""When a fault was noticed, when the rest of the run served in its place, and when all was as before. Pure.

    injected -> noticed -> (others serving) -> fault is over, recovered -> one more step

A run is looked at a few times a second (`Observation`); what is true is true from the look on that shows it. What a
controller says is up to two seconds old (an instance's heartbeat, its service's, and the status file), so times are
upper bounds. Two mistakes are ruled out: taking the state from before a fault for a recovery (what has died must be
there again, as another process, and everybody must have been heard since), and taking a fault that is not over for one
that is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from streamrl.chaos.faults import ENDS_RUN, OF_INSTANCES, OF_LINKS, Fault, FaultKind

NOT_SERVING = frozenset({"dead", "starting", "stale", "draining", "gone"})
"""States of an instance that has nothing to do with requests (`generation/site/instance_life.py`)."""
FRESH_S = 5.0
"""The controller writes twice a second; so long may it take on a machine under load."""
TOLD_S = 2.0
"""From an instance's state to the status file."""
LOADING_S = 6.0
"""From the moment that an instance opens a version to the status file's word that it serves it; what was damaged later
than that may have been read before."""


@dataclass(frozen=True)
class SeenProcess:
    """A process as its launcher tells (`run_dir/instance_files.py`)."""

    pid: int
    role: str
    site: str
    exit_code: int | None = None


@dataclass(frozen=True)
class SeenRole:
    """A process as the controller tells (`run_dir/status.py`)."""

    role: str
    state: str
    running: int = 0
    waiting: int = 0
    tokens_per_s: float = 0.0
    weight_version: int = -1
    silent_s: float | None = None


@dataclass(frozen=True)
class Observation:
    """A look at a run, at `now` (unix seconds)."""

    now: float
    state: str = ""
    """Of status.json; '': there is none."""
    updated_at: float = 0.0
    step: int = 0
    step_at: float = 0.0
    """When the newest step ended that this controller has done; 0: it has done none."""
    error: str = ""
    processes: Mapping[str, SeenProcess] = field(default_factory=dict)
    roles: Mapping[str, SeenRole] = field(default_factory=dict)
    ready: Mapping[str, int] = field(default_factory=dict)
    """Instances of each pool that get requests."""
    wanted: Mapping[str, int] = field(default_factory=dict)
    silent_sites: Mapping[str, float] = field(default_factory=dict)
    """Seconds since the last sign of a site that does not train."""
    congested: frozenset[str] = frozenset()
    said: tuple[str, ...] = ()
    """Lines of logs that tell of a fault, since the fault (`observation.py`)."""
    launched: bool = True
    """Whether there is a launcher."""

    @property
    def instances(self) -> dict[str, SeenRole]:
        """By name."""
        return {name: role for name, role in self.roles.items() if role.role == "instance"}

    def healthy(self) -> bool:
        """Everything that is to be there is, and says so."""
        return (
            self.launched
            and self.state == "running"
            and self.now - self.updated_at < FRESH_S
            and bool(self.processes)
            and all(one.exit_code is None for one in self.processes.values())
            and all(one.state not in NOT_SERVING and one.state != "suspect" for one in self.instances.values())
            and dict(self.ready) == dict(self.wanted)
            and all((one.silent_s or 0.0) < FRESH_S for one in self.roles.values())
            and all(silent < FRESH_S for silent in self.silent_sites.values())
        )

    def heard_since(self, then: float) -> bool:
        """Whether every process that speaks to the controller has done so since `then` (unix seconds)."""
        silences = [one.silent_s for one in self.roles.values() if one.silent_s is not None]
        silences += list(self.silent_sites.values())
        return self.updated_at > then and all(self.updated_at - silent > then for silent in silences)


class Following:
    """One fault, from its injection on. Times are seconds since then; None: not yet, or not at all."""

    def __init__(self, fault: Fault, before: Observation, targets: frozenset[str], at: float) -> None:
        """
        Args:
            fault: which.
            before: the last look before it.
            targets: names of the processes that are to be replaced; empty: none is.
            at: when it was injected, unix seconds.
        """
        self.fault, self.before, self.targets, self.at = fault, before, targets, at
        self.over = False
        """Whether what was done has been undone, or was done at once; set by whoever injects."""
        self.noticed: float | None = None
        self.serving: float | None = None
        self.recovered: float | None = None
        self.stepped: float | None = None
        self.unnoticed_weights = False
        """Damaged weights were loaded, and nobody said so."""
        self._loaded = False
        """Whether an instance that had to load damaged weights has loaded some."""
        self._back: float | None = None
        """When all targets were there as other processes, unix seconds."""

    @property
    def done(self) -> bool:
        """Whether there is nothing more to wait for."""
        return self.stepped is not None

    def see(self, seen: Observation) -> None:
        """Takes the next look."""
        since = seen.now - self.at
        if self.noticed is None and self._is_noticed(seen):
            self.noticed = since
        if self._back is None and self._are_back(seen):
            self._back = seen.now
        if self.serving is None and self._is_served(seen):
            self.serving = since
        if self.recovered is None and self._is_recovered(seen):
            self.recovered = since
        if self.recovered is not None and self.stepped is None and seen.step_at > self.at + self.recovered:
            self.stepped = since

    def weights_loaded(self, seen: Observation, instance: str, damaged: Mapping[int, float]) -> None:
        """Whether an instance that was started anew serves weights that were damaged before it loaded them.

        Args:
            seen: the look at the run.
            instance: the one that had to load them.
            damaged: versions, and when they were damaged (unix seconds).
        """
        one = seen.roles.get(instance)
        if self._loaded or self._back is None or one is None or one.state in NOT_SERVING or one.weight_version < 0:
            return
        self._loaded = True
        self.unnoticed_weights = seen.now - damaged.get(one.weight_version, seen.now) > LOADING_S

    def _changed(self, name: str, seen: Observation) -> bool:
        before, now = self.before.processes.get(name), seen.processes.get(name)
        return before is not None and (now is None or now.pid != before.pid or now.exit_code is not None)

    def _is_noticed(self, seen: Observation) -> bool:
        kind, target = self.fault.kind, self.fault.target
        if kind in OF_LINKS:
            return seen.silent_sites.get(target, 0.0) > FRESH_S or target in seen.congested - self.before.congested
        if kind is FaultKind.WEIGHTS_CORRUPT:
            return any("corrupt" in line.lower() or "complete weights" in line for line in seen.said)
        if kind is FaultKind.JOURNAL_CORRUPT:
            return any("token journal" in line for line in seen.said)
        if kind is FaultKind.LAUNCHER_KILL:
            return False  # who injected it starts the run again
        if kind in OF_INSTANCES and (role := seen.roles.get(target)) is not None:
            # a short silence may lie between two looks at the status
            silent = any(line.endswith(f": {target} is silent") for line in seen.said)
            gone = silent or role.state in NOT_SERVING or role.state == "suspect"
            return gone or any(self._changed(name, seen) for name in self.targets)
        return seen.state == "failed" or any(self._changed(name, seen) for name in self.targets)

    def _are_back(self, seen: Observation) -> bool:
        now = {name: seen.processes.get(name) for name in self.targets}
        return all(
            one is not None and one.exit_code is None and one.pid != self.before.processes[name].pid
            for name, one in now.items()
        )

    def _is_served(self, seen: Observation) -> bool:
        """After the loss of an instance: nothing is at it, and others generate. After any other death: instances
        generate for whoever came in its place."""
        kind, target = self.fault.kind, self.fault.target
        others = [one for name, one in seen.instances.items() if name != target]
        if kind is FaultKind.INSTANCE_PAUSE or kind in OF_LINKS or seen.state != "running":
            return False
        if kind in OF_INSTANCES:
            gone = seen.roles.get(target)
            if self.noticed is None or gone is None or gone.running or gone.state not in (*NOT_SERVING, "suspect"):
                return False
            waiting = sum(one.waiting for one in seen.roles.values() if one.role == "service")
            return any(one.running > 0 for one in others) or (bool(others) and not waiting)
        if self._back is None or seen.now - self._back < TOLD_S or not seen.heard_since(self._back):
            return False
        return any(one.running > 0 for one in seen.instances.values())

    def _is_recovered(self, seen: Observation) -> bool:
        if not self.over or self._back is None or not seen.healthy():
            return False
        if self.fault.kind in ENDS_RUN and not seen.launched:
            return False
        return seen.heard_since(self._back) and seen.now - self._back > (TOLD_S if self.targets else 0.0)
