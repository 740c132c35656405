"""What is believed of a request's output length: a distribution, updated by what the request has produced so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MIDPOINTS = (np.arange(16) + 0.5) / 16
"""Levels at which a forecast is cut into equally likely lengths."""


@dataclass(frozen=True)
class Forecast:
    """Equally likely lengths of one request, ascending: the distribution that gives each the same weight.

    A length that is known is one value. Sixteen values keep the tail that dispatch cares about (the last one stands for
    the longest sixteenth) and make every later sum cheap.
    """

    lengths: tuple[float, ...]

    @classmethod
    def exactly(cls, length: float) -> Forecast:
        """A length that is known."""
        return cls((float(length),))

    @classmethod
    def from_quantiles(cls, levels: npt.ArrayLike, values: npt.ArrayLike) -> Forecast:
        """From a ranker's quantiles: linear in log length between the levels, flat beyond the outer ones."""
        logs = np.log(np.maximum(np.asarray(values, dtype=np.float64), 1.0))
        return cls(tuple(np.exp(np.interp(MIDPOINTS, np.asarray(levels, dtype=np.float64), logs)).tolist()))

    @property
    def mean(self) -> float:
        """Expected length in tokens."""
        return sum(self.lengths) / len(self.lengths)

    def beyond(self, produced: float, limit: float = np.inf) -> Forecast:
        """The forecast of what is *left* of a request that has produced so many tokens and goes on.

        Lengths that are ruled out drop away. Where all are, the request has outrun its forecast: as much again is
        expected (the mean residual life of a Pareto tail of shape 2), but never beyond `limit` tokens in all.
        """
        if produced <= 0:
            return self
        left = tuple(length - produced for length in self.lengths if length > produced)
        room = max(1.0, limit - produced)
        return Forecast(tuple(min(room, max(1.0, more)) for more in left or (0.5 * produced, 1.5 * produced)))


_NORMAL = np.asarray([NormalDist().inv_cdf(level) for level in MIDPOINTS])


def scenarios(values: Floats, count: int, seed: int, limit: float = np.inf) -> Floats:
    """Draws what might happen: [count, n] lengths, one per request and scenario.

    A forecast's sixteen values leave out its extremes, and among a thousand requests it is those that come last. So the
    values are joined, and continued at both ends, by straight lines in log length against the normal score.

    Args:
        values: [n, 16] from `stack`, or [n, 1] known lengths (then all scenarios are the same).
        count: of scenarios.
        seed: of the draws.
        limit: no length is above this.
    """
    each = values.shape[1]
    if each == 1:
        return np.repeat(values.T, count, axis=0)
    scores = np.random.default_rng(seed).standard_normal((count, len(values)))
    left = np.clip(np.searchsorted(_NORMAL, scores) - 1, 0, each - 2)
    logs = np.log(np.maximum(np.sort(values, axis=1), 1.0))
    rows = np.arange(len(values))
    low, high = logs[rows, left], logs[rows, left + 1]
    share = (scores - _NORMAL[left]) / (_NORMAL[left + 1] - _NORMAL[left])
    return np.clip(np.exp(low + share * (high - low)), 1.0, limit)


def stack(forecasts: Sequence[Forecast]) -> Floats:
    """[n, 16]: forecasts as 16 equally likely lengths each (fewer values are repeated in proportion)."""
    rows = np.empty((len(forecasts), len(MIDPOINTS)))
    for row, forecast in zip(rows, forecasts, strict=True):
        values = forecast.lengths
        if len(values) == len(MIDPOINTS):
            row[:] = values
        elif len(values) == 1:
            row[:] = values[0]
        else:
            row[:] = np.asarray(values)[(MIDPOINTS * len(values)).astype(int)]
    return rows
