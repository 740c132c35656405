"""Forecasts of a request's output length: a distribution, updated by what the request has produced so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from scheduler.cost.decode import Floats
from scheduler.cost.survival import end_rate, survival_quantiles

MIDPOINTS = (np.arange(16) + 0.5) / 16
"""Levels at which a forecast is cut into equally likely lengths."""
NORMAL_SCORES = np.asarray([NormalDist().inv_cdf(level) for level in MIDPOINTS])
"""[16] quantiles of the standard normal at `MIDPOINTS`."""
TAIL_LEVELS = (0.98, 0.99, 0.995, 0.998, 0.999)
"""Levels of a forecast's `tail`."""
TAIL_SCORES = np.asarray([NormalDist().inv_cdf(level) for level in TAIL_LEVELS])


@dataclass(frozen=True)
class Forecast:
    """Equally likely lengths of one request, ascending.

    A known length is one value. Sixteen values keep the tail that dispatch cares about (the last one stands for the
    longest sixteenth) and make every later sum cheap.
    """

    lengths: tuple[float, ...]
    tail: tuple[float, ...] = ()
    """Lengths at `TAIL_LEVELS`, where known. The last hundredth of one request hardly counts, but the longest of a
    thousand requests comes out of it, and the whole batch waits for that one.
    """

    @classmethod
    def exactly(cls, length: float) -> Forecast:
        """Create the forecast of a known length."""
        return cls((float(length),))

    @classmethod
    def from_quantiles(cls, levels: npt.ArrayLike, values: npt.ArrayLike) -> Forecast:
        """Create a forecast from a ranker's quantiles: linear in log length between levels, flat beyond the outer
        ones."""
        logs = np.log(np.maximum(np.asarray(values, dtype=np.float64), 1.0))
        at = np.asarray(levels, dtype=np.float64)
        tail = np.exp(np.interp(TAIL_LEVELS, at, logs)).tolist() if at[-1] >= TAIL_LEVELS[-1] else ()
        return cls(tuple(np.exp(np.interp(MIDPOINTS, at, logs)).tolist()), tuple(tail))

    @classmethod
    def observed(cls, ended: Sequence[float], running: Sequence[float], limit: float = np.inf) -> Forecast:
        """Create the forecast of a request that is like others, of which some have ended and some still run.

        The first to end are the short ones, so those that run count as longer than what they have produced (Kaplan and
        Meier, `survival.py`).

        Args:
            ended: lengths of those that have ended, at least one.
            running: tokens so far of those that run.
            limit: no length is above this.
        """
        logs = np.log(np.maximum(np.concatenate([ended, running]), 1.0))
        over = np.arange(len(logs)) < len(ended)
        rate = end_rate(logs, over, float(np.median(logs[over])))
        return cls(tuple(np.minimum(np.exp(survival_quantiles(logs, over, MIDPOINTS, rate)), limit).tolist()))

    @cached_property
    def mean(self) -> float:
        """Expected length in tokens."""
        return sum(self.lengths) / len(self.lengths)

    @cached_property
    def sixteen(self) -> Floats:
        """[16] the same as 16 equally likely lengths (fewer values are repeated in proportion)."""
        values = np.asarray(self.lengths)
        return values[(MIDPOINTS * len(values)).astype(int)] if len(values) != len(MIDPOINTS) else values

    @classmethod
    def lognormal(cls, log_mean: float, log_sd: float) -> Forecast:
        """Create the forecast of a length whose logarithm is normal, cut at `MIDPOINTS`."""
        return cls(tuple(np.exp(log_mean + log_sd * NORMAL_SCORES).tolist()))

    def given_siblings(self, lengths: Sequence[float], likeness: float) -> Forecast:
        """Return the forecast after siblings (completions of the same prompt) have ended at the given lengths.

        With log lengths normal around a mean that siblings share, k siblings of mean y move this forecast's log mean m
        to m + w (y - m), w = k r / (1 + (k - 1) r), and leave 1 - r w of its log variance: the shrinkage estimate of
        one-way random effects. A known length stays as it is.

        Args:
            lengths: lengths of the siblings, in tokens.
            likeness: r, the intraclass correlation of log lengths around their forecasts: at 0 siblings add nothing to
                the forecast, at 1 all have the same length.
        """
        if not lengths or len(self.lengths) == 1:
            return self
        logs = np.log(np.maximum(self.lengths, 1.0))
        mean, count = logs.mean(), len(lengths)
        weight = count * likeness / (1 + (count - 1) * likeness)
        observed = np.log(np.maximum(lengths, 1.0)).mean()
        spread = np.sqrt(max(0.0, 1 - likeness * weight))
        return Forecast(tuple(np.exp(mean + weight * (observed - mean) + spread * (logs - mean)).tolist()))

    def beyond(self, produced: float, limit: float = np.inf) -> Forecast:
        """Return the forecast of what is *left* of a request that has produced so many tokens and continues.

        Lengths that are ruled out are dropped. Where all are, the request has outrun its forecast: as much again is
        expected (the mean residual life of a Pareto tail of shape 2), but never more than `limit` tokens in all.
        """
        if produced <= 0:
            return self
        left = tuple(length - produced for length in self.lengths if length > produced)
        room = max(1.0, limit - produced)
        return Forecast(tuple(min(room, max(1.0, more)) for more in left or (0.5 * produced, 1.5 * produced)))


def scenarios(values: Floats, count: int, seed: int, limit: float = np.inf, tails: Floats | None = None) -> Floats:
    """Draw joint scenarios: [count, n] lengths, one per request and scenario.

    A forecast's sixteen values leave out its extremes, and among a thousand requests the extremes come last. So values
    and tail are joined, and continued at both ends, by straight lines in log length against the normal score.

    Args:
        values: [n, 16] from `stack`, or [n, 1] known lengths (then all scenarios are the same).
        count: number of scenarios.
        seed: seed of the draws.
        limit: no length is above this.
        tails: [n, 5] from `tails_of`; NaN or None: extrapolated from the values.
    """
    if values.shape[1] == 1:
        return np.repeat(values.T, count, axis=0)
    scores = np.random.default_rng(seed).standard_normal((count, len(values)))
    at = np.concatenate([NORMAL_SCORES, TAIL_SCORES])
    logs = log_quantiles(values, tails)
    left = np.clip(np.searchsorted(at, scores) - 1, 0, len(at) - 2)
    rows = np.arange(len(values))
    low, high = logs[rows, left], logs[rows, left + 1]
    share = (scores - at[left]) / (at[left + 1] - at[left])
    return np.clip(np.exp(low + share * (high - low)), 1.0, limit)


def log_quantiles(values: Floats, tails: Floats | None) -> Floats:
    """Return [n, 21] log lengths of forecasts at `MIDPOINTS` and `TAIL_LEVELS`.

    Args:
        values: [n, 16] from `stack`.
        tails: [n, 5] from `tails_of`; NaN or None: a straight line in log length against the normal score.
    """
    logs = np.log(np.maximum(np.sort(values, axis=1), 1.0))
    slope = (logs[:, -1] - logs[:, -2]) / (NORMAL_SCORES[-1] - NORMAL_SCORES[-2])
    beyond = logs[:, -1:] + slope[:, None] * (TAIL_SCORES - NORMAL_SCORES[-1])
    if tails is not None:
        beyond = np.where(np.isnan(tails), beyond, np.log(np.maximum(tails, 1.0)))
    return np.concatenate([logs, beyond], axis=1)


def tails_of(forecasts: Sequence[Forecast]) -> Floats:
    """Return [n, 5] the forecasts' tails, NaN where there is none."""
    none = (np.nan,) * len(TAIL_LEVELS)
    return np.asarray([forecast.tail or none for forecast in forecasts]).reshape(-1, len(TAIL_LEVELS))


def stack(forecasts: Sequence[Forecast]) -> Floats:
    """Return [n, 16] forecasts as 16 equally likely lengths each."""
    return np.asarray([forecast.sixteen for forecast in forecasts]).reshape(-1, len(MIDPOINTS))


def equally_likely(forecasts: Sequence[Forecast]) -> Floats:
    """Return [n, v] equally likely lengths for planning: v = 1 if every length is known, otherwise 16 (see `stack`)."""
    if all(len(forecast.lengths) == 1 for forecast in forecasts):
        return np.asarray([forecast.lengths for forecast in forecasts]).reshape(-1, 1)
    return stack(forecasts)


def same_width(parts: Sequence[Floats]) -> list[Floats]:
    """Bring arrays of `equally_likely` to one width, so that they can be joined: known lengths are repeated."""
    widest = max(part.shape[1] for part in parts if len(part)) if any(map(len, parts)) else 1
    return [
        part
        if part.shape[1] == widest
        else np.repeat(part[:, :1], widest, axis=1)
        if len(part)
        else np.empty((0, widest))
        for part in parts
    ]
