"""Time that dispatch with forecasts saves, by simulation, until what the schedule waits for (`dispatch_objective.py`).

The same requests are simulated under least-loaded dispatch, under a policy with its forecasts, and under that policy
with the true lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from scheduler.cost.length_forecast import Forecast
from scheduler.dispatch.dispatch_objective import MAKESPAN, DispatchObjective
from scheduler.dispatch.policy import DispatchPolicy
from scheduler.dispatch.registry import make_policy
from scheduler.simulation.generation_simulator import SimulatedInstance, SimulatedRequest, simulate

RESAMPLES = 3
"""Number of resampled batches that a step is judged by besides itself."""


@dataclass(frozen=True)
class Saving:
    """Predicted seconds until what the schedule waits for: the makespan, or the end of a streamed training."""

    least_loaded: float
    """Seconds under data-parallel load balancing, which knows nothing of lengths."""
    policy: float
    """Seconds under the policy with the forecasts that the requests carry."""
    oracle: float
    """Seconds under the same policy with the true lengths as forecasts."""

    @property
    def saved(self) -> float:
        """Share of least-loaded's time that the policy saves; negative if it is slower."""
        return 1.0 - self.policy / self.least_loaded if self.least_loaded else 0.0

    @property
    def captured(self) -> float | None:
        """Share of the oracle's saving that the policy reaches; None where the oracle saves less than 0.1 %."""
        possible = self.least_loaded - self.oracle
        return (self.least_loaded - self.policy) / possible if possible > 1e-3 * self.least_loaded else None

    def __add__(self, other: Saving) -> Saving:
        return Saving(self.least_loaded + other.least_loaded, self.policy + other.policy, self.oracle + other.oracle)


@dataclass(frozen=True)
class Replay:
    """Replays batches under a policy and under least-loaded dispatch."""

    fleet: Sequence[SimulatedInstance]
    policy: str = "skew-aware"
    """A name of `scheduler.dispatch.registry`."""
    longest: float = float("inf")
    """Largest number of tokens that a request may produce."""
    affinity: int = 0
    """See `make_policy`; placement by load keeps siblings together with it, as a live run does."""
    objective: DispatchObjective = MAKESPAN
    """What is timed, and what the policy makes small."""

    def seconds(self, policy: str, requests: Sequence[SimulatedRequest]) -> float:
        """Simulate one batch under any policy and return the seconds until what the objective waits for."""
        made = make_policy(policy, self.longest, self.affinity, self.objective)
        return waited(made, requests, self.fleet, self.objective)

    def saving(self, requests: Sequence[SimulatedRequest], same: Saving | None = None) -> Saving:
        """Simulate one batch three times; add up the results of several batches.

        Args:
            requests: requests with true lengths and the forecasts that the policy uses (None: no forecast).
            same: the result of the same batch with other forecasts; what does not depend on them is taken from it.
        """
        seconds = self.seconds(self.policy, requests)
        if same is not None:
            return replace(same, policy=seconds)
        known = [replace(request, forecast=Forecast.exactly(request.length)) for request in requests]
        return Saving(self.seconds("least-loaded", requests), seconds, self.seconds(self.policy, known))

    def resampled_ratios(self, requests: Sequence[SimulatedRequest]) -> list[float]:
        """Return [RESAMPLES] seconds under the policy divided by those under least-loaded dispatch, on resampled
        batches."""
        ratios = []
        for seed in range(RESAMPLES):
            some = resampled(requests, seed)
            least = self.seconds("least-loaded", some)
            ratios.append(self.seconds(self.policy, some) / least if least > 0 else 1.0)
        return ratios


def waited(
    policy: DispatchPolicy,
    requests: Sequence[SimulatedRequest],
    fleet: Sequence[SimulatedInstance],
    objective: DispatchObjective = MAKESPAN,
) -> float:
    """Simulate one batch and return the seconds until what the objective waits for."""
    outcome = simulate(policy, requests, fleet)
    if objective is None:
        return outcome.makespan
    ends = np.asarray([[outcome.finished[request.request_id] for request in requests]])
    tokens = np.asarray([[request.prompt_tokens + request.length for request in requests]])
    return float(objective.seconds(ends, [request.group_id for request in requests], tokens)[0])


def resampled(requests: Sequence[SimulatedRequest], seed: int) -> list[SimulatedRequest]:
    """Draw as many groups as there are, with replacement (a bootstrap; siblings stay together).

    One batch's makespan is its longest request's, so a single replay is mostly luck; resampled batches show what else
    could have happened with the same forecasts.
    """
    groups: dict[str, list[SimulatedRequest]] = {}
    for request in requests:
        groups.setdefault(request.group_id, []).append(request)
    every = list(groups.values())
    chosen = np.random.default_rng(seed).integers(len(every), size=len(every)).tolist()
    return [
        replace(request, request_id=f"{number}.{request.request_id}", group_id=f"{number}")
        for number, index in enumerate(chosen)
        for request in every[index]
    ]
