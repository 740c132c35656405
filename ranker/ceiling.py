"""The noise ceiling: the recall of ranking by each prompt's true expected length.

Lengths of one prompt differ from sample to sample, and no predictor can know how. Where prompts have many samples, the
ceiling is measured, with no assumption on the noise: ranking by the mean of a prompt's *other* samples is a little too
low (that mean is noisy itself), ranking by the mean of all of them, its own included, a little too high. With few
samples of each prompt the two are far apart, and nothing is measured: a model of the noise would have to fill the gap,
and log-normal noise has been seen to overstate the ceiling by a fifth where lengths run up to the limit.

A prompt is counted once per step (a policy changes between steps).
"""

from __future__ import annotations

import numpy as np

from ranker.measures import recall_at
from ranker.segments import Array

MIN_UNITS = 20
"""Fewest prompts with many samples."""
MANY = 16
"""Number of samples of a prompt from which its expected length is well known."""


def ceiling_of_many(
    unit: Array, length: Array, score: Array, fractions: tuple[float, ...] = (0.2, 0.1, 0.05)
) -> tuple[int, dict[float, float], dict[float, float]] | None:
    """Return (prompts, ceiling, recall of a score) on the prompts with at least `MANY` samples.

    None with fewer than `MIN_UNITS` of them. A mean of n others is nearly the expected length, so the ceiling lies
    between two rankings that are close to each other: their middle is taken.

    Args:
        unit: number of each sample's unit [N].
        length: tokens [N].
        score: score of a predictor that has not seen these prompts [N].
        fractions: shares of the longest samples.
    """
    count = np.bincount(unit)
    use = count[unit] >= MANY
    if (count >= MANY).sum() < MIN_UNITS:
        return None
    n, tokens = count[unit][use], length[use].astype(float)
    total = np.bincount(unit, weights=length.astype(float))[unit][use]
    rankings = (total - tokens) / (n - 1), total / n, score[use]

    found = {fraction: [recall_at(ranking, tokens, fraction) for ranking in rankings] for fraction in fractions}
    ceiling = {fraction: (others + own) / 2 for fraction, (others, own, _) in found.items()}
    return int((count >= MANY).sum()), ceiling, {fraction: mine for fraction, (_, _, mine) in found.items()}
