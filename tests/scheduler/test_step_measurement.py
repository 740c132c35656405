"""When measured step times are stable, possible, and in agreement."""

from __future__ import annotations

import itertools
import random

import pytest

from scheduler.cost.decode import MOST_POINTS, StepCurve
from scheduler.cost.step_measurement import NOISE, is_stable, spread, steepest_fall


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


def test_the_steepest_fall_is_that_of_all_pairs() -> None:
    """Each batch is compared with the slowest smaller one alone, and the result is that among all pairs."""
    dice = random.Random(0)
    for _ in range(500):
        sizes = dice.sample(range(1, 40), dice.randrange(1, 12))
        points = {size: dice.choice([1.0, 2.0, 3.3, dice.random()]) for size in sizes}
        falls = [
            (points[large] / points[small], small, large)
            for small, large in itertools.combinations(sorted(points), 2)
            if points[large] < (1 - NOISE) * points[small]
        ]
        assert steepest_fall(points) == (min(falls)[1:] if falls else None)


class CountedReads(dict[int, float]):
    """Points that count how often one is read."""

    reads = 0

    def __getitem__(self, size: int) -> float:
        self.reads += 1
        return super().__getitem__(size)


def test_each_point_is_looked_at_a_few_times_however_many_there_are() -> None:
    points = CountedReads({size: 0.01 for size in range(1, 1001)})
    assert steepest_fall(points) is None
    assert points.reads <= 3 * len(points)


def test_a_calibration_of_more_batch_sizes_than_anyone_measures_is_refused() -> None:
    points = {str(size): 0.01 for size in range(1, MOST_POINTS + 1)}
    assert len(StepCurve.from_json({"step_seconds": points}).batches) == MOST_POINTS
    with pytest.raises(ValueError, match='"step_seconds" has 1,001 batch sizes; expected at most 1,000'):
        StepCurve.from_json({"step_seconds": points | {"2000": 0.01}})


def test_a_fall_counts_as_far_as_it_is_sure() -> None:
    assert steepest_fall({1: 2.0, 2: 1.5, 4: 0.5}, {1: 0.5, 2: 0.0, 4: 0.0}) == (2, 4)
    assert steepest_fall({1: 2.0, 2: 1.5, 4: 0.5}) == (1, 4)


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
