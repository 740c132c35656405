"""Measures of a ranking, the noise ceiling, and the distribution of what is left."""

from __future__ import annotations

import numpy as np
import pytest

from ranker.data import from_rows
from ranker.distribution import LEVELS, expected_beyond
from ranker.evaluate import kendall_tau, noise_ceiling, recall_at
from tests.ranker.synthetic import Made, noisy, small_reasoner


def test_recall_is_the_share_of_the_longest_found() -> None:
    length = np.arange(100)
    assert recall_at(length, length, 0.2) == 1.0
    assert recall_at(-length, length, 0.2) == 0.0
    score = length.copy()
    score[80:90] = -1  # half of the longest twenty are missed
    assert recall_at(score, length, 0.2) == 0.5
    assert recall_at(np.array([np.nan, 1.0, 2.0]), np.array([3, 1, 2]), 1 / 3) == 0.0


def test_ties_are_broken_at_random_and_by_the_seed() -> None:
    length = np.arange(10_000)
    assert recall_at(np.zeros(10_000), length, 0.2, seed=1) == pytest.approx(0.2, abs=0.03)
    assert recall_at(np.zeros(10_000), length, 0.2, 1) == recall_at(np.zeros(10_000), length, 0.2, 1)
    with pytest.raises(ValueError, match="no samples"):
        recall_at(np.zeros(0), np.zeros(0), 0.2)


@pytest.mark.parametrize("values", [3, 10, 1000])
def test_kendall_tau_is_that_of_all_pairs(values: int) -> None:
    rng = np.random.default_rng(values)
    a = rng.integers(0, values, 200)
    b = np.where(rng.random(200) < 0.5, a, rng.integers(0, values, 200))
    left = np.sign(a[:, None] - a[None, :])
    right = np.sign(b[:, None] - b[None, :])
    expected = (left * right).sum() / np.sqrt((left != 0).sum() * (right != 0).sum())
    assert kendall_tau(a, b) == pytest.approx(expected, abs=1e-12)


def test_kendall_tau_of_a_constant_is_nan() -> None:
    assert np.isnan(kendall_tau(np.zeros(5), np.arange(5)))
    assert np.isnan(kendall_tau(np.zeros(0), np.zeros(0)))


def lognormal(repeats: int, between: float, within: float) -> Made:
    rng = np.random.default_rng(0)
    rows, expected = [], []
    for n in range(3000):
        mean = 5 + between * rng.standard_normal()
        sizes = np.exp(mean + within * rng.standard_normal(repeats))
        rows += [{"prompt": f"p{n}", "output_length": max(1, round(float(size)))} for size in sizes]
        expected += [mean] * repeats
    return Made(rows, np.array(expected))


@pytest.mark.parametrize(
    "made",
    [
        small_reasoner(3000, 4, 5),
        small_reasoner(3000, 4, 6, noise=0.5),
        noisy(3000, 4, 5),
        lognormal(4, 0.5, 0.5),
        lognormal(2, 0.6, 0.3),
        lognormal(8, 0.2, 0.6),
    ],
    ids=["small", "small_noise", "noisy", "even", "pairs", "hopeless"],
)
def test_the_ceiling_is_that_of_the_true_expected_lengths(made: Made) -> None:
    length = np.array([row["output_length"] for row in made.rows])
    # Ties of the cap and of equal expectations are broken at random: the mean over seeds is the true ceiling.
    true = np.mean([recall_at(made.expected, length, 0.2, seed) for seed in range(10)])
    ceiling = noise_ceiling(from_rows(made.rows))
    assert ceiling is not None
    assert ceiling[0.2] == pytest.approx(true, abs=0.02)


def test_no_ceiling_without_repeated_samples() -> None:
    assert noise_ceiling(from_rows(small_reasoner(100, 1, 0).rows)) is None


def test_expected_beyond_agrees_with_samples() -> None:
    rng = np.random.default_rng(0)
    samples = np.minimum(np.exp(5 + 0.6 * rng.standard_normal(200_000)), 768)
    quantiles = np.quantile(samples, LEVELS)[None, :]
    for made in (0, 50, 150, 400):
        true = samples[samples > made].mean()
        assert expected_beyond(quantiles, made, 768)[0] == pytest.approx(true, rel=0.06)


def test_expected_beyond_is_never_less_than_what_was_made() -> None:
    quantiles = np.array([np.full(len(LEVELS), 100.0), np.geomspace(10, 700, len(LEVELS)), np.full(len(LEVELS), 768.0)])
    for made in (0.0, 1.0, 99.0, 100.0, 500.0, 767.0, 768.0):
        left = expected_beyond(quantiles, made, 768)
        assert (left >= min(768.0, made)).all() and (left <= 768).all()
        assert made >= 768 or (left > made).all()
    assert expected_beyond(quantiles, 50, 768)[0] == pytest.approx(100)
    assert expected_beyond(quantiles, np.array([0.0, 800.0, 3.0])).shape == (3,)
