"""The life of an instance as its site's service sees it: a pure state machine without clock or I/O.

                            +--------- heard (2) / silent ------------------+
                            v                                               v
    starting --- met ---> stale --- current ---> ready <--- heard / silent ---> suspect
        ^                                          |                              |
        +--- restarted --- dead <------------- died (from any of them) -----------+
                             |
    (any) --- retired ---> draining --- left ---> gone

(2): if it has missed weights (`missed`), or had none before it fell silent.

Only a ready instance gets requests. An instance becomes ready by holding, verified, the weights that its site serves; a
new process holds none, so it is stale first, whatever its predecessor held. A suspect instance gets nothing new, and
others continue its requests. A dead one's requests continue elsewhere, too; it is restarted as long as its budget
lasts, each time after a longer pause.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from streamrl.config.recovery import RecoveryConfig
from streamrl.runtime.restart_budget import restart_time


class Life(StrEnum):
    """A state of an instance."""

    STARTING = "starting"
    """Its process is starting and has not connected yet."""
    STALE = "stale"
    """It is connected, but does not have the served weights."""
    READY = "ready"
    SUSPECT = "suspect"
    """It has been silent for longer than `recovery.suspect_s`."""
    DEAD = "dead"
    DRAINING = "draining"
    """It releases its requests and then ends."""
    GONE = "gone"


ALIVE = frozenset({Life.STARTING, Life.STALE, Life.READY, Life.SUSPECT})
_ALLOWED: dict[str, tuple[frozenset[Life], Life]] = {
    "met": (frozenset({Life.STARTING}), Life.STALE),
    "current": (frozenset({Life.STALE}), Life.READY),
    "silent": (frozenset({Life.STALE, Life.READY}), Life.SUSPECT),
    "heard": (frozenset({Life.SUSPECT}), Life.READY),
    "died": (ALIVE, Life.DEAD),
    "restarted": (frozenset({Life.DEAD}), Life.STARTING),
    "retired": (ALIVE | {Life.DEAD}, Life.DRAINING),
    "left": (frozenset({Life.DRAINING}), Life.GONE),
}
EVENTS = tuple(_ALLOWED)


@dataclass
class InstanceLife:
    """The state of one instance, its process number and its deaths."""

    name: str
    pool: str
    index: int
    process: int = 1
    """Number of its process, counted from 1; every restart adds one."""
    state: Life = Life.STARTING
    missed: bool = False
    """While it is suspect: whether it may have missed weights that others got; set where those are distributed."""
    deaths: list[float] = field(default_factory=list)
    """Times of its deaths in seconds of the caller's clock, oldest first."""

    def on(self, event: str) -> None:
        """Apply one of `EVENTS`.

        Raises:
            ValueError: the event cannot happen in this state.
        """
        before, after = _ALLOWED[event]
        if self.state not in before:
            raise ValueError(f"instance {self.name} is {self.state}: {event!r} cannot happen")
        if event == "silent":
            self.missed = self.state is Life.STALE
        self.state = Life.STALE if event == "heard" and self.missed else after
        if event == "restarted":
            self.process += 1

    def can(self, event: str) -> bool:
        """Return whether an event can happen now."""
        return self.state in _ALLOWED[event][0]

    def died(self, now: float, recovery: RecoveryConfig) -> float | None:
        """Record a death; return when to restart the instance, or None if its budget is used up.

        Args:
            now: seconds of the caller's clock.
            recovery: how often it may be restarted.
        """
        self.on("died")
        return restart_time(recovery, self.deaths, now)
