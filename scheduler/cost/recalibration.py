"""Forecasts corrected by what earlier ones were worth, so that plans count on being wrong as often as they are. Pure.

A forecast can miss by its place, by its spread, or be about nothing at all. With m the mean log length of a forecast
and z the log of the length that came of it, least squares over the newest steps give

    z = a + b m + rest.

b is shrunk by its standard error s to b max(0, 1 - s^2 / b^2) (James and Stein 1961, positive part; siblings are not
independent, so s is that of clusters by group), and kept between 0 and 1. The forecast moves to a + b m. The rest is
scored in the forecast's own shape: at the length that the forecast exceeds with probability p, the score is the normal
deviate that exceeds with probability p. Honest forecasts have normal scores. The quantiles of the scores that were
found (Kaplan and Meier; a length at the limit was cut off) replace the normal ones:

* overconfident forecasts become wide, and those that did not foresee runaways get a share that runs to the limit;
* forecasts that say nothing (b = 0) all become the distribution of all lengths, by which no request is placed apart;
* forecasts that rank the wrong way round count as those that say nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from scheduler.cost.decode import Floats
from scheduler.cost.length_forecast import (
    MIDPOINTS,
    NORMAL_SCORES,
    TAIL_LEVELS,
    TAIL_SCORES,
    Forecast,
    log_quantiles,
    stack,
    tails_of,
)
from scheduler.cost.survival import Bools, survival_quantiles

WINDOW = 8
"""Number of newest steps that count."""
FEWEST = 25
"""Number of samples without which nothing is corrected."""
LEAST_SPREAD = 0.05
"""Log length per normal score by which the outer ends of a forecast go on at least, so that a known length can miss."""
SCORES = np.concatenate([NORMAL_SCORES, TAIL_SCORES])
"""[21] normal scores of a forecast's values and tail."""


class Recalibration:
    """Learns from steps what forecasts were worth, and corrects new ones; see the module."""

    def __init__(self) -> None:
        self._steps: deque[tuple[Floats, Floats, Bools, list[str]]] = deque(maxlen=WINDOW)
        self.intercept, self.slope = 0.0, 1.0
        """The module's a and b."""
        self.scores = SCORES
        """[21] quantiles of the scores at a forecast's levels."""

    def record(
        self, forecasts: Sequence[Forecast], lengths: Sequence[float], groups: Sequence[str], ended: Sequence[bool]
    ) -> None:
        """Learn from a step.

        Args:
            forecasts: [n] forecasts as they were before any correction.
            lengths: [n] tokens that came of each.
            groups: [n] groups; siblings are not independent.
            ended: [n] whether each ended there, and was not cut off at the limit.
        """
        if not len(forecasts):
            return
        logs = log_quantiles(stack(forecasts), tails_of(forecasts))
        values = np.log(np.maximum(np.asarray(lengths, dtype=np.float64), 1.0))
        self._steps.append((logs, values, np.asarray(ended, dtype=bool), list(groups)))
        if sum(len(step[1]) for step in self._steps) >= FEWEST:
            self._fit()

    def _fit(self) -> None:
        logs, values, ended = (np.concatenate([step[part] for step in self._steps]) for part in range(3))
        names = [f"{number}/{group}" for number, step in enumerate(self._steps) for group in step[3]]
        means = logs[:, : len(MIDPOINTS)].mean(axis=1)
        self.slope = _shrunk_slope(means, values, np.unique(names, return_inverse=True)[1])
        self.intercept = float(values.mean() - self.slope * means.mean())
        found = _scores_at(logs, values - self.intercept - self.slope * means + means)
        # nothing is known beyond what was cut off last, so that one counts as an end (Efron 1967)
        quantiles = survival_quantiles(found, ended | (found >= found.max()), _LEVELS, rate=1.0)
        # the few largest do not show the last thousandth: at least the tail of a normal deviate with their spread
        normal = quantiles[len(MIDPOINTS) - 1] * TAIL_SCORES / NORMAL_SCORES[-1]
        quantiles[len(MIDPOINTS) :] = np.maximum(quantiles[len(MIDPOINTS) :], normal)
        self.scores = np.maximum.accumulate(quantiles)

    def corrected(self, forecast: Forecast, limit: float = np.inf) -> Forecast:
        """Return a forecast as earlier ones teach to read it; the same before `FEWEST` samples were seen.

        Args:
            forecast: any forecast.
            limit: largest length.
        """
        if self.scores is SCORES:
            return forecast
        logs = log_quantiles(stack([forecast]), tails_of([forecast]))[0]
        mean = float(logs[: len(MIDPOINTS)].mean())
        lowest, highest = _outer_slopes(logs[None])
        reached = np.interp(self.scores, SCORES, logs)
        reached += float(lowest[0]) * np.minimum(self.scores - SCORES[0], 0.0)
        reached += float(highest[0]) * np.maximum(self.scores - SCORES[-1], 0.0)
        lengths = np.clip(np.exp(reached - mean + self.intercept + self.slope * mean), 1.0, limit).tolist()
        return Forecast(tuple(lengths[: len(MIDPOINTS)]), tuple(lengths[len(MIDPOINTS) :]))


_LEVELS = np.concatenate([MIDPOINTS, TAIL_LEVELS])


def _shrunk_slope(means: Floats, values: Floats, clusters: np.ndarray) -> float:
    """Return the module's b, shrunk by its standard error (clusters: number of each sample's group)."""
    x = means - means.mean()
    squares = float(x @ x)
    if squares < 1e-9:
        return 0.0
    slope = float(x @ values) / squares
    rest = values - values.mean() - slope * x
    error = float((np.bincount(clusters, x * rest) ** 2).sum()) / squares**2
    return min(1.0, slope * max(0.0, 1.0 - error / slope**2)) if slope > 0 else 0.0


def _scores_at(logs: Floats, values: Floats) -> Floats:
    """Return [n] normal scores at which forecasts, [n, 21] logs, reach the given log lengths [n]."""
    below = np.clip((logs < values[:, None]).sum(axis=1) - 1, 0, len(SCORES) - 2)
    rows = np.arange(len(values))
    low, high = logs[rows, below], logs[rows, below + 1]
    share = np.clip((values - low) / np.maximum(high - low, 1e-9), 0.0, 1.0)
    lowest, highest = _outer_slopes(logs)
    inside = SCORES[below] + share * (SCORES[below + 1] - SCORES[below])
    before, after = np.minimum(values - logs[:, 0], 0.0), np.maximum(values - logs[:, -1], 0.0)
    return np.asarray(inside + before / lowest + after / highest)


def _outer_slopes(logs: Floats) -> tuple[Floats, Floats]:
    """Return [n] log lengths per score below and above each forecast's values."""
    slopes = np.diff(logs, axis=1) / np.diff(SCORES)
    return np.maximum(slopes[:, 0], LEAST_SPREAD), np.maximum(slopes[:, -1], LEAST_SPREAD)
