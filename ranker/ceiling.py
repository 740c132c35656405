"""The noise ceiling: the recall of the best possible ranking, by each prompt's true expected length.

Lengths of one prompt differ from sample to sample, and no predictor can know how. Ranking by the mean of a prompt's
other samples would underestimate the ceiling (that mean is noisy itself), ranking by its own samples would overestimate
it. So the distribution is estimated instead, and the ceiling computed from it:

1. A sample's log length is normal around its prompt's `mu` with its prompt's `sigma`, and cut off at the length limit.
2. The distribution of (mu, sigma) over prompts is free: weights on a grid, found by maximum likelihood with EM
   (nonparametric empirical Bayes: Kiefer and Wolfowitz 1956, Laird 1978). Nothing is assumed about its shape.
3. Prompts and samples are drawn from it, ranked by their exact expected length, and recall is measured.

A prompt is counted once per step (a policy changes between steps); units with one sample say nothing about noise and
are left out. Lengths whose noise is far from log-normal (short, or up to the limit) make the estimate wrong. So where
some prompts have many samples, the ceiling is also computed on those, without any assumption: between ranking by
the mean of a prompt's other samples and by the mean of all of them, its own included (`ceiling_of_many`).
"""

from __future__ import annotations

import math

import numpy as np

from ranker.data import Rollouts
from ranker.measures import recall_at
from ranker.segments import Array

UNITS = 3000
"""Largest number of prompts used; the estimate's own error is then below 0.01."""
MIN_UNITS = 20
"""Fewest prompts with repeated samples."""
MANY = 16
"""Number of samples of a prompt from which its expected length is well known."""
GRID_MU, GRID_SIGMA = 192, 8
ROUNDS = 100
"""Steps of EM; more of them sharpen the weights without changing the recall."""
DRAWS = 60_000


def noise_ceiling(
    rollouts: Rollouts, fractions: tuple[float, ...] = (0.2, 0.1, 0.05), seed: int = 0
) -> dict[float, float] | None:
    """Return the recall of ranking by the true expected length, by fraction; None without repeated samples."""
    rng = np.random.default_rng(seed)
    units = rollouts.unit
    repeated = np.flatnonzero(np.bincount(units) > 1)
    if len(repeated) < MIN_UNITS:
        return None
    if len(repeated) > UNITS:
        repeated = rng.choice(repeated, UNITS, replace=False)
    number = np.full(units.max() + 1, -1)
    number[repeated] = np.arange(len(repeated))
    unit = number[units]
    use = unit >= 0
    log = np.log(rollouts.output_length[use].astype(float))
    cap = math.log(rollouts.cap) if rollouts.cap else None
    capped = rollouts.capped[use] & (cap is not None)
    mu, sigma, weights = _mixture(unit[use], log, capped, cap)

    chosen = rng.choice(len(weights), DRAWS, p=weights)
    # A prompt's mu may be anywhere within its grid cell; without this, many prompts would tie.
    at = mu[chosen] + (rng.random(DRAWS) - 0.5) * (mu[1] - mu[0])
    spread = sigma[chosen]
    drawn = at + spread * rng.standard_normal(DRAWS)
    if cap is not None:
        drawn = np.minimum(drawn, cap)
    expected = _expected(at, spread, cap)
    return {fraction: recall_at(expected, drawn, fraction) for fraction in fractions}


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


def _mixture(unit: Array, log: Array, capped: Array, cap: float | None) -> tuple[Array, Array, Array]:
    """Return grid points mu [G] and sigma [G] (mu runs fastest) and their weights [G], by maximum likelihood.

    Args:
        unit: number of each sample's unit [M].
        log: log lengths [M].
        capped: whether the sample was cut off [M].
        cap: log of the length limit.
    """
    free = ~capped
    count = np.bincount(unit[free], minlength=unit.max() + 1)
    mean = np.bincount(unit[free], weights=log[free], minlength=len(count)) / np.maximum(count, 1)
    square = np.bincount(unit[free], weights=(log[free] - mean[unit[free]]) ** 2, minlength=len(count))
    cut = np.bincount(unit[capped], minlength=len(count))
    inside = count > 1
    pooled = math.sqrt(square[inside].sum() / max(1, (count[inside] - 1).sum())) if inside.any() else 0.3
    low, high = float(log.min()), float(log.max())
    if cap is not None and capped.any():
        high += 2 * max(pooled, 0.1)  # expected lengths beyond the limit are possible
    values = np.linspace(low - 0.05, high + 0.05, GRID_MU)
    spreads = np.geomspace(max(0.25 * pooled, 0.004), max(2.5 * pooled, 0.02), GRID_SIGMA)
    mu, sigma = np.tile(values, GRID_SIGMA), np.repeat(spreads, GRID_MU)

    # log likelihood [units, G] from a unit's count, mean and squares; samples at the limit by the tail's mass
    gap = (mean[:, None] - mu[None, :]) ** 2
    fit = -count[:, None] * np.log(sigma) - (square[:, None] + count[:, None] * gap) / (2 * sigma**2)
    if cap is not None:
        tail = np.array([0.5 * math.erfc((cap - m) / (s * math.sqrt(2))) for m, s in zip(mu, sigma, strict=True)])
        fit += cut[:, None] * np.log(np.maximum(tail, 1e-300))
    likelihood = np.exp(fit - fit.max(axis=1, keepdims=True)).astype(np.float32)
    weights = np.full(len(mu), 1 / len(mu), dtype=np.float32)
    for _ in range(ROUNDS):
        share = likelihood @ weights
        weights *= (likelihood.T @ (1 / np.maximum(share, 1e-30))) / len(share)
    exact = weights.astype(np.float64)
    return mu, sigma, exact / exact.sum()


def _expected(mu: Array, sigma: Array, cap: float | None) -> Array:
    """Return the log of the expected length [N] of log-normal lengths that are cut off at exp(cap)."""
    if cap is None:
        plain: Array = mu + sigma**2 / 2
        return plain
    z = (cap - mu) / sigma
    below, beyond = _normal_cdf(z - sigma), 1 - _normal_cdf(z)
    # relative to the cap, so that nothing overflows; mu breaks the ties of prompts that always reach the cap
    expected = np.exp(np.minimum(mu + sigma**2 / 2 - cap, 50)) * below + beyond
    cut: Array = np.log(np.maximum(expected, 1e-300)) + 1e-9 * mu
    return cut


def _normal_cdf(z: Array) -> Array:
    """Return the standard normal distribution function [N], linear between 8,001 points in -8..8 (error below 1e-6)."""
    points = np.linspace(-8, 8, 8001)
    return np.interp(z, points, [0.5 * math.erfc(-p / math.sqrt(2)) for p in points])
