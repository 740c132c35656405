"""Candidate placements request by request, on cases small enough to do by hand."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

from scheduler.cost.decode import StepCurve
from scheduler.cost.expected_time import Worker
from scheduler.dispatch.partition_candidates import (
    _best_cuts,
    blocks,
    even,
    greedy,
    packed,
    quick_first,
    together,
)

LINEAR = StepCurve((1, 64), (1.0, 64.0))
"""A second per request and step: an instance needs the sum of its lengths."""


def alike(count: int, slots: int = 64, curve: StepCurve = LINEAR) -> list[Worker]:
    return [Worker(curve, slots)] * count


def times(factor: float, **rates: float) -> StepCurve:
    return StepCurve((1, 64), (factor, 64 * factor), **rates)


@pytest.mark.parametrize(
    ("count", "slots", "running", "expected"),
    [
        (7, [9, 9, 9], None, [[0, 5, 6], [1, 4], [2, 3]]),  # there and back
        (7, [1, 1, 1], [0, 0, 0], [[0, 5, 6], [1, 4], [2, 3]]),
        (0, [2, 2], None, [[], []]),
        # slots first (0 1, 0, 0), then three to one (0 0 0 1, backwards in every second turn)
        (8, [3, 1], None, [[0, 2, 3, 5, 6, 7], [1, 4]]),
        (13, [3, 1], None, [[0, 2, 3, 5, 6, 7, 8, 9, 10], [1, 4, 11, 12]]),
        (4, [2, 2], [2, 0], [[2], [0, 1, 3]]),  # one is full
        (5, [2, 2], [1, 0], [[2, 3], [0, 1, 4]]),  # level 0: 1; level 1: 1 0; then 0 1
        (3, [4, 2], [0, 1], [[0, 2], [1]]),  # level 0: 0; level 1: 1 0
    ],
)
def test_dealing_is_by_free_slots_and_then_in_proportion(
    count: int, slots: list[int], running: list[int] | None, expected: list[list[int]]
) -> None:
    assert even(count, slots, running) == expected


def bring(queues: list[list[int]], groups: str, means: list[float], ranks: list[int] | None = None) -> list[list[int]]:
    seats = [list(range(len(queues)))]
    return together(queues, seats, groups, np.asarray(means), ranks or list(range(len(means))))


def test_siblings_go_to_one_instance_as_far_as_there_is_room() -> None:
    assert bring([[0, 1], [2, 3]], "abab", [4, 3, 2, 1]) == [[0, 2], [1, 3]]
    # the second group does not fit beside the first, nor on the other instance
    assert bring([[0, 1, 2], [3]], "aabb", [4, 3, 2, 1]) == [[0, 1, 3], [2]]
    # of instances equally full the one with the shorter requests is next
    assert bring([[0, 1], [2, 3]], "abcd", [9, 1, 5, 4]) == [[0, 3], [1, 2]]
    # an instance without a queue gets nothing
    assert bring([[], [0, 1, 2]], "aab", [3, 2, 1]) == [[], [0, 1, 2]]


def test_siblings_are_brought_together_inside_a_stretch_and_start_in_the_given_order() -> None:
    queues, seats = [[0, 1], [2, 3]], [[0], [1]]
    assert together(queues, seats, "abab", np.asarray([4.0, 3.0, 2.0, 1.0]), [0, 1, 2, 3]) == queues
    # the last to start chooses last: 3 (b) and 1 (b) first
    assert bring([[0, 1], [2, 3]], "abab", [4, 3, 2, 1], [3, 2, 1, 0]) == [[3, 1], [2, 0]]


def test_the_greedy_placement_by_hand() -> None:
    lengths = np.asarray([5.0, 4.0, 3.0, 3.0])
    assert greedy(lengths, alike(2)) == [[0, 3], [1, 2]]  # 5 | 4, 7; 8
    running = [np.asarray([6.0]), np.asarray([])]
    assert greedy(lengths, alike(2), running) == [[2, 3], [0, 1]]  # 6 | 5, 9; 9, 12
    quick = [Worker(times(3.0), 64), Worker(LINEAR, 64)]
    assert greedy(lengths, quick) == [[2], [0, 1, 3]]  # 15 | 5; 12 | 9; 9 | 12; 18 | 12


def test_what_runs_already_takes_the_cheap_places_of_a_batch() -> None:
    # a second request costs nothing, a third a second per token: with two running, the next request is a third
    curve = StepCurve((1, 2, 3), (1.0, 1.0, 2.0))
    running = [np.asarray([1.0, 1.0]), np.asarray([5.0])]
    assert greedy(np.asarray([6.0]), alike(2, 3, curve), running) == [[], [0]]  # 1 + 6 against 5 + 0
    assert greedy(np.asarray([2.0]), alike(2, 3, curve), [np.asarray([1.0, 1.0]), np.asarray([])]) == [[], [0]]


def test_reading_the_context_counts_half_the_square_of_a_length() -> None:
    reader = [Worker(times(1.0, per_context_token=0.2), 64), Worker(times(1.5), 64)]
    # 10 + 0.1 * 100 = 20 against 15; 4 + 0.1 * 16 = 5.6 against 21
    assert greedy(np.asarray([10.0, 4.0]), reader) == [[1], [0]]
    assert greedy(np.asarray([4.9, 1.0]), reader) == [[0], [1]]  # 4.9 + 2.4 against 7.35; 8.4 against 1.5


def test_known_lengths_are_cut_where_the_makespan_is_least() -> None:
    for lengths, expected in (
        ([6.0, 2.0, 2.0, 2.0], [[0], [1, 2, 3]]),
        ([5.0, 4.0, 3.0, 2.0, 1.0], [[0, 1], [2, 3, 4]]),  # 9 and 6
        ([7.0, 1.0], [[0], [1]]),
    ):
        assert packed(np.asarray(lengths), alike(2)) == expected


def test_a_cut_of_known_lengths_counts_speed_and_context_and_starts_on_the_quickest() -> None:
    kinds = [Worker(times(3.0), 64), Worker(LINEAR, 64)]
    assert packed(np.asarray([3.0] * 6), kinds) == [[5], [0, 1, 2, 3, 4]]  # 3 * 3 | 5 * 3
    assert packed(np.asarray([9.0, 3.0, 3.0]), kinds) == [[2], [0, 1]]  # 3 * 3 | 9 + 3
    reads = alike(2, curve=times(1.0, per_context_token=1.0))
    # with half the square: 4 + 8, 3 + 4.5, 3 + 4.5 -> 12 | 15; without it [4, 3] | [3] would be as good
    assert packed(np.asarray([4.0, 3.0, 3.0]), reads) == [[0], [1, 2]]


def test_no_cut_of_known_lengths_is_better_than_all_on_the_slowest() -> None:
    assert packed(np.asarray([2.0]), alike(1)) is None


def test_identical_instances_are_side_by_side_the_quickest_at_a_single_request_first() -> None:
    curves = [times(factor) for factor in (3.0, 1.0, 2.0, 4.0)]
    seats = [Worker(curve, 4) for curve in curves]
    assert quick_first([seats[0], seats[1], seats[0]]) == [1, 0, 2]
    assert quick_first(seats) == [1, 2, 0, 3]
    other = Worker(curves[1], 5)
    assert quick_first([seats[1], other, seats[1]]) == [0, 2, 1] and quick_first(alike(3)) == [0, 1, 2]


def of(*lengths: float) -> np.ndarray:
    return np.asarray(lengths)[:, None]


def test_one_long_request_gets_an_instance_of_its_own() -> None:
    assert blocks(of(100, 1, 1, 1), alike(2)) == ([[0], [1, 2, 3]], [[0], [1]])
    assert blocks(of(100, 1, 1, 1), alike(1)) == ([[0, 1, 2, 3]], [[0]])


def test_equal_requests_share_all_instances() -> None:
    queues, stretches = blocks(of(*[10.0] * 9), alike(3))
    assert sorted(map(len, queues)) == [3, 3, 3] and sorted(chain(*queues)) == list(range(9))
    assert sorted(chain(*stretches)) == [0, 1, 2]


def test_a_stretch_counts_the_reading_of_its_contexts() -> None:
    kinds = [Worker(times(1.0, per_context_token=0.2), 64), Worker(times(1.5), 64)]
    # the long one where reading costs: 10 + 0.1 * 100 = 20 and 1.5 * 8 = 12; all there 31.2, all on the other 27
    assert blocks(of(10, 4, 4), kinds)[0] == [[0], [1, 2]]


def table(lengths: list[float], speeds: list[float]) -> dict[tuple[int, int], np.ndarray]:
    """Seconds of each stretch on 1 .. 3 instances of each kind: equal shares, but never less than its longest."""
    cuts = range(len(lengths) + 1)
    parts = [[lengths[begin:end] if begin <= end else [np.inf] for end in cuts] for begin in cuts]
    return {
        (run, n): np.asarray([[speed * max(sum(part) / n, *part, 0.0) for part in row] for row in parts])
        for run, speed in enumerate(speeds)
        for n in (1, 2, 3)
    }


@pytest.mark.parametrize(
    ("lengths", "of_run", "queues", "stretches"),
    [
        ([5.0, 3.0, 2.0], [0, 0], [[0], [1, 2]], [[0], [1]]),  # 5 and 5; together 5 as well
        ([5.0, 4.0, 2.0], [0, 0], [[0], [1, 2]], [[0, 1]]),  # 5.5 together, 6 apart
        ([5.0, 4.0, 2.0], [0, 1], [[0], [1, 2]], [[0], [1]]),  # two kinds share nothing
        ([9.0, 1.0, 1.0], [0, 0], [[0], [1, 2]], [[0], [1]]),
        ([5.0, 4.0, 4.0], [0, 0, 0], [[0], [1], [2]], [[0], [1], [2]]),
        ([6.0, 2.0, 2.0], [0, 0, 0], [[], [0], [1, 2]], [[1], [2]]),  # 6 without the first as well
        ([2.0, 2.0, 9.0], [0, 1], [[0, 1], [2]], [[0], [1]]),
    ],
)
def test_the_cuts_with_the_least_makespan(
    lengths: list[float], of_run: list[int], queues: list[list[int]], stretches: list[list[int]]
) -> None:
    costs = table(lengths, [1.0, 1.0])
    units = [[seat] for seat in range(len(of_run))]
    cuts = np.arange(len(lengths) + 1)
    found = _best_cuts(cuts, units, of_run, lambda run, machines: costs[run, machines], len(units))
    assert found == (queues, stretches)
