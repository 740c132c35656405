"""Forecasts are corrected by what earlier ones were worth: by hand, and as plans then see them."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.cost.length_forecast import NORMAL_SCORES, TAIL_SCORES, Forecast
from scheduler.cost.recalibration import FEWEST, LEAST_SPREAD, SCORES, Recalibration, _scores_at, _shrunk_slope

LIMIT = 20_000.0


def learned(told: np.ndarray, came: np.ndarray, spread: float = 0.2, siblings: int = 1) -> Recalibration:
    """Log means of forecasts and log lengths, [n] each."""
    made = Recalibration()
    forecasts = [Forecast.lognormal(mean, spread) for mean in told]
    lengths = np.minimum(np.exp(came), LIMIT)
    made.record(forecasts, lengths, [f"{n // siblings}" for n in range(len(told))], lengths < LIMIT)
    return made


def test_the_slope_is_shrunk_by_its_error_and_stays_between_0_and_1() -> None:
    x, apart = np.asarray([-1.0, -1.0, 1.0, 1.0]), np.arange(4)
    # slope .5, rests +-.1: error (4 x .1^2) / 4^2 = .0025, so .5 x (1 - .0025 / .25)
    assert _shrunk_slope(x, np.asarray([-0.4, -0.6, 0.6, 0.4]), apart) == pytest.approx(0.5 * 0.99)
    # in two groups of x rest: 0.1 - 0.1 = 0 and 0: no error
    assert _shrunk_slope(x, np.asarray([-0.4, -0.6, 0.6, 0.4]), np.asarray([0, 0, 1, 1])) == pytest.approx(0.5)
    # siblings that miss alike are one error of twice the size: (2 x .2^2) / 4^2 = .005
    values = np.asarray([-0.4, -0.6, 0.6, 0.4])
    assert _shrunk_slope(x, values, np.asarray([0, 1, 1, 0])) == pytest.approx(0.5 * (1 - 0.005 / 0.25))
    assert _shrunk_slope(x, 3 * x, apart) == 1.0 and _shrunk_slope(x, -x, apart) == 0.0
    assert _shrunk_slope(x, np.asarray([-0.4, 0.6, -0.5, 0.6]), apart) == 0.0, "downwards"
    # slope .025, x rest .5, -.5, -.45 and .45: error .905 / 16
    assert _shrunk_slope(x, np.asarray([-0.4, 0.6, -0.3, 0.6]), apart) == 0.0, "no clearer than its error"
    # slope .5, rests +-.1, squares 1: error 4 x (.5 x .1)^2 = .01, so .5 x (1 - .01 / .25)
    assert _shrunk_slope(x / 2, np.asarray([-0.15, -0.35, 0.35, 0.15]), apart) == pytest.approx(0.48)
    assert _shrunk_slope(np.ones(4), values, apart) == 0.0, "forecasts that are all the same"


def test_scores_are_read_off_the_forecast_and_go_on_beyond_it() -> None:
    logs = (2.0 + 0.5 * SCORES)[None].repeat(5, axis=0)
    assert _scores_at(logs, np.asarray([2.0, 2.5, 1.5, 2.0 + 0.5 * 6, 2.0 - 0.5 * 6])) == pytest.approx(
        [0, 1, -1, 6, -6]
    )
    known = np.full((3, 21), 2.0)
    scores = _scores_at(known, np.asarray([2.0, 2.0 + LEAST_SPREAD, 2.0 - LEAST_SPREAD]))
    assert scores == pytest.approx([SCORES[0], SCORES[-1] + 1, SCORES[0] - 1])


def test_each_end_of_a_forecast_goes_on_as_steeply_as_it_ended() -> None:
    logs = 2.0 + 0.5 * SCORES
    logs[0] -= SCORES[1] - SCORES[0]  # a slope of 1.5 at the lower end
    logs[-1] += 2 * (SCORES[-1] - SCORES[-2])  # and of 2.5 at the upper one
    scores = _scores_at(logs[None].repeat(2, axis=0), np.asarray([logs[0] - 1.5, logs[-1] + 2.5]))
    assert scores == pytest.approx([SCORES[0] - 1, SCORES[-1] + 1])


def test_a_length_at_the_limit_scores_where_its_forecast_reaches_the_limit() -> None:
    """It was cut off, so its score is that or more."""
    logs = np.minimum(2.0 + 0.5 * SCORES, 2.5)[None]
    assert _scores_at(logs, np.asarray([2.5])) == SCORES[SCORES >= 1.0].min()


def test_nothing_is_corrected_before_enough_was_seen_and_the_newest_steps_count() -> None:
    made, forecast = Recalibration(), Forecast.lognormal(6.0, 0.2)
    made.record([], [], [], [])
    made.record([forecast] * (FEWEST - 1), [900.0] * (FEWEST - 1), ["g"] * (FEWEST - 1), [True] * (FEWEST - 1))
    assert made.corrected(forecast) is forecast and (made.intercept, made.slope) == (0.0, 1.0)
    made.record([forecast], [900.0], ["g"], [True])
    assert made.corrected(forecast).mean == pytest.approx(900.0, rel=0.01)
    for _ in range(7):
        made.record([forecast] * 4, [100.0] * 4, ["g"] * 4, [True] * 4)
    assert made.corrected(forecast).mean > 110.0  # of the eight newest steps the first had a 900
    made.record([forecast] * 4, [100.0] * 4, ["g"] * 4, [True] * 4)
    assert made.corrected(forecast).mean == pytest.approx(100.0, rel=0.01)


def test_a_forecast_that_was_right_stays_as_it_is() -> None:
    """Its misses are the 16 normal scores, twice; the tail goes on beyond them as that of a normal deviate."""
    told = np.repeat([5.0, 7.0], 16)
    made = learned(told, told + 0.2 * np.tile(NORMAL_SCORES, 2), siblings=16)
    forecast = Forecast.lognormal(6.0, 0.2)
    corrected = made.corrected(forecast)
    assert (made.slope, made.intercept) == pytest.approx((1.0, 0.0))
    assert corrected.lengths == pytest.approx(forecast.lengths)
    assert np.log(corrected.tail) == pytest.approx(6.0 + 0.2 * TAIL_SCORES)


def test_no_length_is_below_one_token() -> None:
    made, forecast = Recalibration(), Forecast.lognormal(6.0, 0.2)
    made.record([forecast] * FEWEST, [0.0] * FEWEST, ["g"] * FEWEST, [True] * FEWEST)
    assert made.intercept == 0.0, "the log of 1"
    made = learned(np.full(32, 6.0), np.tile([0.0, 0.4], 16))  # scores -1 and 1
    assert made.intercept == pytest.approx(0.2)
    assert min(made.corrected(Forecast.lognormal(6.0, 2.0)).lengths) == 1.0, "and not exp(0.2 - 2)"


def test_a_tail_beyond_that_of_a_normal_deviate_is_kept_as_it_was_found() -> None:
    """The largest 2.5 % all miss by the same; the last of the 16 levels, at 97 %, is not among them."""
    scores = np.concatenate([np.repeat(NORMAL_SCORES[:-1], 65), np.full(25, 6.0)])
    made = learned(np.full(1000, 6.0), 6.0 + 0.2 * scores)
    largest = 6.0 - scores.mean()
    assert made.scores[15] < 2.0
    assert made.scores[16:] == pytest.approx([largest] * 5)


def test_groups_of_different_steps_are_different_groups() -> None:
    rng = np.random.default_rng(4)
    told, names = rng.normal(6.0, 1.0, 60), [f"{n % 6}" for n in range(60)]
    forecasts, lengths = [Forecast.lognormal(mean, 0.2) for mean in told], np.exp(told + rng.normal(0.0, 2.0, 60))
    both, once = Recalibration(), Recalibration()
    for part, step in ((slice(0, 30), "a"), (slice(30, 60), "b")):
        both.record(forecasts[part], lengths[part], names[part], [True] * 30)
        names[part] = [step + name for name in names[part]]
    once.record(forecasts, lengths, names, [True] * 60)
    assert 0 < both.slope < 1 and both.slope == pytest.approx(once.slope)


def test_an_honest_forecast_stays_as_it_is_within_what_128_samples_tell() -> None:
    rng = np.random.default_rng(0)
    told = rng.normal(7.0, 1.0, 512)
    made = learned(told, told + 0.3 * rng.standard_normal(512), 0.3)
    forecast = Forecast.lognormal(6.5, 0.3)
    corrected = made.corrected(forecast, LIMIT)
    assert made.slope > 0.98
    assert np.log(corrected.lengths) == pytest.approx(np.log(forecast.lengths), abs=0.12)
    assert np.log(corrected.tail) == pytest.approx(6.5 + 0.3 * TAIL_SCORES, abs=0.3)


def test_an_overconfident_forecast_becomes_as_wide_as_its_misses() -> None:
    rng = np.random.default_rng(1)
    told = rng.normal(6.0, 1.0, 512)
    logs = np.log(learned(told, told + 0.7 * rng.standard_normal(512)).corrected(Forecast.lognormal(6.0, 0.2)).lengths)
    assert logs.mean() == pytest.approx(6.0, abs=0.1) and logs.std() == pytest.approx(
        0.7 * NORMAL_SCORES.std(), rel=0.1
    )


@pytest.mark.parametrize("sign", [0.0, -1.0], ids=["useless", "adversarial"])
def test_forecasts_that_say_nothing_all_become_the_distribution_of_all_lengths(sign: float) -> None:
    rng = np.random.default_rng(2)
    told = rng.normal(6.0, 1.0, 256)
    came = 6.0 + sign * (told - 6.0) + (1.0 if not sign else 0.1) * rng.standard_normal(256)
    made = learned(told, came)
    short, long = (made.corrected(Forecast.lognormal(mean, 0.2), LIMIT) for mean in (5.0, 8.0))
    assert made.intercept == pytest.approx(came.mean() - made.slope * told.mean(), abs=1e-6)
    assert made.slope < 0.05 and short.mean == pytest.approx(long.mean, rel=0.25)
    assert np.quantile(short.lengths, (0.1, 0.9)) == pytest.approx(np.exp(np.quantile(came, (0.1, 0.9))), rel=0.25)


def test_runaways_that_no_forecast_foresaw_are_expected_of_every_request() -> None:
    rng = np.random.default_rng(3)
    told = rng.normal(6.0, 0.5, 400)
    came = np.where(np.arange(400) % 10 == 0, np.log(LIMIT) + 1.0, told + 0.2 * rng.standard_normal(400))
    for mean in (5.5, 6.5):
        forecast = learned(told, came).corrected(Forecast.lognormal(mean, 0.2), LIMIT)
        assert forecast.lengths[13] < 2 * np.exp(mean) and forecast.lengths[15] == LIMIT, "levels .84 and .97"
        assert forecast.lengths[8] == pytest.approx(np.exp(mean), rel=0.25) and forecast.tail == (LIMIT,) * 5
