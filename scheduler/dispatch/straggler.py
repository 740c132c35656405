"""Which instances are slower than the cost model says, by more than others are. Pure: no clock, no I/O.

An instance tells, for each stretch of time in which it worked, how many times as long its steps took as its curve says
(`StepCurve`). That all of them take longer is no news: contexts grow, a machine is shared. So an instance's figure (the
median of its last ones) is compared with the median of the others' figures. It is slow from `SLOW` on, and no more once
it is below `WELL` again; the gap keeps it from going to and fro. Of an only instance nothing can be said, nor does it
matter: nobody else could take what it has.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable

SLOW, WELL = 1.5, 1.2
"""Times as slow as the others."""
STRETCHES = 8
"""Of which the median counts; an instance of which fewer are known is not judged."""
OTHERWISE = 1.25
"""By so much must a slow instance's figure differ from the one that is known before it is told again."""


class SlowWatch:
    """See the module's text."""

    def __init__(self) -> None:
        self.factors: dict[str, float] = {}
        """Slow instances, and how many times as long their steps take as they would if they were like the others."""
        self._told: dict[str, deque[float]] = {}

    def heard(self, instance: str, ratio: float) -> None:
        """An instance has worked for a stretch of time.

        Args:
            instance: which.
            ratio: its seconds per step, divided by those of its curve.

        Raises:
            ValueError: the ratio is not a positive number.
        """
        if not 0 < ratio < float("inf"):
            raise ValueError(f"steps of {instance} took {ratio} times as long as its curve says")
        self._told.setdefault(instance, deque(maxlen=STRETCHES)).append(ratio)

    def forget(self, instance: str) -> None:
        """It is gone, or another process."""
        self._told.pop(instance, None)
        self.factors.pop(instance, None)

    def changed(self, present: Iterable[str]) -> dict[str, float]:
        """What there is to tell about those that are present: how many times slower they are now, 1 for those that
        are no more; `factors` has it from now on."""
        usual = {
            name: statistics.median(self._told[name]) for name in present if len(self._told.get(name, ())) == STRETCHES
        }
        news = {}
        for name, ratio in usual.items():
            others = [other for one, other in usual.items() if one != name]
            if not others:
                continue
            slower, known = ratio / statistics.median(others), self.factors.get(name, 1.0)
            if known == 1.0 and slower >= SLOW:
                news[name] = slower
            elif known > 1.0 and slower <= WELL:
                news[name] = 1.0
            elif known > 1.0 and not 1 / OTHERWISE < slower / known < OTHERWISE:
                news[name] = slower
        self.factors = {name: factor for name, factor in (self.factors | news).items() if factor > 1.0}
        return news
