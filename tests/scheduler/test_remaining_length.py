"""What is left of many requests at once is what `Forecast.beyond` says of each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.cost.decode import StepCurve, replica_time
from scheduler.cost.length_forecast import MIDPOINTS, Forecast, equally_likely, same_width, stack
from scheduler.dispatch.policy import Instance, Request
from scheduler.dispatch.remaining_length import Remaining, beyond

LENGTHS = st.lists(st.floats(1, 5000), min_size=16, max_size=16).map(sorted)


@given(
    st.lists(st.tuples(LENGTHS, st.floats(0, 8000)), min_size=1, max_size=6), st.sampled_from([np.inf, 5000.0, 300.0])
)
@settings(max_examples=60)
def test_each_row_is_the_forecast_of_what_is_left(rows: list[tuple[list[float], float]], limit: float) -> None:
    forecasts, produced = [Forecast(tuple(lengths)) for lengths, _ in rows], [done for _, done in rows]
    expected = stack([f.beyond(done, limit) for f, done in zip(forecasts, produced, strict=True)])
    assert beyond(stack(forecasts), np.asarray(produced), limit) == pytest.approx(expected)


def test_known_lengths_stay_known_until_one_is_outrun() -> None:
    values = equally_likely([Forecast.exactly(10), Forecast.exactly(30)])
    assert beyond(values, np.asarray([4.0, 0.0])).tolist() == [[6.0], [30.0]]
    outrun = beyond(values, np.asarray([20.0, 4.0]))
    assert outrun[0].tolist() == [10.0] * 8 + [30.0] * 8 and outrun[1].tolist() == [26.0] * 16


def test_a_length_that_was_just_reached_is_outrun() -> None:
    assert beyond(np.asarray([[10.0]]), np.asarray([10.0])).tolist() == [[5.0] * 8 + [15.0] * 8]


def test_a_request_without_a_forecast_is_one_that_outruns_it_with_its_first_token() -> None:
    unknown = Request("a", "g", None, 5)
    left = Remaining.of([unknown, unknown], [0, 8], np.inf)
    assert left.values.tolist() == [[1.0] * 16, [4.0] * 8 + [12.0] * 8]


def test_the_limit_cuts_what_is_left_of_requests_that_have_begun() -> None:
    values, produced = np.full((3, 1), 30.0), np.asarray([0.0, 1.0, 19.5])
    assert beyond(values, produced, 20.0).tolist() == [[30.0], [19.0], [1.0]]


def test_parts_are_timed_as_a_whole() -> None:
    curve = StepCurve((1, 8), (1.0, 4.0), per_context_token=1e-3)
    known = Remaining.of([Request(str(n), "g", Forecast.exactly(10.0 + n), 5) for n in range(4)], [0, 3, 3, 0], np.inf)
    machine = Instance("a", 8, curve)
    # context: what each has, read at every step of what is left, and what it adds itself
    assert known.time_on(machine) == pytest.approx(replica_time([10, 8, 9, 13], curve, [5, 8, 8, 5]), rel=1e-9)
    parts = known.take([3, 1]) + known.take([0, 2])
    assert [request.request_id for request in parts.requests] == ["3", "1", "0", "2"]
    assert parts.time_on(machine) == pytest.approx(known.time_on(machine))
    assert known.take([]).time_on(machine) == 0.0


def test_joined_parts_have_one_width() -> None:
    wide, narrow, none = np.tile(MIDPOINTS, (2, 1)), np.asarray([[3.0]]), np.zeros((0, 1))
    assert [part.shape for part in same_width([wide, narrow, none])] == [(2, 16), (1, 16), (0, 16)]
    assert [part.shape for part in same_width([none, none])] == [(0, 1), (0, 1)]
    assert same_width([narrow, none])[0] is narrow
