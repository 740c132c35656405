"""How an instance's steps compare with what its step curve says, and what that makes of the curve."""

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
"""Of a stretch of work: of fewer, one prompt that was read in says more than the steps."""

ENOUGH = 5
"""Stretches of work from which on their median counts."""
KEPT = 30
"""Newest stretches of each batch size that are kept: half a minute of work."""


def pace(curve: StepCurve, before: Worked, now: Worked) -> float | None:
    """How many times as long as the curve says the steps of a stretch of work took.

    A running request gets one token per step, so the mean step took request_s / tokens, and its batch was
    request_s / busy_s. Prompts that were read in meanwhile count as part of it.

    Args:
        curve: the instance's.
        before: what it had done when the stretch began.
        now: what it has done.

    Returns:
        None: it has done too little.
    """
    tokens, request_s, busy_s = now.tokens - before.tokens, now.request_s - before.request_s, now.busy_s - before.busy_s
    if tokens < LEAST_TOKENS or busy_s <= 0:
        return None
    return request_s / tokens / float(curve.base(request_s / busy_s))


class WorkedCurve:
    """An instance's step curve as it was measured at the start, improved by the work that it has done since: pure.

    Each stretch of work says how many times as long as the curve says its steps took (`pace`). Where enough of them
    were near a batch size, the curve there is multiplied by their median; elsewhere by that of all, so that one size
    that was seen under load does not stick out of others that were measured without.
    """

    def __init__(self, start: StepCurve, sizes: Sequence[int]) -> None:
        """
        Args:
            start: as measured.
            sizes: batch sizes at which it gets points.
        """
        self.start = start
        self._ratios: dict[int, deque[float]] = {size: deque(maxlen=KEPT) for size in {*sizes, *start.batches}}

    def saw(self, batch: float, ratio: float) -> None:
        """A stretch of work, with its mean batch size and its pace."""
        self._ratios[min(self._ratios, key=lambda size: abs(math.log(batch / size)))].append(ratio)

    @property
    def curve(self) -> StepCurve:
        """As good as it is known now."""
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
