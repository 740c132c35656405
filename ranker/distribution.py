"""Distribution of lengths for a score, and what is left of it once a request has run for a while.

The spread of a prediction must hold both what the model does not know and what no prompt shows (sampling noise). So it
is measured: scores of samples whose prompts the model had not seen are put into bins, and each bin keeps its lengths'
median and the quantiles of (log length - median) / predicted spread. A prediction interpolates these linearly
between bins. It is then stretched so that its expected length is the isotonic regression of the length on the score
(Zadrozny and Elkan 2002): so the expected length, by which dispatch goes, ranks as the score does. Samples that were
cut off at a limit count as longer than it (`scheduler.cost.survival`), so that the quantiles hold for other limits,
too: a request's own limit is applied when it is predicted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ranker.segments import Array
from scheduler.cost.length_forecast import MIDPOINTS
from scheduler.cost.survival import end_rate, restricted_mean, survival_quantiles

LEVELS = np.array([0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999])
"""The levels [Q] of all quantiles. The last ones matter most to dispatch: among a thousand requests, a whole batch
waits for some answer that runs away to the limit, and every plan must allow for it.
"""

BIN = 60
"""Fewest samples in a bin: its 0.98 and 0.02 quantiles are then between samples (those above are its longest)."""
BINS = 24
FAR = 0.8
"""Share of the length limit below which a request that reaches the limit counts as a runaway."""
BIN_PROMPTS = 15
"""Fewest prompts in a bin, on average: samples of one prompt have one score and say little about others."""
BEYOND = 4.0
"""Multiple of the greatest training length up to which lengths are extrapolated: nothing is known of what is beyond."""
STRETCH = 4.0
"""Largest factor by which quantiles are stretched to their expected length."""
NEAR = 0.1
"""Expected lengths within this share of the limit approach it without reaching it."""
TRACE = 1e-3
"""Least increase of the expected length, as a share of it, over all bins or one standard deviation of the score."""
TAIL = 2.0
"""The rate at which samples end at the limit is that from the limit divided by `TAIL` on."""


@dataclass(frozen=True)
class Distribution:
    """The fitted tables; B bins, ordered by score."""

    centres: Array
    """Mean score of each bin [B]."""
    slope: float
    """Slope of the line of the log length over the score, greater than 0; it orders scores within bins and beyond them
    (see `_line`).
    """
    medians: Array
    """Median of each bin's log lengths less the line [B]."""
    tables: Array
    """Quantiles of (log length - median) / spread [B, Q]."""
    runaway: Array
    """Share of samples that ran to the length limit though their expected length was far below it [B], not decreasing
    with the score: the more there is to write, the more goes wrong.
    """
    means: Array
    """Log of each bin's mean length up to `limit`, less the line [B]; with it, it does not decrease with the score."""
    limit: float
    """Limit of the training samples in tokens."""
    in_tokens: bool = False
    """Whether scores are numbers of tokens (see `_line`)."""

    def quantiles(self, score: Array, spread: Array, limit: Array | float) -> Array:
        """Return tokens [N, Q], monotone in Q and within 1..limit, for scores [N], spreads [N] (log) and limits [N]."""
        most = np.broadcast_to(np.asarray(limit, dtype=np.float64), (len(score),))[:, None]
        rows = np.stack([np.interp(score, self.centres, column) for column in self.tables.T], axis=1)
        middle = self._line(score) + np.interp(score, self.centres, self.medians)
        logs = np.maximum.accumulate(middle[:, None] + spread[:, None] * rows, axis=1)
        return self._tokens(logs + self._stretch(logs, score)[:, None], score, most)

    def score_of(self, expected: Array) -> Array:
        """Return the scores [N] of expected lengths [N], by bisection; those of no score get that of the nearest."""
        reach = 2 * self.limit if self.in_tokens else np.log(4 * self.limit) / max(self.slope, 1e-9)
        low = np.full(len(expected), min(0.0, self.centres[0]) if self.in_tokens else self.centres[0] - reach)
        high = np.full(len(expected), self.centres[-1] + reach)
        for _ in range(50):
            middle = (low + high) / 2
            short = self.expected(middle) < expected
            low, high = np.where(short, middle, low), np.where(short, high, middle)
        return np.asarray((low + high) / 2)

    def _line(self, score: Array) -> Array:
        return _line(score, self.centres, self.slope, self.in_tokens, float(self.medians[0]))

    def expected(self, score: Array) -> Array:
        """Return the expected lengths [N] of scores [N]: increasing, from 1 on and below the limit."""
        logs = self._line(score) + np.interp(score, self.centres, self.means)
        mean = np.exp(np.minimum(logs, np.log(2 * self.limit)))
        start = (1 - NEAR) * self.limit  # from here on the limit is approached, and never reached: no two scores tie
        near = self.limit - (self.limit - start) * np.exp(-np.maximum(mean - start, 0.0) / (self.limit - start))
        return np.where(mean > start, near, np.maximum(mean, 1.0))

    def _tokens(self, logs: Array, score: Array, most: Array) -> Array:
        tokens: Array = np.exp(np.clip(logs, 0.0, np.log(most)))
        share = np.interp(score, self.centres, self.runaway)
        run = _far_from(tokens, most[:, 0])[:, None] & (1 - share[:, None] < LEVELS)
        return np.where(run, most, tokens)

    def _stretch(self, logs: Array, score: Array) -> Array:
        """Return what is to be added to log lengths [N, Q] so that their mean is the expected length, by bisection."""
        wanted, most = self.expected(score), np.full((len(logs), 1), self.limit)
        low, high = np.full(len(logs), -np.log(STRETCH)), np.full(len(logs), np.log(STRETCH))
        for _ in range(20):
            middle = (low + high) / 2
            short = expected_length(self._tokens(logs + middle[:, None], score, most)) < wanted
            low, high = np.where(short, middle, low), np.where(short, high, middle)
        return np.asarray((low + high) / 2)


def _line(score: Array, centres: Array, slope: float, in_tokens: bool, median: float) -> Array:
    """Return a line of log lengths over scores [N], 0 at the first bin's centre, whose median is `median`.

    Over scores in tokens a straight one would let lengths grow exponentially: beyond the last bin's centre they grow in
    proportion to the score. Below the first one they shrink about so, down to a score of 0, if they are as long as
    their scores; the shorter they are, the less a score says of them.
    """
    first, last = float(centres[0]), float(centres[-1])
    line = np.asarray(slope * (score - first))
    if in_tokens and last > 0:
        above = slope * (last - first) + np.log(np.maximum(score, last) / last)
        line = np.where(score > last, above, line)
    if in_tokens and first > 0:
        steeper = max(slope, min(1.0, np.exp(median) / first) / first)
        below = steeper * (np.clip(score, 0.0, first) - first) + slope * np.minimum(score, 0.0)
        line = np.where(score < first, below, line)
    return line


def bin_scores(score: Array, prompts: int) -> tuple[Array, Array]:
    """Return the bin [N] of each score, and the bins' mean scores [B]; equal scores are in one bin."""
    order = np.argsort(score, kind="stable")
    bins = max(1, min(BINS, len(score) // BIN, prompts // BIN_PROMPTS))
    edges = np.unique(score[order][np.linspace(0, len(score), bins + 1).astype(int)[1:-1]])
    number = np.searchsorted(edges, score, side="right")
    number = np.unique(number, return_inverse=True)[1].reshape(-1)
    return number, np.bincount(number, weights=score) / np.bincount(number)


def fit_medians(
    score: Array, log: Array, ended: Array, prompts: int, in_tokens: bool
) -> tuple[Array, Array, float, Array]:
    """Return bins [N], centres [B], slope and medians [B] (see `Distribution`) of scores [N] and log lengths [N].

    Args:
        score: [N].
        log: [N].
        ended: whether the sample ended by itself, rather than at a limit [N].
        prompts: number of distinct prompts of the samples.
        in_tokens: whether scores are numbers of tokens.
    """
    number, centres = bin_scores(score, prompts)
    apart = score - score.mean()
    spread = max(float((apart**2).mean()), 1e-12)
    slope = max(float((apart * log).mean()) / spread, TRACE / np.sqrt(spread))
    slope = 0.0 if spread <= 1e-12 else slope
    rates = _end_rates(number, len(centres), log, ended)
    line, middle = _line(score, centres, slope, in_tokens, -np.inf), np.array([0.5])
    rest = [(log - line)[number == b] for b in range(len(centres))]
    medians = np.array(
        [survival_quantiles(rest[b], ended[number == b], middle, rates[b])[0] for b in range(len(centres))]
    )
    return number, centres, slope, np.minimum(medians, log.max() + np.log(BEYOND) - slope * (centres - centres[0]))


def fit_location(score: Array, log: Array, ended: Array, prompts: int, in_tokens: bool) -> Array:
    """Return the median log length [N] of each score; the arguments are those of `fit_medians`."""
    _, centres, slope, medians = fit_medians(score, log, ended, prompts, in_tokens)
    return _line(score, centres, slope, in_tokens, float(medians[0])) + np.interp(score, centres, medians)


def _end_rates(number: Array, bins: int, log: Array, ended: Array) -> Array:
    """Return the rate at which each bin's samples [N] end near the limit, per log length [B]; all bins' as prior."""
    start = log[~ended].max() - np.log(TAIL) if not ended.all() else np.inf
    if not np.isfinite(start):
        return np.ones(bins)  # nothing was cut off, so nothing is extrapolated
    pooled = end_rate(log, ended, start)
    return np.array([end_rate(log[number == b], ended[number == b], start, pooled) for b in range(bins)])


def fit_distribution(
    score: Array, spread: Array, log: Array, ended: Array, prompts: int, in_tokens: bool = False
) -> Distribution:
    """Fit on scores [N] of unseen prompts, their predicted spreads [N] and true log lengths [N].

    Args:
        score: [N].
        spread: [N].
        log: [N].
        ended: whether the sample ended by itself, rather than at a limit [N].
        prompts: number of distinct prompts of the samples.
        in_tokens: whether scores are numbers of tokens.
    """
    number, centres, slope, medians = fit_medians(score, log, ended, prompts, in_tokens)
    located = _line(score, centres, slope, in_tokens, float(medians[0])) + np.interp(score, centres, medians)
    residual = (log - located) / spread
    line = slope * (centres - centres[0])
    rates = _end_rates(number, len(centres), log, ended)
    tables = np.empty((len(centres), len(LEVELS)))
    for b in range(len(centres)):
        inside = number == b
        size = float(spread[inside].mean())
        table = survival_quantiles(residual[inside], ended[inside], LEVELS, rates[b] * size)
        tables[b] = np.minimum(table, (log.max() + np.log(BEYOND) - medians[b] - line[b]) / size)
    limit = float(np.exp(log.max())) * (2 if ended.all() else 1)
    count = np.bincount(number).astype(float)
    each = [restricted_mean(np.exp(log[number == b]), ended[number == b]) for b in range(len(centres))]
    means = _not_decreasing(np.array(each) * count, count)
    means = means * (1 + TRACE * np.arange(len(means)) / len(means))  # bins of one mean keep their order
    none = np.zeros(len(centres))
    plain = Distribution(centres, slope, medians, tables, none, np.log(means) - line, limit, in_tokens)
    far = _far_from(plain.quantiles(score, spread, limit), limit)
    if ended.all() or not far.any():
        return plain
    reached = ~ended & (np.exp(log) >= FAR * limit)  # what was cut off at a far lower limit did not run to this one
    # a bin alone has too few of them; requiring that they do not decrease with the score joins bins until there are
    # enough
    runaway = _not_decreasing(
        np.bincount(number[far], weights=reached[far], minlength=len(centres)),
        np.bincount(number[far], minlength=len(centres)),
    )
    return replace(plain, runaway=runaway)


def _not_decreasing(hits: Array, counts: Array) -> Array:
    """Return the shares hits / counts [B], neighbours joined until none is below the one before.

    Pool adjacent violators, the least-squares fit; bins without a count take part in whatever they are joined to.
    """
    blocks: list[tuple[float, float, int]] = []
    for hit, count in zip(hits.tolist(), counts.tolist(), strict=True):
        blocks.append((hit, count, 1))
        while len(blocks) > 1 and blocks[-2][0] * blocks[-1][1] >= blocks[-1][0] * blocks[-2][1]:
            (a, n, k), (b, m, j) = blocks.pop(-2), blocks.pop()
            blocks.append((a + b, n + m, k + j))
    return np.repeat([hit / max(count, 1.0) for hit, count, _ in blocks], [size for _, _, size in blocks])


def expected_length(quantiles: Array) -> Array:
    """Return the expected lengths [N] of quantiles [N, Q] at `LEVELS`, in tokens.

    It is the mean of `scheduler.cost.length_forecast.Forecast.from_quantiles`, by which dispatch goes: linear in log
    length between levels, flat beyond the outer ones, at sixteen equally likely levels.
    """
    right = np.searchsorted(LEVELS, MIDPOINTS)
    left = np.maximum(right - 1, 0)
    right = np.minimum(right, len(LEVELS) - 1)
    width = np.where(right > left, LEVELS[right] - LEVELS[left], 1.0)
    share = np.where(right > left, (MIDPOINTS - LEVELS[left]) / width, 0.0)
    logs = np.log(np.maximum(quantiles, 1.0))
    mean: Array = np.exp(logs[:, left] * (1 - share) + logs[:, right] * share).mean(axis=1)
    return mean


def _far_from(quantiles: Array, limit: Array | float) -> Array:
    """Return whether requests [N] are expected to end well before the limit, by their 0.9 quantile."""
    far: Array = quantiles[:, int(np.searchsorted(LEVELS, 0.9))] < FAR * limit
    return far
