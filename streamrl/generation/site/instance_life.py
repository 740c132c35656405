"""The life of an instance, as its site's service sees it. A pure state machine: no clock, no I/O.

                            +--------- heard (2) / silent ------------------+
                            v                                               v
    starting --- met ---> stale --- current ---> ready <--- heard / silent ---> suspect
        ^                                          |                              |
        +--- restarted --- dead <------------- died (from any of them) -----------+
                             |
    (any) --- retired ---> draining --- left ---> gone

(2): if it has missed weights (`missed`), or had none before it fell silent.

Only a ready instance gets requests. One becomes ready by holding, verified, the weights that its site serves; a new
process holds none, so it is stale first, whatever its predecessor held. A suspect one gets nothing new, and others
go on with what it worked on. What a dead one worked on goes on elsewhere, too; it is started again as long as its
budget lasts, each time after a longer pause.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from streamrl.runtime.restart_budget import RestartBudget


class Life(StrEnum):
    """Where an instance is in its life."""

    STARTING = "starting"
    """Its process is on its way."""
    STALE = "stale"
    """It is there, without the weights that are served."""
    READY = "ready"
    SUSPECT = "suspect"
    """No sign of life for a moment."""
    DEAD = "dead"
    DRAINING = "draining"
    """It gives back what it works on and then ends."""
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
    """One instance."""

    name: str
    pool: str
    index: int
    process: int = 1
    """Number of its process; each new one has the next."""
    state: Life = Life.STARTING
    missed: bool = False
    """While it is suspect: whether what weights it holds is not known; set by whoever gives weights to others."""
    deaths: list[float] = field(default_factory=list)
    """When it died, seconds on the caller's clock; the newest last."""

    def on(self, event: str) -> None:
        """Takes one of `EVENTS`.

        Raises:
            ValueError: it cannot happen in this state.
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
        """Whether an event can happen now."""
        return self.state in _ALLOWED[event][0]

    def died(self, now: float, budget: RestartBudget) -> float | None:
        """It has died; when it is to be started again, or None if its budget is used up.

        Args:
            now: seconds on the caller's clock.
            budget: how often it may be.
        """
        self.on("died")
        return budget.after_death(self.deaths, now)
