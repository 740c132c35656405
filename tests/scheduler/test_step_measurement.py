"""When measured step times are stable, possible, and in agreement."""

from __future__ import annotations

import pytest

from scheduler.cost.decode import StepCurve
from scheduler.cost.step_measurement import is_stable, spread, steepest_fall


def test_the_spread_is_the_median_deviation_so_one_disturbed_repeat_does_not_matter() -> None:
    assert spread([1.0, 1.0, 30.0]) == 0.0
    assert spread([0.8, 1.0, 1.1, 1.4]) == pytest.approx(0.15 / 1.05)


@pytest.mark.parametrize(
    ("repeats", "stable"),
    [([1.0], False), ([1.0, 1.0], False), ([1.0, 1.0, 9.0], True), ([1.0, 1.2, 1.4], False), ([0.95, 1.0, 1.05], True)],
)
def test_three_repeats_within_the_spread_are_stable(repeats: list[float], stable: bool) -> None:
    assert is_stable(repeats) is stable


def test_the_steepest_fall_is_found_and_noise_is_none() -> None:
    # of a calibration that ran beside other load
    seen = {1: 133.0, 2: 182.0, 4: 11.0, 8: 32.0, 16: 72.0, 32: 68.0, 64: 53.0}
    assert steepest_fall(seen) == (2, 4)
    assert steepest_fall({1: 1.0, 2: 0.86, 4: 2.0}) is None
    assert steepest_fall({1: 1.0, 2: 0.84, 4: 2.0}) == (1, 2)
    # each within noise of its neighbour, together beyond it
    assert steepest_fall({1: 1.0, 2: 0.9, 4: 0.8}) == (1, 4)
    assert steepest_fall({8: 1.0}) is None


def test_repeats_that_differ_make_a_fall_less_sure() -> None:
    assert steepest_fall({1: 1.0, 2: 0.7}, {1: 0.0, 2: 0.0}) == (1, 2)
    assert steepest_fall({1: 1.0, 2: 0.7}, {1: 0.1, 2: 0.1}) is None
    assert steepest_fall({1: 1.0, 2: 0.6}, {1: 0.1, 2: 0.1}) == (1, 2)


def test_a_calibration_that_falls_with_the_batch_is_refused_and_one_within_noise_is_pooled() -> None:
    complaint = (
        r'"step_seconds": a step of batch 4 took 11 ms and one of batch 2 182 ms.*expected times that do not fall'
    )
    with pytest.raises(ValueError, match=complaint):
        StepCurve.from_json({"step_seconds": {"1": 0.133, "2": 0.182, "4": 0.011, "8": 0.032}})
    assert StepCurve.from_json({"step_seconds": {"1": 1.0, "2": 0.9}}).seconds == (0.95, 0.95)
