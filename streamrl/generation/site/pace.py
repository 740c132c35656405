"""Comparison of an instance's steps with its step curve, and refinement of the curve from it."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence, Set
from typing import NamedTuple

from scheduler.cost.decode import StepCurve
from streamrl.generation.instance.running_requests import Worked

LEAST_TOKENS = 16
"""Fewest tokens of a stretch of work that is judged: with fewer, one prefilled prompt outweighs the steps."""

ENOUGH = 5
"""Stretches of work that are needed before their median counts."""
KEPT = 30
"""Newest stretches kept for each batch size: half a minute of work."""


def pace(curve: StepCurve, before: Worked, now: Worked) -> float | None:
    """Return the ratio of the measured step time of a stretch of work to the one that the curve gives.

    A running request gets one token per step, so the mean step took request_s / tokens, and its batch was
    request_s / busy_s. Its context is taken as the mean of the contexts at both ends of the stretch; an end at which
    nothing ran does not count. Prompts that were prefilled meanwhile are part of that time.

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
    return request_s / tokens / float(curve.step(request_s / busy_s, _context(before, now)))


def _context(before: Worked, now: Worked) -> float:
    contexts = [work.context for work in (before, now) if work.context]
    return statistics.mean(contexts) if contexts else 0.0


class Pace(NamedTuple):
    """A stretch of work that was compared with the instance's step curve, as heartbeats report it."""

    number: int
    """Counted from 1."""
    ratio: float
    """Of its step time to the one that the curve gives."""
    batch: float
    """Its mean batch size."""
    context: float
    """Mean tokens of context of the whole batch."""

    def on(self, own: StepCurve, other: StepCurve) -> float:
        """Return the ratio of its step time to the one that another curve gives; `own` is the instance's."""
        return self.ratio * float(own.step(self.batch, self.context) / other.step(self.batch, self.context))


class Stretches:
    """An instance's work, divided into stretches that are long enough to judge; pure.

    A stretch lasts from one heartbeat to a later one, until it has `LEAST_TOKENS` tokens, so that the slowest instances
    have some, too. Loading weights and having nothing to do end it unjudged.
    """

    def __init__(self, curve: StepCurve, before: Worked) -> None:
        """
        Args:
            curve: step curve of the instance.
            before: its work up to now.
        """
        self.newest: Pace | None = None
        """The newest judged stretch."""
        self._curve, self._before = curve, before
        self._running: Set[str] = frozenset()
        self._prefilled = False

    def heartbeat(self, now: Worked, running: Set[str], updated: bool) -> Pace | None:
        """Continue the stretch up to a heartbeat, or end it.

        Args:
            now: work up to the heartbeat.
            running: requests that run now.
            updated: whether weights were loaded since the last heartbeat.

        Returns:
            The stretch, if it has been judged and no prompts were prefilled in it.
        """
        self._prefilled |= not running <= self._running
        self._running = running
        before = self._before
        ratio = None if updated else pace(self._curve, before, now)
        if ratio is None and running and not updated:
            return None
        prefilled, self._before, self._prefilled = self._prefilled, now, False
        if ratio is None:
            return None
        batch = (now.request_s - before.request_s) / (now.busy_s - before.busy_s)
        self.newest = Pace(self.newest.number + 1 if self.newest else 1, ratio, batch, _context(before, now))
        return None if prefilled else self.newest


class WorkedCurve:
    """An instance's step curve as measured at the start, refined by the work done since; pure.

    Each stretch of work has a ratio of its step time to the curve's (`pace`). Near batch sizes with enough stretches
    the curve is multiplied by the median of their ratios, elsewhere by the median of all, so that one size seen under
    load does not stand out from others that were measured without load. Where the start's measurement is doubtful, its
    shape does not count: as soon as one batch size has enough stretches, only such sizes are points of the curve.
    """

    def __init__(self, start: StepCurve, sizes: Sequence[int], doubts: str = "") -> None:
        """
        Args:
            start: curve measured at the start.
            sizes: batch sizes at which the refined curve has points.
            doubts: why the measurement at the start is doubtful; '': it is not.
        """
        self.start, self._start_doubts = start, doubts
        self._ratios: dict[int, deque[float]] = {size: deque(maxlen=KEPT) for size in {*sizes, *start.batches}}

    def saw(self, batch: float, ratio: float) -> None:
        """Add a stretch of work, given by its mean batch size and its pace."""
        self._ratios[min(self._ratios, key=lambda size: abs(math.log(batch / size)))].append(ratio)

    @property
    def _shown(self) -> bool:
        """Whether any batch size has enough stretches."""
        return any(len(ratios) >= ENOUGH for ratios in self._ratios.values())

    @property
    def doubts(self) -> str:
        """Why the curve is doubtful; '': it is not, or work has replaced what was."""
        return "" if self._shown else self._start_doubts

    @property
    def curve(self) -> StepCurve:
        """The best estimate so far."""
        seen = [ratio for ratios in self._ratios.values() for ratio in ratios]
        if len(seen) < ENOUGH:
            return self.start
        overall = statistics.median(seen)
        only_shown = bool(self._start_doubts) and self._shown
        points = {
            size: float(self.start.base(size)) * (statistics.median(ratios) if len(ratios) >= ENOUGH else overall)
            for size, ratios in sorted(self._ratios.items())
            if len(ratios) >= ENOUGH or not only_shown
        }
        rates = self.start.per_context_token * overall, self.start.per_prefill_token * overall
        return StepCurve.measured(points, *rates)
