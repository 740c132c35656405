"""Two measures of a ranking: recall of the longest samples, and Kendall's tau."""

from __future__ import annotations

import numpy as np

from ranker.segments import Array


def recall_at(score: Array, length: Array, fraction: float) -> float:
    """Return the share of the longest `fraction` of samples that is among the `fraction` with the greatest score.

    Equal scores and equal lengths (all that reached the limit) are in random order; the result is the expectation over
    these orders, so that no tie is luck. Ranking by the lengths themselves has less than 1 where more samples than
    `fraction` reached the length limit. No ranking can exceed that: which of them count as the longest is chance.

    Args:
        score: score of the ranking [N]; NaN counts as the smallest.
        length: true lengths [N].
        fraction: in (0, 1]; at least one sample is taken.

    Raises:
        ValueError: there are no samples.
    """
    found, count = _found(score, length, fraction)
    return float(found.sum()) / count


def recall_parts(score: Array, length: Array, fraction: float) -> Array:
    """Return what each sample adds to `recall_at` [N]; arguments and errors as there."""
    found, count = _found(score, length, fraction)
    return found / count


def _found(score: Array, length: Array, fraction: float) -> tuple[Array, int]:
    """Return the probability [N] of being both long and ranked as long, and how many are the longest."""
    if not len(length):
        raise ValueError("recall is undefined: there are no samples")
    count = max(1, round(fraction * len(length)))
    ranked = np.where(np.isnan(score), -np.inf, score)
    return _chosen(ranked, count) * _chosen(length, count), count


def _chosen(values: Array, count: int) -> Array:
    """Return the probability [N] of being among the `count` greatest of values [N], equal ones in random order."""
    bound = np.partition(values, -count)[-count]
    above, equal = values > bound, values == bound
    chosen: Array = above + equal * (count - above.sum()) / equal.sum()
    return chosen


def kendall_tau(a: Array, b: Array) -> float:
    """Return Kendall's tau-b of two rankings [N], in -1..1; NaN when one of them has only one value.

    O(n log^2 n): discordant pairs are inversions, counted bit by bit of the dense rank of `b`. tau-b corrects for ties
    (Kendall 1945): (concordant - discordant) / sqrt((pairs - ties in a) * (pairs - ties in b)).
    """
    rank_a = np.unique(a, return_inverse=True)[1].reshape(-1)
    rank_b = np.unique(b, return_inverse=True)[1].reshape(-1)
    pairs = len(rank_a) * (len(rank_a) - 1) // 2
    ties_a, ties_b = _ties(rank_a), _ties(rank_b)
    ties_both = _ties(rank_a * (int(rank_b.max(initial=0)) + 1) + rank_b)
    if pairs in (ties_a, ties_b):
        return float("nan")
    discordant = _inversions(rank_b[np.lexsort((rank_b, rank_a))])
    concordant = pairs - ties_a - ties_b + ties_both - discordant
    return float((concordant - discordant) / np.sqrt(float(pairs - ties_a) * float(pairs - ties_b)))


def _ties(rank: Array) -> int:
    counts = np.unique(rank, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())


def _inversions(rank: Array) -> int:
    """Count the pairs i < j with rank[i] > rank[j].

    Two ranks are ordered by the highest bit in which they differ: for each bit, among ranks with equal higher bits,
    the ones that stand before zeros are counted.
    """
    total = 0
    for bit in reversed(range(int(rank.max(initial=0)).bit_length())):
        rank = rank[np.argsort(rank >> (bit + 1), kind="stable")]
        higher, one = rank >> (bit + 1), (rank >> bit) & 1
        before = np.cumsum(one) - one
        first = np.concatenate(([True], higher[1:] != higher[:-1]))
        base = np.maximum.accumulate(np.where(first, before, 0))
        total += int((before - base)[one == 0].sum())
    return total
