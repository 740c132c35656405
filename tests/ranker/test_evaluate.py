"""Measures of a ranking, the noise ceiling, and the distribution of what is left."""

from __future__ import annotations

import numpy as np
import pytest

from ranker.ceiling import ceiling_of_many
from ranker.data import from_rows
from ranker.distribution import LEVELS, Distribution, expected_length, fit_distribution
from ranker.evaluate import baselines, kendall_tau, recall_at
from ranker.history import simulate
from ranker.shrinkage import fit_shrunk
from scheduler.cost.length_forecast import Forecast
from scheduler.cost.survival import end_rate, kaplan_meier, restricted_mean, survival_quantiles


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
    assert recall_at(capped, capped, 0.2) == pytest.approx(0.5)
    assert recall_at(capped, capped, 0.5) == pytest.approx(1.0) and recall_at(length, length, 0.05) == 1.0
    # twenty of the forty are predicted: each is among the longest twenty with probability one half
    assert recall_at(length, capped, 0.2) == pytest.approx(0.5)
    assert recall_at(capped, length, 0.2) == pytest.approx(0.5)
    drawn = np.random.default_rng(0)
    lucky = [recall_at(length, capped + 0.5 * drawn.random(100), 0.2) for _ in range(400)]
    assert np.mean(lucky) == pytest.approx(0.5, abs=0.03)
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
    fitted = fit_distribution(score, spread, log, log < np.log(1000.0), 20_000)
    far = fitted.centres < np.log(500.0)
    assert fitted.runaway[far].mean() == pytest.approx(0.004, abs=0.0015)
    quantiles = fitted.quantiles(np.array([3.5, 4.5, 6.0]), np.full(3, 0.1), 1000)
    assert quantiles[:2, -1].tolist() == [1000, 1000]
    assert (quantiles[:2, int(np.searchsorted(LEVELS, 0.99))] < 200).all()
    assert (np.diff(quantiles, axis=1) >= 0).all()
    assert not fit_distribution(score, spread, log, np.ones(len(log), bool), 20_000).runaway.any()
    assert isinstance(fitted, Distribution)


def test_prompts_like_those_that_ran_away_are_forecast_to_run_away() -> None:
    rng = np.random.default_rng(1)
    score = rng.random(20_000) * 3 + 3
    log = score + 0.1 * rng.standard_normal(len(score))
    away = rng.random(len(log)) < np.where(score > 5.0, 0.02, 0.0)
    log = np.minimum(np.where(away, np.log(1000.0), log), np.log(1000.0))
    fitted = fit_distribution(score, np.full(len(score), 0.1), log, log < np.log(1000.0), 20_000)
    assert (np.diff(fitted.runaway) >= 0).all()
    quantiles = fitted.quantiles(np.array([3.5, 4.5, 5.5]), np.full(3, 0.1), 1000)
    assert quantiles[2, -1] == 1000 and (quantiles[:2, -1] < 300).all()


def test_lengths_grow_in_proportion_to_scores_in_tokens_beyond_the_last_bin() -> None:
    rng = np.random.default_rng(2)
    score = rng.lognormal(6, 1, 6000)
    log = np.log(score) + 0.1 * rng.standard_normal(len(score))
    ended, spread = np.ones(len(log), bool), np.full(len(log), 0.1)
    fitted = fit_distribution(score, spread, log, ended, 6000, in_tokens=True)
    far = fitted.centres[-1] * np.array([1.0, 1.5, 2.0, 4.0])
    middle = fitted.quantiles(far, spread[:4], 1e6)[:, int(np.searchsorted(LEVELS, 0.5))]
    np.testing.assert_allclose(middle, far, rtol=0.1)
    low = fitted.quantiles(np.array([-1e5, -1e3, 0.0]), spread[:3], 1e6)
    assert np.isfinite(low).all() and (np.diff(low[:, 6]) >= 0).all() and low.max() < 500


def test_short_lengths_follow_scores_in_tokens_below_the_first_bin_as_far_as_they_do_so_elsewhere() -> None:
    """Lengths like their scores halve, about, with the score; lengths far below their scores tell nothing of it."""
    rng = np.random.default_rng(4)
    score = rng.lognormal(6, 1, 6000)
    ended, spread = np.ones(len(score), bool), np.full(len(score), 0.1)
    for share, low, high in ((1.0, 0.5, 0.7), (0.05, 0.9, 1.0)):
        log = np.log(np.where(score < 400, share, 1.0) * score) + 0.1 * rng.standard_normal(len(score))
        fitted = fit_distribution(score, spread, log, ended, 6000, in_tokens=True)
        at = fitted.centres[0] * np.array([1.0, 0.5])
        middle = fitted.quantiles(at, spread[:2], 1e6)[:, int(np.searchsorted(LEVELS, 0.5))]
        assert low < middle[1] / middle[0] < high


def test_negative_scores_in_tokens_go_on_in_a_straight_line() -> None:
    """A last bin at or below 0 has no log."""
    score = np.linspace(-1000.0, -1.0, 2000)
    log = 5 + score / 1000
    ended, spread = np.ones(len(log), bool), np.full(len(log), 0.1)
    fitted = fit_distribution(score, spread, log, ended, 2000, in_tokens=True)
    middle = fitted.quantiles(np.array([-500.0, 100.0]), spread[:2], 1e4)[:, int(np.searchsorted(LEVELS, 0.5))]
    np.testing.assert_allclose(np.log(middle), [4.5, 5.1], atol=0.05)


def test_kaplan_and_meier_count_what_is_cut_off_as_longer() -> None:
    """By hand: of 5 one ends at 1; one is cut off at 2; of 3 left one ends at 3; of 2 one at 4; the last runs."""
    values, ended = np.array([1.0, 2.0, 3.0, 4.0, 5.0]), np.array([True, False, True, True, False])
    at, ends, beyond = kaplan_meier(values, ended)
    assert at.tolist() == [1, 3, 4] and ends.tolist() == [1, 1, 1]
    np.testing.assert_allclose(beyond, [4 / 5, 4 / 5 * 2 / 3, 4 / 5 * 2 / 3 / 2])
    left = 4 / 15
    far = survival_quantiles(values, ended, np.array([1 - left / np.e]), rate=0.5)
    np.testing.assert_allclose(far, [4 + 1 / 0.5])  # beyond the last end: exponential, at the given rate


def test_a_mean_counts_what_was_cut_off_early_as_longer() -> None:
    length = np.array([10.0, 20, 30, 40, 15])
    ended = np.array([True, True, True, True, False])  # the last one goes on as those beyond 15 do
    assert restricted_mean(length, ended) == pytest.approx(0.2 * 10 + 0.8 * 30)
    assert restricted_mean(length[:4], ended[:4]) == pytest.approx(25)
    assert restricted_mean(np.minimum(length[:4], 25), length[:4] < 25) == pytest.approx(20)


def test_quantiles_without_censoring_are_those_of_the_samples() -> None:
    values = np.random.default_rng(0).standard_normal(1001)
    levels = np.array([0.1, 0.5, 0.9])
    np.testing.assert_allclose(
        survival_quantiles(values, np.ones(1001, bool), levels, 1.0), np.quantile(values, levels, method="hazen")
    )


def test_a_tail_cut_off_at_random_points_is_recovered() -> None:
    rng = np.random.default_rng(0)
    true, cut = rng.exponential(2.0, 40_000), rng.uniform(0, 4, 40_000)
    values, ended = np.minimum(true, cut), true <= cut
    rate = end_rate(values, ended, 1.0)
    assert rate == pytest.approx(0.5, rel=0.05)
    assert end_rate(values[:3], ended[:3], 3.9, prior=0.5) == pytest.approx(0.5, rel=0.1)  # no data: the prior
    levels = np.array([0.2, 0.5, 0.8, 0.95])
    np.testing.assert_allclose(survival_quantiles(values, ended, levels, rate), -2 * np.log1p(-levels), rtol=0.06)


def test_the_expected_length_is_that_of_the_forecast_that_dispatch_gets() -> None:
    rng = np.random.default_rng(0)
    quantiles = np.sort(np.exp(rng.normal(5, 1, (50, len(LEVELS)))), axis=1)
    means = [Forecast.from_quantiles(LEVELS, row).mean for row in quantiles]
    np.testing.assert_allclose(expected_length(quantiles), means, rtol=1e-9)


def test_means_are_shrunk_as_far_as_they_are_noise() -> None:
    rng = np.random.default_rng(0)
    mean = 100 + 20 * rng.standard_normal(40)
    task, prompt, value = [], [], []
    for t in range(40):
        for p in range(2 if t < 20 else 50):
            of_prompt = mean[t] + 30 * rng.standard_normal()
            for _ in range(3):
                task.append(t)
                prompt.append(1000 * t + p)
                value.append(of_prompt + 10 * rng.standard_normal())
    codes, prompts, values = np.array(task), np.array(prompt), np.array(value)
    table = fit_shrunk(codes, 41, prompts, values)
    assert table.between == pytest.approx(900, rel=0.15) and table.within == pytest.approx(100, rel=0.15)
    plain = np.bincount(codes, values) / np.bincount(codes)
    few, many = slice(0, 20), slice(20, 40)
    assert ((table.tasks[:40] - mean)[few] ** 2).mean() < 0.8 * ((plain - mean)[few] ** 2).mean()
    np.testing.assert_allclose(table.tasks[:40][many], plain[many], atol=6)
    assert table.of_task(np.array([40.0, -1.0, np.nan])).tolist() == [table.prior] * 3  # unknown: the mean of tasks
    # two earlier samples of a prompt with mean 200 in a task of 100, by hand: w = 2 V / (2 V + v)
    weight = 2 * table.between / (2 * table.between + table.within)
    given = table.given(np.array([100.0, 100.0]), np.array([200.0, np.nan]), np.array([2.0, np.nan]))
    np.testing.assert_allclose(given, [100 + 100 * weight, 100])


def test_baselines_are_at_their_strongest() -> None:
    """Two tasks of one mean log length: only the mean length and the share at the limit tell them apart."""
    rng = np.random.default_rng(0)
    rows = []
    for n in range(400):
        for r in range(4):
            wide = n % 2
            length = int(np.clip(np.exp(4 + (1.2 if wide else 0.1) * rng.standard_normal()), 1, 300))
            reason = "length" if length == 300 else "stop"
            rows.append({"prompt": f"p{n}", "task": "ab"[wide], "output_length": length, "finish_reason": reason})
            rows[-1] |= {"group_id": f"g{n}.{r % 2}", "step": 1 + r // 2}
    rollouts = from_rows(rows)
    fold = rollouts.prompt % 3
    found = baselines(rollouts, simulate(rollouts), fold)
    assert set(found) == {
        *("random", "prompt_characters", "task_mean", "task_at_limit"),
        *("earlier_mean", "earlier_shrunk", "siblings_hindsight", "siblings_shrunk_hindsight"),
    }
    wide = rollouts.task == rollouts.tasks.index("b")
    for name in ("task_mean", "task_at_limit"):
        assert found[name][wide].min() > found[name][~wide].max(), name
    first = rollouts.step == 1  # nothing earlier: the task's mean
    np.testing.assert_array_equal(found["earlier_shrunk"][first], found["task_mean"][first])
    noisy = wide & ~first
    recall = {name: recall_at(found[name][noisy], rollouts.output_length[noisy], 0.2) for name in found}
    moved = np.abs(found["earlier_shrunk"] - found["task_mean"])[noisy].mean()
    assert moved < 0.5 * np.abs(found["earlier_mean"] - found["task_mean"])[noisy].mean()
    assert recall["task_mean"] > 0.1
