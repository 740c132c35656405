"""What dispatching with forecasts saves: the same requests simulated under least-loaded, under a policy with its
forecasts, and under that policy with the true lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from scheduler.cost.length_forecast import Forecast
from scheduler.dispatch.registry import make_policy
from scheduler.simulation.generation_simulator import SimulatedInstance, SimulatedRequest, simulate


@dataclass(frozen=True)
class Saving:
    """Predicted makespans of generation, in seconds."""

    least_loaded: float
    """Data-parallel load balance, which knows nothing of lengths."""
    policy: float
    """With the forecasts that the requests carry."""
    oracle: float
    """The same policy, told the true lengths."""

    @property
    def saved(self) -> float:
        """Share of least-loaded's time that the policy saves; negative if it is slower."""
        return 1.0 - self.policy / self.least_loaded if self.least_loaded else 0.0

    @property
    def captured(self) -> float | None:
        """Share of the oracle's saving that the forecasts' is; None where the oracle saves less than 0.1 %."""
        possible = self.least_loaded - self.oracle
        return (self.least_loaded - self.policy) / possible if possible > 1e-3 * self.least_loaded else None

    def __add__(self, other: Saving) -> Saving:
        return Saving(self.least_loaded + other.least_loaded, self.policy + other.policy, self.oracle + other.oracle)


def saving(
    requests: Sequence[SimulatedRequest],
    fleet: Sequence[SimulatedInstance],
    policy: str = "skew-aware",
    longest: float = float("inf"),
    affinity: int = 0,
) -> Saving:
    """Simulates one batch three times; add up the results of several batches.

    Args:
        requests: with true lengths, and the forecasts that the policy is to use (None: it has none).
        fleet: the instances.
        policy: a name of `scheduler.dispatch.registry`.
        longest: no request produces more tokens than this.
        affinity: see `make_policy`; placing by load keeps siblings together with it, as a live run does.
    """
    known = [replace(request, forecast=Forecast.exactly(request.length)) for request in requests]

    def makespan(name: str, some: Sequence[SimulatedRequest]) -> float:
        return simulate(make_policy(name, longest, affinity), some, fleet).makespan

    return Saving(makespan("least-loaded", requests), makespan(policy, requests), makespan(policy, known))
