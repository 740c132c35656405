"""Detection of instances that are slower than the cost model predicts, relative to the others. Pure.

For each stretch of time in which an instance worked, its step time is divided by that of the curve that plans use
(`StepCurve`). A ratio that all instances share does not count: contexts grow, a machine is shared. So the median of an
instance's last ratios is compared with the median of the others' medians. An instance becomes slow at `SLOW` and
recovers at `WELL`; the distance between the two prevents flapping. A single instance is never judged: no other one
could take its work.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable

SLOW, WELL = 1.5, 1.2
"""Factors over the other instances at which an instance becomes slow, and at which it recovers."""
STRETCHES = 8
"""Number of ratios that the median is taken over; an instance with fewer is not judged."""
OTHERWISE = 1.25
"""Ratio by which a slow instance's factor must change before it is reported again."""


class SlowWatch:
    """Tracks the ratios that instances report, and finds the slow ones."""

    def __init__(self) -> None:
        self.factors: dict[str, float] = {}
        """Slow instances, with the ratio of their step time to what it would be if they were like the others."""
        self._ratios: dict[str, deque[float]] = {}

    def heard(self, instance: str, ratio: float) -> None:
        """Record the ratio of one stretch of work.

        Args:
            instance: its name.
            ratio: its seconds per step, divided by those that plans expect.

        Raises:
            ValueError: the ratio is not a positive number.
        """
        if not 0 < ratio < float("inf"):
            raise ValueError(f"steps of {instance} took {ratio} times as long as its curve says")
        self._ratios.setdefault(instance, deque(maxlen=STRETCHES)).append(ratio)

    def forget(self, instance: str) -> None:
        """Forget an instance that is gone or was replaced by another process."""
        self._ratios.pop(instance, None)
        self.factors.pop(instance, None)

    def changed(self, present: Iterable[str]) -> dict[str, float]:
        """Return the new factors of the present instances whose factor has changed, 1 for those that have recovered.

        `factors` is updated accordingly.
        """
        usual = {
            name: statistics.median(self._ratios[name])
            for name in present
            if len(self._ratios.get(name, ())) == STRETCHES
        }
        changes = {}
        for name, ratio in usual.items():
            others = [other for one, other in usual.items() if one != name]
            if not others:
                continue
            slower, known = ratio / statistics.median(others), self.factors.get(name, 1.0)
            if known == 1.0 and slower >= SLOW:
                changes[name] = slower
            elif known > 1.0 and slower <= WELL:
                changes[name] = 1.0
            elif known > 1.0 and not 1 / OTHERWISE < slower / known < OTHERWISE:
                changes[name] = slower
        self.factors = {name: factor for name, factor in (self.factors | changes).items() if factor > 1.0}
        return changes
