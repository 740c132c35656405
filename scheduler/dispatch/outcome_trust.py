"""Trust in dispatch by what it would have cost or saved. Pure.

After each step its true lengths are known, and so are the forecasts that were made before it. So the step is replayed
in the simulator, dispatched by these forecasts and least-loaded, and so are a few batches resampled from it
(`simulation/saving.py`): one batch's makespan is its longest request's, and mostly luck. The ratios of both times are
recorded here, whether the step was dispatched by forecasts or not. Over the ratios of the newest steps,

    trusted   if   mean <= 1   and   mean + 1.645 sd <= 1.05,

that is: dispatch has not cost time on average, and no more than one step in twenty is expected to be slower by 5 %.
Otherwise dispatch goes by load, until newer replays say that it would have paid. Nothing is believed before the first
replay: forecasts that nobody has tried have not saved anything yet.

The spread of few ratios is uncertain, so it is shrunk towards `USUAL_SPREAD` as if `USUAL_COUNT` steps had had it (an
inverse-chi-squared prior on the variance; resampled batches of one step are not independent, and count as one).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

WINDOW = 8
"""Number of newest steps that count: the forecasts change as the ranker is refitted."""
USUAL_SPREAD, USUAL_COUNT = 0.03, 3.0
"""Standard deviation of the ratio with honest forecasts, and the number of steps that this prior stands for."""
WORST_LOSS = 0.05
"""Largest loss, as a share of least-loaded's time, that one step in twenty may have."""
ONE_IN_TWENTY = 1.645
"""Standard normal deviate above which one draw in twenty lies."""


class OutcomeTrust:
    """Decides from replays whether dispatch goes by forecasts; see the module."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, ...]] = deque(maxlen=WINDOW)

    def record(self, ratios: Sequence[float]) -> None:
        """Record a replayed step.

        Args:
            ratios: seconds of dispatch by forecasts, divided by those of least-loaded dispatch: of the step, and of
                batches resampled from it.

        Raises:
            ValueError: there is no ratio, or one is not a positive number.
        """
        if not ratios or not all(0 < ratio < math.inf for ratio in ratios):
            raise ValueError(f"a replayed step took {list(ratios)} times as long as least-loaded; expected numbers > 0")
        self._steps.append(tuple(ratios))

    @property
    def steps(self) -> int:
        """Number of replayed steps that count."""
        return len(self._steps)

    @property
    def mean(self) -> float | None:
        """Mean ratio over the steps, below 1 where dispatch saves; None before the first replay."""
        return float(np.mean([np.mean(step) for step in self._steps])) if self._steps else None

    @property
    def spread(self) -> float:
        """Standard deviation of the ratios, shrunk towards `USUAL_SPREAD`."""
        every = [ratio for step in self._steps for ratio in step]
        variance = float(np.var(every)) if every else 0.0
        count = len(self._steps)
        return math.sqrt((count * variance + USUAL_COUNT * USUAL_SPREAD**2) / (count + USUAL_COUNT))

    @property
    def trusted(self) -> bool:
        """Whether dispatch should go by forecasts."""
        mean = self.mean
        return mean is not None and mean <= 1.0 and mean + ONE_IN_TWENTY * self.spread <= 1.0 + WORST_LOSS
