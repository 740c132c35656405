"""Step times of a site's instances, as used in its plans."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from scheduler.cost.decode import StepCurve
from scheduler.simulation.generation_simulator import SimulatedInstance
from streamrl.config.cluster import GenerationPool

log = logging.getLogger(__name__)

CHANGE = 0.1
"""Smallest relative change of a step time that is passed on; two measurements differ by less."""
DISAGREEMENT = 1.25
"""Ratio from which two measurements of the same kind of instance are said to disagree: an assumption, what two stable
ones that are off by a `step_measurement.SPREAD` in opposite directions may reach."""
CONTEXT = 1000
"""Tokens of context of each request at which step times are compared, besides those without context."""


class FleetCurves:
    """Step times shared by instances of a kind: the mean of their measurements.

    So plans do not take noise for a difference between instances. Measurements that are doubtful count only while there
    are no others. Those that disagree all the same are averaged until work replaces them, which is logged and in
    `note`.
    """

    def __init__(self, pools: Mapping[str, GenerationPool]) -> None:
        self._pools = pools
        self._measured: list[tuple[str, StepCurve, bool]] = []
        self._worked: dict[str, tuple[str, StepCurve, bool]] = {}
        self._gone: set[str] = set()
        """Instances that have left, whose work is all that is known of their kind."""

    def measured(self, pool: str, curve: StepCurve, doubts: str = "") -> None:
        """Add the curve that an instance of a pool measured as it started, and why it is doubtful ('': it is not)."""
        before = self.note(pool)
        self._measured.append((pool, curve, bool(doubts)))
        if (note := self.note(pool)) and note != before:
            log.warning("%s", note)

    def knows(self, pool: str) -> bool:
        """Return whether there are step times of a pool's kind."""
        return bool(self._known(pool))

    def note(self, pool: str) -> str:
        """Return a line about disagreeing measurements of a pool's kind; '': they agree, or work replaced them."""
        found = disagreement(self._at_start(pool))
        if found is None or self._alike(self._worked.values(), pool, sound=True):
            return ""
        batch, shortest, longest = found
        return (
            f"instances like those of pool {pool} measured {1e3 * shortest:.4g} to {1e3 * longest:.4g} ms for a step "
            f"of batch {batch}; plans use the mean until their work shows which is right"
        )

    def doubtful(self, pool: str) -> bool:
        """Return whether all that is known of a pool's kind is doubtful."""
        return not (
            self._alike(self._worked.values(), pool, sound=True) or self._alike(self._measured, pool, sound=True)
        )

    def worked(self, name: str, pool: str, curve: StepCurve, doubtful: bool = False) -> None:
        """Set the curve that an instance's work shows (`pace.WorkedCurve`).

        It replaces the curves that instances of its kind measured as they started; one that is still doubtful replaces
        doubtful ones only.
        """
        self._worked[name] = pool, curve, doubtful
        self._gone.discard(name)
        self._forget_gone()

    def forget(self, name: str) -> None:
        """Forget the curve of an instance that has left, as soon as work of others of its kind shows one as sound."""
        if name in self._worked:
            self._gone.add(name)
            self._forget_gone()

    def _forget_gone(self) -> None:
        for name in sorted(self._gone):
            pool, _, doubtful = self._worked[name]
            others = [one for other, one in self._worked.items() if other != name]
            if self._alike(others, pool, sound=not doubtful):
                del self._worked[name]
                self._gone.discard(name)

    def simulated(self, name: str, pool: str, slots: int) -> SimulatedInstance:
        """Return an instance with the step times of its kind."""
        return SimulatedInstance(name, StepCurve.mean(self._known(pool)), slots, pool, self.doubtful(pool))

    def _known(self, pool: str) -> list[StepCurve]:
        """Return the best curves of a pool's kind: sound before doubtful ones, and work before measurements."""
        sources = self._worked.values(), self._measured
        found = (self._alike(curves, pool, sound) for sound in (True, False) for curves in sources)
        return next(filter(None, found), [])

    def _at_start(self, pool: str) -> list[StepCurve]:
        return self._alike(self._measured, pool, sound=True) or self._alike(self._measured, pool, sound=False)

    def _alike(self, curves: Iterable[tuple[str, StepCurve, bool]], pool: str, sound: bool) -> list[StepCurve]:
        """Return the curves of a pool's kind that are sound, or all of them."""
        kind = self._kind(pool)
        return [curve for other, curve, doubtful in curves if self._kind(other) == kind and not (sound and doubtful)]

    def _kind(self, pool: str) -> tuple[str, int, int]:
        found = self._pools[pool]
        return found.gpu, found.gpus_per_replica, found.threads


def differ(one: StepCurve, other: StepCurve) -> bool:
    """Return whether two curves are so far apart that plans should change.

    They are if their step times differ by more than the fraction `CHANGE` at a batch size that either of them has,
    without context or with `CONTEXT` tokens of it for each request.
    """
    sizes = np.asarray(sorted({*one.batches, *other.batches}))
    contexts = np.asarray([[0], [CONTEXT]]) * sizes
    return bool(np.any(np.abs(np.log(one.step(sizes, contexts) / other.step(sizes, contexts))) > np.log1p(CHANGE)))


def disagreement(curves: Sequence[StepCurve]) -> tuple[int, float, float] | None:
    """Return where measurements of the same kind of instance disagree most.

    Returns:
        The batch size, and its shortest and its longest step time in seconds; None: they agree within `DISAGREEMENT`.
    """
    sizes = sorted({size for curve in curves for size in curve.batches})
    if len(curves) < 2:
        return None
    seconds = np.asarray([curve.base(sizes) for curve in curves])
    shortest, longest = seconds.min(axis=0), seconds.max(axis=0)
    worst = int(np.argmax(longest / shortest))
    if longest[worst] <= DISAGREEMENT * shortest[worst]:
        return None
    return sizes[worst], float(shortest[worst]), float(longest[worst])
