"""Step times of a site's instances, as its plans take them."""

from __future__ import annotations

from collections.abc import Mapping

from scheduler.cost import StepCurve
from scheduler.simulator import SimulatedInstance
from streamrl.config.cluster import GenerationPool


class FleetCurves:
    """Like instances have the same step times, the mean of what they measured, so that plans do not take noise for a
    difference."""

    def __init__(self, pools: Mapping[str, GenerationPool]) -> None:
        self._pools = pools
        self._measured: list[tuple[str, StepCurve]] = []

    def measured(self, pool: str, curve: StepCurve) -> None:
        """What an instance of a pool has measured while nothing else disturbed it."""
        self._measured.append((pool, curve))

    def simulated(self, name: str, pool: str, slots: int) -> SimulatedInstance:
        """An instance, with the step times of its kind."""
        alike = [curve for other, curve in self._measured if self._kind(other) == self._kind(pool)]
        return SimulatedInstance(name, StepCurve.mean(alike), slots, pool)

    def _kind(self, pool: str) -> tuple[str, int, int]:
        found = self._pools[pool]
        return found.gpu, found.gpus_per_replica, found.threads
