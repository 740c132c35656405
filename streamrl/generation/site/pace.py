"""Comparison of an instance's steps with its step curve, and refinement of the curve from it."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from scheduler.cost.decode import StepCurve

if TYPE_CHECKING:
    from streamrl.generation.instance.engine import Worked

LEAST_TOKENS = 16
"""Fewest tokens of a stretch of work that is judged: with fewer, one prefilled prompt outweighs the steps."""

ENOUGH = 5
"""Stretches of work that are needed before their median counts."""
KEPT = 30
"""Newest stretches kept for each batch size: half a minute of work."""


def pace(curve: StepCurve, before: Worked, now: Worked) -> float | None:
    """Return the ratio of the measured step time of a stretch of work to the one that the curve gives.

    A running request gets one token per step, so the mean step took request_s / tokens, and its batch was
    request_s / busy_s. Prompts that were prefilled meanwhile are part of that time.

    Args:
        curve: step curve of the instance.
        before: its work up to the beginning of the stretch.
        now: its work up to the end of the stretch.

    Returns:
        The ratio; None: too little work to judge.
    """
    tokens, request_s, busy_s = now.tokens - before.tokens, now.request_s - before.request_s, now.busy_s - before.busy_s
    if tokens < LEAST_TOKENS or busy_s <= 0:
        return None
    return request_s / tokens / float(curve.base(request_s / busy_s))


class WorkedCurve:
    """An instance's step curve as measured at the start, refined by the work done since; pure.

    Each stretch of work has a ratio of its step time to the curve's (`pace`). Near batch sizes with enough stretches
    the curve is multiplied by the median of their ratios, elsewhere by the median of all, so that one size seen under
    load does not stand out from others that were measured without load.
    """

    def __init__(self, start: StepCurve, sizes: Sequence[int]) -> None:
        """
        Args:
            start: curve measured at the start.
            sizes: batch sizes at which the refined curve has points.
        """
        self.start = start
        self._ratios: dict[int, deque[float]] = {size: deque(maxlen=KEPT) for size in {*sizes, *start.batches}}

    def saw(self, batch: float, ratio: float) -> None:
        """Add a stretch of work, given by its mean batch size and its pace."""
        self._ratios[min(self._ratios, key=lambda size: abs(math.log(batch / size)))].append(ratio)

    @property
    def curve(self) -> StepCurve:
        """The best estimate so far."""
        seen = [ratio for ratios in self._ratios.values() for ratio in ratios]
        if len(seen) < ENOUGH:
            return self.start
        overall = statistics.median(seen)
        points = {
            size: float(self.start.base(size)) * (statistics.median(ratios) if len(ratios) >= ENOUGH else overall)
            for size, ratios in sorted(self._ratios.items())
        }
        rates = self.start.per_context_token * overall, self.start.per_prefill_token * overall
        return StepCurve.measured(points, *rates)
