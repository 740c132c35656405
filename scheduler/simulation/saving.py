"""Time that dispatch with forecasts saves, by simulation.

The same requests are simulated under least-loaded dispatch, under a policy with its forecasts, and under that policy
with the true lengths.
"""

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
    """Makespan of data-parallel load balancing, which knows nothing of lengths."""
    policy: float
    """Makespan of the policy with the forecasts that the requests carry."""
    oracle: float
    """Makespan of the same policy with the true lengths as forecasts."""

    @property
    def saved(self) -> float:
        """Share of the least-loaded makespan that the policy saves; negative if it is slower."""
        return 1.0 - self.policy / self.least_loaded if self.least_loaded else 0.0

    @property
    def captured(self) -> float | None:
        """Share of the oracle's saving that the policy reaches; None where the oracle saves less than 0.1 %."""
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
    """Simulate one batch three times; add up the results of several batches.

    Args:
        requests: requests with true lengths and the forecasts that the policy uses (None: no forecast).
        fleet: the instances.
        policy: a name of `scheduler.dispatch.registry`.
        longest: largest number of tokens that a request may produce.
        affinity: see `make_policy`; placement by load keeps siblings together with it, as a live run does.
    """
    known = [replace(request, forecast=Forecast.exactly(request.length)) for request in requests]

    def makespan(name: str, some: Sequence[SimulatedRequest]) -> float:
        return simulate(make_policy(name, longest, affinity), some, fleet).makespan

    return Saving(makespan("least-loaded", requests), makespan(policy, requests), makespan(policy, known))
