"""Follow a fault: when it was noticed, when others served in its place, and when the run had recovered. Pure.

    injected -> noticed -> (others serving) -> fault is over, recovered -> one more step

The run is observed a few times a second (`Observation`), and a stage counts from the first observation that shows it.
The controller's status is up to two seconds old (an instance's heartbeat, its service's, and the status file), so times
are upper bounds. The state from before a fault never counts as recovery: whatever has died must be back as another
process, and every process must have been heard since. Nor does a run recover while its fault lasts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from streamrl.chaos.faults import ENDS_RUN, OF_INSTANCES, OF_LINKS, REPLACED_BY_OWNER, Fault, FaultKind
from streamrl.run_dir.remote_site import RemoteSite
from streamrl.run_dir.status import RoleStatus

NOT_SERVING = frozenset({"dead", "starting", "stale", "draining", "gone"})
"""States of an instance that takes no requests (`generation/site/instance_life.py`)."""
FRESH_S = 5.0
"""Most seconds between two writes of the status under load; normally the controller writes twice a second."""
TOLD_S = 2.0
"""Most seconds until an instance's state is in the status file."""
LOADING_S = 6.0
"""Most seconds from opening a version until the status file shows it as served.

A version that was damaged later than that may have been read undamaged.
"""


@dataclass(frozen=True)
class SeenProcess:
    """A process as its launcher reports it (`run_dir/instance_files.py`)."""

    pid: int
    role: str
    site: str
    exit_code: int | None = None


@dataclass(frozen=True)
class Observation:
    """The state of a run at `now` (unix seconds)."""

    now: float
    state: str = ""
    """State in status.json; '': there is no file."""
    updated_at: float = 0.0
    step: int = 0
    step_at: float = 0.0
    """End of the newest step by this controller, in unix seconds; 0: it has done none."""
    error: str = ""
    processes: Mapping[str, SeenProcess] = field(default_factory=dict)
    roles: Mapping[str, RoleStatus] = field(default_factory=dict)
    ready: Mapping[str, int] = field(default_factory=dict)
    """Number of instances that take requests, by pool."""
    wanted: Mapping[str, int] = field(default_factory=dict)
    sites: Mapping[str, RemoteSite] = field(default_factory=dict)
    said: tuple[str, ...] = ()
    """Log lines since the fault that report it (`observation.py`)."""
    launched: bool = True
    """Whether the launcher is running."""

    @property
    def instances(self) -> dict[str, RoleStatus]:
        """Instances by name."""
        return {name: role for name, role in self.roles.items() if role.role == "instance"}

    def healthy(self) -> bool:
        """Return whether every expected process runs and has reported recently."""
        return (
            self.launched
            and self.state == "running"
            and self.now - self.updated_at < FRESH_S
            and bool(self.processes)
            and all(one.exit_code is None for one in self.processes.values())
            and all(one.state not in NOT_SERVING and one.state != "suspect" for one in self.instances.values())
            and dict(self.ready) == dict(self.wanted)
            and all((one.silent_s or 0.0) < FRESH_S for one in self.roles.values())
            and all(site.silent_s < FRESH_S for site in self.sites.values())
        )

    def heard_since(self, then: float) -> bool:
        """Return whether the controller has heard every process since `then` (unix seconds)."""
        silences = [one.silent_s or 0.0 for one in self.roles.values()] + [
            site.silent_s for site in self.sites.values()
        ]
        return self.updated_at - max(silences, default=0.0) > then


class Following:
    """The progress of one fault; times are seconds since its injection, None: not yet, or not at all."""

    def __init__(self, fault: Fault, before: Observation, targets: frozenset[str], at: float) -> None:
        """Follow a fault.

        Args:
            before: the last observation before it.
            targets: names of the processes that must be replaced.
            at: when it was injected, unix seconds.
        """
        self.fault, self.before, self.targets, self.at = fault, before, targets, at
        self.over = False
        """Whether the fault has been undone or was momentary; set by the caller."""
        self.noticed: float | None = None
        self.serving: float | None = None
        self.recovered: float | None = None
        self.stepped: float | None = None
        self.unnoticed_weights = False
        """Whether damaged weights were loaded without any report."""
        self._loaded = False
        """Whether an instance that had to load damaged weights has loaded some."""
        self._back: float | None = None
        """Time at which all targets were back as other processes, in unix seconds."""

    @property
    def done(self) -> bool:
        """Whether the run has recovered and done a further step."""
        return self.stepped is not None

    def see(self, seen: Observation) -> None:
        """Take the next observation into account."""
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

    def weights_loaded(self, seen: Observation, damaged: Mapping[int, float]) -> None:
        """Check whether a restarted instance serves weights that were damaged before it loaded them.

        Args:
            damaged: versions, and when they were damaged (unix seconds).
        """
        one = seen.roles.get(self.fault.target)
        if self._loaded or self._back is None or one is None or one.state in NOT_SERVING or one.weight_version is None:
            return
        self._loaded = True
        self.unnoticed_weights = seen.now - damaged.get(one.weight_version, seen.now) > LOADING_S

    def _changed(self, name: str, seen: Observation) -> bool:
        before, now = self.before.processes.get(name), seen.processes.get(name)
        return before is not None and (now is None or now.pid != before.pid or now.exit_code is not None)

    def _is_noticed(self, seen: Observation) -> bool:
        kind, target = self.fault.kind, self.fault.target
        if kind in OF_LINKS:
            before, now = self.before.sites.get(target), seen.sites.get(target)
            congested = before is not None and before.congested
            return now is not None and (now.silent_s > FRESH_S or (now.congested and not congested))
        if kind is FaultKind.WEIGHTS_CORRUPT:
            return any("corrupt" in line.lower() or "complete weights" in line for line in seen.said)
        if kind is FaultKind.JOURNAL_CORRUPT:
            return any("token journal" in line for line in seen.said)
        if kind in REPLACED_BY_OWNER:
            what = "a process of environment" if kind is FaultKind.ENVIRONMENT_KILL else "agent worker is replaced"
            return any(what in line for line in seen.said)
        if kind is FaultKind.ENDPOINT_PAUSE:
            paused = seen.roles.get(target)
            return paused is not None and (paused.silent_s or 0.0) > FRESH_S
        if kind is FaultKind.LAUNCHER_KILL:
            return False  # the study itself notices it, and restarts the run
        if kind in OF_INSTANCES and (role := seen.roles.get(target)) is not None:
            # A short silence may fall between two readings of the status, so the log is read, too.
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
        """Return whether others have taken over.

        After the loss of an instance: it has no requests, and others generate. After any other death: instances
        generate for its replacement.
        """
        kind, target = self.fault.kind, self.fault.target
        others = [one for name, one in seen.instances.items() if name != target]
        pauses = kind in (FaultKind.INSTANCE_PAUSE, FaultKind.ENDPOINT_PAUSE)
        if pauses or kind in OF_LINKS or kind in REPLACED_BY_OWNER or seen.state != "running":
            return False
        if kind in OF_INSTANCES:
            gone = seen.roles.get(target)
            if self.noticed is None or gone is None or gone.running or gone.state not in (*NOT_SERVING, "suspect"):
                return False
            waiting = any(one.waiting for one in seen.roles.values() if one.role == "service")
            return any(one.running for one in others) or (bool(others) and not waiting)
        if self._back is None or seen.now - self._back < TOLD_S or not seen.heard_since(self._back):
            return False
        return any(one.running for one in seen.instances.values())

    def _is_recovered(self, seen: Observation) -> bool:
        if not self.over or self._back is None or not seen.healthy():
            return False
        if self.fault.kind in ENDS_RUN and not seen.launched:
            return False
        if self.fault.kind in REPLACED_BY_OWNER and self.noticed is None:
            return False  # its owner has not replaced it yet
        return seen.heard_since(self._back) and seen.now - self._back > (TOLD_S if self.targets else 0.0)
