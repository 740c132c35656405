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


def saving(
    requests: Sequence[SimulatedRequest],
    fleet: Sequence[SimulatedInstance],
    policy: str = "skew-aware",
    longest: float = float("inf"),
    affinity: int = 0,
    objective: DispatchObjective = MAKESPAN,
) -> Saving:
    """Simulate one batch three times; add up the results of several batches.

    Args:
        requests: requests with true lengths and the forecasts that the policy uses (None: no forecast).
        fleet: the instances.
        policy: a name of `scheduler.dispatch.registry`.
        longest: largest number of tokens that a request may produce.
        affinity: see `make_policy`; placement by load keeps siblings together with it, as a live run does.
        objective: what is timed, and what the policy makes small.
    """
    known = [replace(request, forecast=Forecast.exactly(request.length)) for request in requests]
    setting = fleet, longest, affinity, objective
    return Saving(
        _waited_under("least-loaded", requests, *setting),
        _waited_under(policy, requests, *setting),
        _waited_under(policy, known, *setting),
    )


def _waited_under(
    policy: str,
    requests: Sequence[SimulatedRequest],
    fleet: Sequence[SimulatedInstance],
    longest: float,
    affinity: int,
    objective: DispatchObjective,
) -> float:
    return waited(make_policy(policy, longest, affinity, objective), requests, fleet, objective)


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


def resampled_ratios(
    requests: Sequence[SimulatedRequest],
    fleet: Sequence[SimulatedInstance],
    policy: str = "skew-aware",
    longest: float = float("inf"),
    affinity: int = 0,
    objective: DispatchObjective = MAKESPAN,
) -> list[float]:
    """Return the seconds under the policy divided by those under least-loaded dispatch, on each resampled batch.

    [RESAMPLES]; arguments as for `saving`.
    """
    ratios = []
    for seed in range(RESAMPLES):
        some = resampled(requests, seed)
        ours, least = (
            _waited_under(name, some, fleet, longest, affinity, objective) for name in (policy, "least-loaded")
        )
        ratios.append(ours / least if least > 0 else 1.0)
    return ratios
