"""Distribution of lengths for a score, and what is left of it once a request has run for a while.

The spread of a prediction must hold both what the model does not know and what no prompt shows (sampling noise). So it
is measured: scores of samples whose prompts the model had not seen are put into bins, and each bin keeps its lengths'
median and the quantiles of (log length - median) / predicted spread. A prediction interpolates these linearly
between bins.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ranker.segments import Array

LEVELS = np.array([0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999])
"""The levels [Q] of all quantiles. The last ones matter most to dispatch: among a thousand requests, a whole batch
waits for some answer that runs away to the limit, and every plan must allow for it.
"""

BIN = 60
"""Fewest samples in a bin: its 0.98 and 0.02 quantiles are then between samples (those above are its longest)."""
BINS = 24
FAR = 0.8
"""Share of the length limit below which a request that reaches the limit counts as a runaway."""
BIN_SCORES = 15
"""Fewest distinct scores in a bin, on average: samples of one prompt have one score and say little about others."""


@dataclass(frozen=True)
class Distribution:
    """The fitted tables; B bins, ordered by score."""

    centres: Array
    """Mean score of each bin [B]."""
    medians: Array
    """Median log length of each bin [B], not decreasing with the score."""
    tables: Array
    """Quantiles of (log length - median) / spread [B, Q]."""
    runaway: Array
    """Share of samples that ran to the length limit though their expected length was far below it [B], not decreasing
    with the score: the more there is to write, the more goes wrong.
    """

    def location(self, score: Array) -> Array:
        """Return the median log length [N] of scores [N]."""
        return np.interp(score, self.centres, self.medians)

    def score_of(self, log: Array) -> Array:
        """Return the scores [N] with these median log lengths [N]; those beyond all medians keep their order."""
        beyond = log - np.clip(log, self.medians[0], self.medians[-1])
        step = 1e-3 * max(1e-9, float(self.centres[-1] - self.centres[0]))
        # Equal medians of neighbouring bins would give equal scores: a trace of the log length keeps the order.
        inside: Array = np.interp(log, self.medians, self.centres) + step * (beyond + 1e-3 * log)
        return inside

    def quantiles(self, score: Array, spread: Array, limit: float) -> Array:
        """Return tokens [N, Q], monotone in Q and within 1..limit, for scores [N] and spreads [N] (log)."""
        rows = np.stack([np.interp(score, self.centres, column) for column in self.tables.T], axis=1)
        logs = self.location(score)[:, None] + spread[:, None] * rows
        tokens: Array = np.exp(np.clip(logs, 0.0, np.log(limit)))
        tokens = np.maximum.accumulate(tokens, axis=1)
        share = np.interp(score, self.centres, self.runaway)
        run = _far_from(tokens, limit)[:, None] & (1 - share[:, None] < LEVELS)
        return np.where(run, float(limit), tokens)


def bin_scores(score: Array) -> tuple[Array, Array]:
    """Return the bin [N] of each score, and the bins' mean scores [B]; equal scores are in one bin."""
    order = np.argsort(score, kind="stable")
    bins = max(1, min(BINS, len(score) // BIN, len(np.unique(score)) // BIN_SCORES))
    edges = np.unique(score[order][np.linspace(0, len(score), bins + 1).astype(int)[1:-1]])
    number = np.searchsorted(edges, score, side="right")
    number = np.unique(number, return_inverse=True)[1].reshape(-1)
    return number, np.bincount(number, weights=score) / np.bincount(number)


def fit_medians(score: Array, log: Array) -> tuple[Array, Array, Array]:
    """Return bins [N], centres [B] and medians [B] (made not to decrease) of scores [N] and log lengths [N]."""
    number, centres = bin_scores(score)
    medians = np.array([np.median(log[number == b]) for b in range(len(centres))])
    return number, centres, (np.maximum.accumulate(medians) + np.minimum.accumulate(medians[::-1])[::-1]) / 2


def fit_distribution(score: Array, spread: Array, log: Array, cap: float | None = None) -> Distribution:
    """Fit on scores [N] of unseen prompts, their predicted spreads [N] and true log lengths [N].

    Args:
        score: [N].
        spread: [N].
        log: [N].
        cap: the length limit in tokens, if there was one.
    """
    number, centres, medians = fit_medians(score, log)
    residual = (log - np.interp(score, centres, medians)) / spread
    tables = np.array([np.quantile(residual[number == b], LEVELS) for b in range(len(centres))])
    plain = Distribution(centres, medians, tables, np.zeros(len(centres)))
    if cap is None:
        return plain
    far = _far_from(plain.quantiles(score, spread, cap), cap)
    if not far.any():
        return plain
    counts = np.bincount(number[far], minlength=len(centres))
    run = np.bincount(number[far], weights=log[far] >= np.log(cap) - 1e-9, minlength=len(centres))
    # a bin alone has too few of them; requiring that they do not decrease with the score joins bins until there are
    # enough
    return replace(plain, runaway=_not_decreasing(run, counts))


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


def _far_from(quantiles: Array, limit: float) -> Array:
    """Return whether requests [N] are expected to end well before the limit, by their 0.9 quantile."""
    far: Array = quantiles[:, int(np.searchsorted(LEVELS, 0.9))] < FAR * limit
    return far


def expected_beyond(quantiles: Array, n: Array | float, limit: float | None = None, levels: Array = LEVELS) -> Array:
    """Return E[L | L > n] in tokens [N]: the expected length of an unfinished request that has produced `n` tokens.

    The distribution is the quantiles' own: log length is linear between levels, and the outermost pieces extend to
    levels 0 and 1 (within 1 token and `limit`). Where nothing of it is beyond `n`, the request is expected to grow once
    more by the ratio of the last piece, but by one token at least; never above `limit`.

    Args:
        quantiles: tokens [N, Q], monotone in Q.
        n: tokens produced so far, one number or [N].
        limit: the length limit, if there is one.
        levels: [Q].
    """
    logs = np.log(np.maximum(quantiles, 1.0))
    made = np.broadcast_to(np.asarray(n, dtype=np.float64), (len(logs),))
    top = np.inf if limit is None else np.log(limit)
    slope_low = (logs[:, 1] - logs[:, 0]) / (levels[1] - levels[0])
    slope_high = (logs[:, -1] - logs[:, -2]) / (levels[-1] - levels[-2])
    first = np.maximum(logs[:, 0] - slope_low * levels[0], 0.0)
    last = np.maximum(np.minimum(logs[:, -1] + slope_high * (1 - levels[-1]), top), logs[:, -1])
    knots = np.column_stack((first, logs, last))
    mass = np.diff(np.concatenate(([0.0], levels, [1.0])))[None, :]
    a, b = knots[:, :-1], knots[:, 1:]
    wide = b - a > 1e-9
    width = np.where(wide, b - a, 1.0)
    start = np.clip(np.log(np.maximum(made, 1e-9))[:, None], a, b)
    beyond = mass * np.where(wide, (b - start) / width, np.exp(a) > made[:, None])
    tokens = mass * np.where(wide, (np.exp(b) - np.exp(start)) / width, np.exp(a) * (np.exp(a) > made[:, None]))
    total = beyond.sum(axis=1)
    known = total > 1e-9
    mean = tokens.sum(axis=1) / np.where(known, total, 1.0)
    more = np.maximum(made * np.exp(np.minimum(last - logs[:, -2], 1.0)), made + 1)
    result = np.where(known, np.maximum(mean, made), more)
    return result if limit is None else np.minimum(result, limit)
