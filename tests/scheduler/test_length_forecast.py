"""Forecasts: what is left of a running request, and joint draws."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.cost.length_forecast import MIDPOINTS, TAIL_LEVELS, Forecast, scenarios, stack, tails_of


def lognormal(median: float, sigma: float, count: int = 200_000) -> np.ndarray:
    return median * np.exp(sigma * np.random.default_rng(0).standard_normal(count))


def of_lognormal(median: float, sigma: float) -> Forecast:
    return Forecast(tuple(np.quantile(lognormal(median, sigma), MIDPOINTS).tolist()))


@pytest.mark.parametrize("produced", [0, 100, 300])
def test_what_is_left_follows_the_conditional_mean(produced: int) -> None:
    sample = lognormal(200, 0.6)
    truth = (sample[sample > produced] - produced).mean()
    assert of_lognormal(200, 0.6).beyond(produced).mean == pytest.approx(truth, rel=0.12)


def test_a_request_that_outruns_its_forecast_is_expected_to_go_on() -> None:
    left = Forecast((10.0, 20.0)).beyond(100)
    assert left.mean == pytest.approx(100)
    assert Forecast.exactly(5).beyond(5).mean >= 1
    assert Forecast((10.0, 20.0)).beyond(100, limit=110).lengths == (10.0, 10.0)
    assert Forecast((10.0, 20.0)).beyond(100, limit=100).lengths == (1.0, 1.0)


def test_quantiles_become_equally_likely_lengths() -> None:
    levels = np.linspace(0.02, 0.98, 17)
    forecast = Forecast.from_quantiles(levels, np.quantile(lognormal(200, 0.6), levels))
    assert list(forecast.lengths) == sorted(forecast.lengths)
    assert forecast.mean == pytest.approx(lognormal(200, 0.6).mean(), rel=0.03)


def test_stacking_keeps_means() -> None:
    rows = stack([Forecast.exactly(7), Forecast((1.0, 3.0)), of_lognormal(50, 0.3)])
    assert rows.shape == (3, 16)
    assert rows.mean(axis=1).tolist() == pytest.approx([7, 2, of_lognormal(50, 0.3).mean])


def test_scenarios_have_the_forecasts_quantiles_and_reach_beyond_them() -> None:
    drawn = scenarios(stack([of_lognormal(200, 0.6)] * 1000), 50, seed=1, limit=2000)
    sample = lognormal(200, 0.6)
    for level in (0.05, 0.5, 0.95, 0.999):
        assert np.quantile(drawn, level) == pytest.approx(np.quantile(sample, level), rel=0.08)
    assert drawn.max() <= 2000
    assert np.array_equal(drawn, scenarios(stack([of_lognormal(200, 0.6)] * 1000), 50, seed=1, limit=2000))


def test_known_lengths_have_one_future() -> None:
    assert scenarios(np.asarray([[5.0], [3.0]]), 2, seed=0).tolist() == [[5.0, 3.0], [5.0, 3.0]]


def test_a_tail_that_is_known_is_drawn_from() -> None:
    """One in 200 runs away to 5000; sixteen values do not show it."""
    levels = [0.02, 0.5, 0.98, *TAIL_LEVELS[1:]]
    forecast = Forecast.from_quantiles(levels, [50, 100, 200, 210, 5000, 5000, 5000])
    plain = Forecast(forecast.lengths)
    assert len(forecast.tail) == len(TAIL_LEVELS) and plain.tail == ()
    rows = stack([forecast] * 2000)
    with_tail = scenarios(rows, 20, seed=0, limit=6000, tails=tails_of([forecast] * 2000))
    without = scenarios(rows, 20, seed=0, limit=6000, tails=tails_of([plain] * 2000))
    assert np.mean(with_tail > 4000) == pytest.approx(0.005, rel=0.3)
    assert without.max() < 2000
    assert np.median(with_tail) == pytest.approx(np.median(without), rel=0.01)
    assert np.array_equal(without, scenarios(rows, 20, seed=0, limit=6000))


def test_quantiles_that_end_early_tell_no_tail() -> None:
    assert Forecast.from_quantiles([0.1, 0.5, 0.9], [1, 2, 3]).tail == ()


def test_what_still_runs_is_longer_than_it_is_by_kaplan_and_meier() -> None:
    # 3/4 go on after 100; one runs at 150; half of the two that got to 200 go on: 3/8; none goes on after 400. An end
    # stands for the middle of its step: 100 at .125, 200 at .4375, 400 at .8125, straight lines of the log between
    seen = Forecast.observed([200.0, 100.0, 400.0], [150.0]).lengths
    assert seen[0] == pytest.approx(100.0) and seen[15] == pytest.approx(400.0)
    assert seen[6] == pytest.approx(100 * 2 ** ((0.40625 - 0.125) / 0.3125))
    assert seen[7] == pytest.approx(200 * 2 ** ((0.46875 - 0.4375) / 0.375))
    # without it 100 would be at 1/6, 200 at 1/2
    assert Forecast.observed([200.0, 100.0, 400.0], []).lengths[6] == pytest.approx(100 * 2 ** ((0.40625 - 1 / 6) * 3))
    # 2/3 go on after 100, and nothing has ended since: half an end in twice log 3
    beyond = Forecast.observed([100.0], [300.0, 300.0], 1000.0).lengths
    rate = 0.5 / (2 * np.log(3))
    assert beyond[7] == pytest.approx(100 * ((2 / 3) / (1 - 0.46875)) ** (1 / rate))
    assert beyond[15] == 1000.0, "the limit"
