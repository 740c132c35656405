"""Step times of a site's instances, as used in its plans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from scheduler.cost.decode import StepCurve
from scheduler.simulation.generation_simulator import SimulatedInstance
from streamrl.config.cluster import GenerationPool

CHANGE = 0.1
"""Smallest relative change of a step time that is passed on; two measurements differ by less."""


class FleetCurves:
    """Step times shared by instances of a kind: the mean of their measurements.

    So plans do not take noise for a difference between instances.
    """

    def __init__(self, pools: Mapping[str, GenerationPool]) -> None:
        self._pools = pools
        self._measured: list[tuple[str, StepCurve]] = []
        self._worked: dict[str, tuple[str, StepCurve]] = {}

    def measured(self, pool: str, curve: StepCurve) -> None:
        """Add the curve that an instance of a pool measured as it started."""
        self._measured.append((pool, curve))

    def worked(self, name: str, pool: str, curve: StepCurve) -> None:
        """Set the curve that an instance's work shows (`pace.WorkedCurve`).

        It replaces the curves that instances of its kind measured as they started.
        """
        self._worked[name] = pool, curve

    def simulated(self, name: str, pool: str, slots: int) -> SimulatedInstance:
        """Return an instance with the step times of its kind."""
        worked = self._alike(self._worked.values(), pool)
        return SimulatedInstance(name, StepCurve.mean(worked or self._alike(self._measured, pool)), slots, pool)

    def _alike(self, curves: Iterable[tuple[str, StepCurve]], pool: str) -> list[StepCurve]:
        return [curve for other, curve in curves if self._kind(other) == self._kind(pool)]

    def _kind(self, pool: str) -> tuple[str, int, int]:
        found = self._pools[pool]
        return found.gpu, found.gpus_per_replica, found.threads


def differ(one: StepCurve, other: StepCurve) -> bool:
    """Return whether two curves are so far apart that plans should change.

    They are if their step times differ by more than the fraction `CHANGE` at a batch size that either of them has.
    """
    sizes = sorted({*one.batches, *other.batches})
    return bool(np.any(np.abs(np.log(one.base(sizes) / other.base(sizes))) > np.log1p(CHANGE)))
