"""Forecasts of turns: which ended turns they are made of."""

from __future__ import annotations

import pytest

from streamrl.generation.site.turn_lengths import FEWEST, KEPT, PLACES, TurnLengths


def lengths_of(task: str, place: int, *lengths: int) -> TurnLengths:
    found = TurnLengths()
    for length in lengths:
        found.record(task, place, length)
    return found


def test_too_few_turns_forecast_nothing() -> None:
    known = lengths_of("a", 0, *[7] * (FEWEST - 1))
    assert known.forecast("a", 0, 100) is None
    known.record("a", 0, 7)
    found = known.forecast("a", 0, 100)
    assert found is not None and set(found.lengths) == {7.0}
    assert known.forecast("b", 0, 100) is None  # of another task


def test_a_forecast_has_the_distribution_of_the_newest_turns_at_its_place() -> None:
    known = lengths_of("a", 1, *[1000] * KEPT, *range(KEPT))  # the thousands are forgotten
    known.record("a", 0, 5)
    found = known.forecast("a", 1, 10_000)
    assert found is not None and len(found.lengths) == 16
    assert found.mean == pytest.approx((KEPT - 1) / 2, abs=0.5) and list(found.lengths) == sorted(found.lengths)
    assert max(found.lengths) == pytest.approx(KEPT - 1, abs=2.5)


def test_a_place_with_few_turns_is_forecast_as_the_task_is() -> None:
    known = lengths_of("a", 0, *[10] * FEWEST)
    found = known.forecast("a", 1, 100)
    assert found is not None and found.mean == 10
    for _ in range(FEWEST):
        known.record("a", 1, 30)
    found = known.forecast("a", 1, 100)
    assert found is not None and found.mean == 30


def test_late_places_count_as_one_so_that_endless_episodes_take_no_memory() -> None:
    known = TurnLengths()
    for place in range(10_000):
        known.record("a", place, 3)
    assert len(known._at) == PLACES + 1
    found = known.forecast("a", 5_000, 100)
    assert found is not None and found.mean == 3


def test_no_turn_is_expected_to_be_longer_than_it_may_be_or_empty() -> None:
    known = lengths_of("a", 0, *[0, 50] * FEWEST)
    found = known.forecast("a", 0, 20)
    assert found is not None and (min(found.lengths), max(found.lengths)) == (1.0, 20.0)
