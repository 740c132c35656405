"""Forecasts by the other samples of a prompt, which the kept model is measured against."""

from __future__ import annotations

import numpy as np
import pytest

from ranker import held_out
from ranker.distribution import LEVELS
from ranker.held_out import _others


@pytest.mark.parametrize("at_once", [1, 8, held_out.AT_ONCE])
def test_the_other_samples_of_a_unit_are_all_but_the_one_that_is_foretold(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_out, "AT_ONCE", at_once)
    unit = np.array([4, 2, 4, 7, 2, 4, 9, 2, 4, 9, 1])  # of one to four samples, mixed
    length = np.array([10, 200, 30, 5, 40, 5, 60, 70, 80, 9, 3])
    for number, forecast in enumerate(_others(unit, length)):
        others = np.delete(length, number)[np.delete(unit, number) == unit[number]]
        expected = np.quantile(others, LEVELS) if len(others) else np.full(len(LEVELS), np.nan)
        np.testing.assert_array_equal(forecast, expected)


def test_no_samples_have_no_forecasts() -> None:
    assert _others(np.zeros(0, int), np.zeros(0, int)).shape == (0, len(LEVELS))
