"""Measures of a ranking, the noise ceiling, and the distribution of what is left."""

from __future__ import annotations

import numpy as np
import pytest

from ranker.ceiling import ceiling_of_many
from ranker.data import from_rows
from ranker.distribution import LEVELS, Distribution, expected_beyond, fit_distribution
from ranker.evaluate import kendall_tau, noise_ceiling, recall_at, recall_limit
from tests.ranker.synthetic import Made, noisy, small_reasoner


def test_recall_is_the_share_of_the_longest_found() -> None:
    length = np.arange(100)
    assert recall_at(length, length, 0.2) == 1.0
    assert recall_at(-length, length, 0.2) == 0.0
    score = length.copy()
    score[80:90] = -1  # half of the longest twenty are missed
    assert recall_at(score, length, 0.2) == 0.5
    assert recall_at(np.array([np.nan, 1.0, 2.0]), np.array([3, 1, 2]), 1 / 3) == 0.0


def test_ties_count_by_their_expectation_and_limit_what_can_be_reached() -> None:
    length = np.arange(100)
    assert recall_at(np.zeros(100), length, 0.2) == pytest.approx(0.2)
    capped = np.minimum(length, 60)  # forty at the limit: which of them are the longest is chance
    assert recall_limit(capped, 0.2) == pytest.approx(0.5)
    assert recall_limit(capped, 0.5) == pytest.approx(1.0) and recall_limit(length, 0.05) == 1.0
    # twenty of the forty are predicted: each is among the longest twenty with probability one half
    assert recall_at(length, capped, 0.2) == pytest.approx(0.5)
    assert recall_at(capped, length, 0.2) == pytest.approx(0.5)
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
    true = recall_at(made.expected, length, 0.2)
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


@pytest.mark.parametrize("noise", [0.1, 0.6, 1.5])
def test_many_samples_of_a_prompt_tell_the_ceiling_without_assumptions(noise: float) -> None:
    """Lengths that are short or run up to the limit: far from log-normal."""
    rng = np.random.default_rng(4)

    def draw(prompts: int, samples: int) -> tuple[np.ndarray, np.ndarray]:
        typical = np.exp(4 + 0.8 * rng.standard_normal((prompts, 1)))
        drawn = typical * np.exp(noise * rng.standard_normal((prompts, samples)))
        runs = rng.random((prompts, samples)) < np.minimum(0.5, typical / 600)
        return typical + 0 * drawn, np.where(runs, 500 + rng.random(drawn.shape), np.minimum(drawn, 499.0))

    typical, length = draw(400, 32)
    unit = np.repeat(np.arange(400), 32)
    found = ceiling_of_many(unit, length.ravel(), typical.ravel())
    assert found is not None
    prompts, ceiling, recall = found
    assert prompts == 400
    # the score is the expected length's own order, so it must come out at the ceiling
    for fraction in (0.2, 0.1):
        assert ceiling[fraction] == pytest.approx(recall[fraction], abs=0.03)


def test_few_prompts_with_many_samples_tell_nothing() -> None:
    unit = np.repeat(np.arange(10), 32)
    assert ceiling_of_many(unit, np.ones(320), np.ones(320)) is None
    assert ceiling_of_many(np.arange(500), np.ones(500), np.ones(500)) is None


def test_requests_that_run_away_are_in_every_short_ones_last_quantiles() -> None:
    rng = np.random.default_rng(0)
    score = rng.random(20_000) * 3 + 3
    log = score + 0.1 * rng.standard_normal(len(score))
    away = rng.random(len(log)) < 0.004
    log = np.minimum(np.where(away, np.log(1000.0), log), np.log(1000.0))
    spread = np.full(len(score), 0.1)
    fitted = fit_distribution(score, spread, log, cap=1000)
    far = fitted.centres < np.log(500.0)
    assert fitted.runaway[far].mean() == pytest.approx(0.004, abs=0.0015)
    quantiles = fitted.quantiles(np.array([3.5, 4.5, 6.0]), np.full(3, 0.1), 1000)
    assert quantiles[:2, -1].tolist() == [1000, 1000]
    assert (quantiles[:2, int(np.searchsorted(LEVELS, 0.99))] < 200).all()
    assert (np.diff(quantiles, axis=1) >= 0).all()
    assert not fit_distribution(score, spread, log).runaway.any()
    assert isinstance(fitted, Distribution)


def test_prompts_like_those_that_ran_away_are_forecast_to_run_away() -> None:
    rng = np.random.default_rng(1)
    score = rng.random(20_000) * 3 + 3
    log = score + 0.1 * rng.standard_normal(len(score))
    away = rng.random(len(log)) < np.where(score > 5.0, 0.02, 0.0)
    log = np.minimum(np.where(away, np.log(1000.0), log), np.log(1000.0))
    fitted = fit_distribution(score, np.full(len(score), 0.1), log, cap=1000)
    assert (np.diff(fitted.runaway) >= 0).all()
    quantiles = fitted.quantiles(np.array([3.5, 4.5, 5.5]), np.full(3, 0.1), 1000)
    assert quantiles[2, -1] == 1000 and (quantiles[:2, -1] < 300).all()
