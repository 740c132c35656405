"""Step times of a site's instances, as its plans take them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from scheduler.cost.decode import StepCurve
from scheduler.simulation.generation_simulator import SimulatedInstance
from streamrl.config.cluster import GenerationPool

CHANGE = 0.1
"""Of a step time: less is not passed on, as it would be within what two measurements differ by."""


class FleetCurves:
    """Like instances have the same step times, the mean of what they measured, so that plans do not take noise for a
    difference."""

    def __init__(self, pools: Mapping[str, GenerationPool]) -> None:
        self._pools = pools
        self._measured: list[tuple[str, StepCurve]] = []
        self._worked: dict[str, tuple[str, StepCurve]] = {}

    def measured(self, pool: str, curve: StepCurve) -> None:
        """What an instance of a pool has measured while nothing else disturbed it."""
        self._measured.append((pool, curve))

    def worked(self, name: str, pool: str, curve: StepCurve) -> None:
        """What an instance's work says by now (`pace.WorkedCurve`): it counts in place of what instances like it have
        measured as they started."""
        self._worked[name] = pool, curve

    def simulated(self, name: str, pool: str, slots: int) -> SimulatedInstance:
        """An instance, with the step times of its kind."""
        worked = self._alike(self._worked.values(), pool)
        return SimulatedInstance(name, StepCurve.mean(worked or self._alike(self._measured, pool)), slots, pool)

    def _alike(self, curves: Iterable[tuple[str, StepCurve]], pool: str) -> list[StepCurve]:
        return [curve for other, curve in curves if self._kind(other) == self._kind(pool)]

    def _kind(self, pool: str) -> tuple[str, int, int]:
        found = self._pools[pool]
        return found.gpu, found.gpus_per_replica, found.threads


def differ(one: StepCurve, other: StepCurve) -> bool:
    """Whether plans by one curve would be other than by the other: their step times are further apart than `CHANGE`, in
    proportion, at a batch size that either of them has."""
    sizes = sorted({*one.batches, *other.batches})
    return bool(np.any(np.abs(np.log(one.base(sizes) / other.base(sizes))) > np.log1p(CHANGE)))
