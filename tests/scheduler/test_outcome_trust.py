"""Dispatch by forecasts is trusted by what it would have cost: replayed steps, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scheduler.dispatch.outcome_trust import USUAL_SPREAD, WINDOW, OutcomeTrust


def after(*ratios: float) -> OutcomeTrust:
    trust = OutcomeTrust()
    for ratio in ratios:
        trust.record([ratio])
    return trust


def test_nothing_is_believed_before_a_replay() -> None:
    trust = after()
    assert not trust.trusted and trust.mean is None and trust.steps == 0


def test_the_newest_eight_steps_count() -> None:
    trust = after(2.0, *[0.5] * 7)
    assert trust.steps == 8 and trust.mean == pytest.approx((2.0 + 7 * 0.5) / 8)
    trust.record([0.5])
    assert trust.steps == 8 and trust.mean == 0.5


def test_the_spread_is_shrunk_towards_the_usual_one() -> None:
    # variance 0 of one step, and three steps of the usual one: .03 sqrt(3 / 4)
    assert after(0.9).spread == pytest.approx(USUAL_SPREAD * math.sqrt(3 / 4))
    # variance .01 of two steps: (2 x .01 + 3 x .0009) / 5
    assert after(0.8, 1.0).spread == pytest.approx(math.sqrt((0.02 + 0.0027) / 5))


def test_resampled_batches_of_one_step_count_as_one_step() -> None:
    trust = after()
    trust.record([0.8, 1.0, 0.8, 1.0])
    trust.record([1.0])
    assert trust.steps == 2 and trust.mean == pytest.approx(0.95), "the mean of .9 and 1"
    trust = after()
    trust.record([0.8, 1.0])
    assert trust.spread == pytest.approx(math.sqrt((0.01 + 0.0027) / 4))


def test_what_saves_is_trusted_and_what_costs_is_not() -> None:
    assert after(0.97).trusted and after(1.0).trusted
    assert not after(1.001).trusted and not after(1.02, 0.99).trusted


def test_a_saving_on_average_is_not_trusted_if_one_step_in_twenty_costs_more_than_a_twentieth() -> None:
    wild = after(0.8, 1.15, 0.8, 1.15)
    assert wild.mean == pytest.approx(0.975) and not wild.trusted
    # spread sqrt((4 x .0156 + .0027) / 7) = .096: one step in twenty is beyond .975 + 1.645 x .096 = 1.13
    assert not after(0.85, 1.1, 0.85, 1.1).trusted
    assert after(0.96, 0.99, 0.96, 0.99).mean == pytest.approx(0.975) and after(0.96, 0.99, 0.96, 0.99).trusted


def test_only_the_newest_steps_count_so_trust_is_lost_and_won_back() -> None:
    trust = after(*[0.9] * WINDOW)
    assert trust.trusted
    for _ in range(WINDOW // 2 + 1):
        trust.record([1.1])
    assert not trust.trusted
    for _ in range(WINDOW):
        trust.record([0.9])
    assert trust.trusted and trust.steps == WINDOW and trust.mean == pytest.approx(0.9)


def test_a_step_without_a_replay_is_refused() -> None:
    with pytest.raises(ValueError, match="took"):
        after().record([])


@pytest.mark.parametrize("ratio", [0.0, -1.0, math.nan, math.inf])
def test_a_ratio_that_is_none_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match="> 0"):
        after(ratio)


@pytest.mark.parametrize(("mean", "spread", "used"), [(0.93, 0.05, (0.9, 1.0)), (1.05, 0.08, (0.0, 0.1))])
def test_over_long_runs_it_uses_what_pays_and_leaves_what_costs(
    mean: float, spread: float, used: tuple[float, float]
) -> None:
    rng = np.random.default_rng(0)
    times = []
    for _ in range(60):
        trust = OutcomeTrust()
        for ratio in np.maximum(0.3, rng.normal(mean, spread, 40)):
            times.append(trust.trusted)
            trust.record([float(ratio)])
    assert used[0] <= np.mean(times) <= used[1]
