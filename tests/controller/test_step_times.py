"""Times of a step: what reaches over its ends counts with the part that lies in it."""

from __future__ import annotations

import pytest

from streamrl.controller.step_times import Interval, StepTimes, covered


def test_covered_time_counts_overlaps_once() -> None:
    assert covered([(0, 2), (1, 3), (5, 6), (5.5, 5.7), (9, 12)], 0.5, 10) == pytest.approx(2.5 + 1 + 1)
    assert covered([], 0, 1) == 0


def test_nothing_counts_before_the_first_weights_are_served() -> None:
    times = StepTimes({"a": 0.0})
    times.trainer.append(("publish", 1.0, 2.0))
    times.loading.append(("a", 2.0, 3.0))
    times.weights_served(4.0, 4.0)
    interval = times.end_step(10.0, 10.0, 9.5)
    assert (interval.started, interval.ended, interval.train_s, interval.syncs) == (4.0, 10.0, 0.0, ())


def test_samples_and_updates_that_cross_the_end_of_a_step_count_in_both() -> None:
    times = StepTimes({"a": 0.0, "b": 0.0})
    times.weights_served(0.0, 0.0)
    times.generating.append(("a", 0.0, 4.0))
    times.running = {"a": 6.0}
    times.trainer += [("train", 1.0, 5.0), ("step", 9.0, 10.0)]
    first = times.end_step(10.0, 10.0, weights_due=10.0)
    assert (first.generate_s, first.train_s, first.exposed_sync_s) == (8.0, 5.0, 0.0)
    assert first.generation_bubble == pytest.approx(1 - 0.8 / 2)
    # the second step: its weights are made (10 .. 11) and loaded (11 .. 12), while 'a' goes on until 16
    times.trainer += [("publish", 10.0, 11.0), ("train", 12.0, 20.0)]
    times.loading += [("a", 11.0, 12.0), ("b", 11.0, 12.0)]
    times.weights_served(12.0, 12.0)
    times.generating.append(("a", 6.0, 16.0))
    times.running = {}
    second = times.end_step(20.0, 20.0, weights_due=None)
    assert second.started == 10.0
    assert second.generate_s == 6.0
    assert second.generation_bubble == pytest.approx(1 - (0.5 + 0) / 2)  # standing still for weights is no work
    assert second.exposed_sync_s == 2.0  # made and loaded; the rest of nothing
    assert times.end_step(21.0, 21.0, None).exposed_sync_s == 0.0


def test_instances_count_for_as_long_as_they_are_there() -> None:
    times = StepTimes({"a": 0.0, "b": 0.0})
    times.weights_served(0.0, 0.0)
    times.set_instances(["a", "c"], 4.0)  # b has left, c has come
    times.generating += [("a", 0.0, 10.0), ("b", 0.0, 4.0), ("c", 4.0, 7.0)]
    first = times.end_step(10.0, 10.0, None)
    assert first.present == {"a": (0.0, 10.0), "b": (0.0, 4.0), "c": (4.0, 10.0)}
    assert first.instances == pytest.approx((10 + 4 + 6) / 10)
    assert first.generation_bubble == pytest.approx(3 / 20)
    second = times.end_step(20.0, 20.0, None)
    assert second.present == {"a": (10.0, 20.0), "c": (10.0, 20.0)}
    assert (second.instances, second.generation_bubble) == (2.0, 1.0)


def test_waiting_for_weights_is_exposed_only_where_nothing_else_goes_on() -> None:
    # weights are under way from 0 to 10 and take 1 s to make and 1 s to load; 'a' generates until 5, the trainer
    # trains from 4 to 8
    interval = Interval(
        0.0,
        20.0,
        training=((0.0, 1.0), (4.0, 8.0)),
        publishing=((0.0, 1.0),),
        generating={"a": ((0.0, 5.0),)},
        loading={"a": ((9.0, 10.0),)},
        syncs=((0.0, 10.0),),
        present={"a": (0.0, 20.0)},
    )
    assert interval.exposed_sync_s == 1.0 + 1.0 + 1.0  # made, loaded, and from 8 to 9 neither works


def test_a_sync_under_way_at_the_end_goes_on_in_the_next_step() -> None:
    times = StepTimes({"a": 0.0})
    times.weights_served(0.0, 0.0)
    times.end_step(10.0, 10.0, weights_due=10.0)
    assert times.end_step(15.0, 15.0, weights_due=15.0).exposed_sync_s == 5.0
    times.weights_served(18.0, 18.0)
    third = times.end_step(20.0, 20.0, None)
    assert (third.exposed_sync_s, third.syncs) == (3.0, ((10.0, 18.0),))


def test_a_sync_counts_once_in_the_step_in_which_it_ends() -> None:
    times = StepTimes({"a": 0.0})
    times.weights_served(0.0, 0.0)
    ended = [times.end_step(now, now, weights_due=now).syncs for now in (10.0, 20.0, 30.0)]
    times.weights_served(31.0, 31.0)
    ended += [times.end_step(now, now, None).syncs for now in (40.0, 50.0)]
    assert ended == [(), (), (), ((10.0, 31.0),), ()]


def test_the_time_to_a_reward_is_the_median_of_those_that_came_in_the_step() -> None:
    times = StepTimes({"a": 0.0})
    times.weights_served(0.0, 0.0)
    times.rewarding += [(1.0, 2.0), (1.0, 4.0), (2.0, 9.0)]
    assert times.end_step(10.0, 10.0, None).reward_s == 3.0
    assert times.end_step(11.0, 11.0, None).reward_s is None
    times.rewarding.append((12.0, 11.5))  # the clock was set back a little
    assert times.end_step(13.0, 13.0, None).reward_s == 0.0


def test_a_step_in_which_no_instance_could_work_has_no_bubble() -> None:
    times = StepTimes({})
    times.weights_served(0.0, 0.0)
    times.trainer.append(("train", 1.0, 6.0))
    interval = times.end_step(10.0, 10.0, None)
    assert (interval.instances, interval.generation_bubble, interval.exposed_sync_s) == (0.0, 0.0, 0.0)
    assert interval.training_bubble == 0.5


def test_a_step_whose_end_is_before_its_start_has_taken_no_time() -> None:
    times = StepTimes({"a": 0.0})
    times.weights_served(100.0, 100.0)
    interval = times.end_step(90.0, 105.0, None)  # somebody has set the clock back
    assert (interval.started, interval.ended, interval.seconds) == (100.0, 100.0, 0.0)
    found = interval.instances, interval.generation_bubble, interval.training_bubble, interval.exposed_sync_s
    assert found == (0.0, 0.0, 0.0, 0.0)
    assert times.end_step(110.0, 125.0, None).seconds == 20.0


@pytest.mark.parametrize("jump", [-3600.0, -15.0, -1.5, 1.5, 3600.0])
def test_a_step_in_which_the_clock_was_set_has_no_times_and_the_next_one_has_its_own(jump: float) -> None:
    times = StepTimes({"a": 1e6})
    times.weights_served(1e6, 50.0)
    times.end_step(1e6 + 10, 60.0, weights_due=1e6 + 10)
    times.set_instances(["a", "b"], 1e6 + 12)
    times.running = {"b": 1e6 + 11}
    times.generating.append(("a", 1e6 + 11, 1e6 + 13))
    times.loading.append(("a", 1e6 + 11, 1e6 + 12))
    times.trainer.append(("train", 1e6 + 14, 1e6 + 19 + jump))
    ended = 1e6 + 20 + jump
    interval = times.end_step(ended, 70.0, weights_due=ended)
    assert (interval.seconds, interval.ended) == (0.0, max(ended, 1e6 + 10))
    found = interval.generate_s, interval.train_s, interval.learn_s, interval.instances, interval.exposed_sync_s
    assert (*found, interval.generation_bubble, interval.training_bubble) == (0.0,) * 7
    times.running = {}
    times.generating.append(("a", ended + 1, ended + 5))
    times.trainer.append(("train", ended + 5, ended + 10))
    second = times.end_step(ended + 10, 80.0, None)
    assert (second.seconds, second.generate_s, second.train_s, second.instances) == (10.0, 4.0, 5.0, 2.0)
    assert second.unfinished_sync == (min(1e6 + 10, ended), ended + 10)
    assert (times.generating, times.loading) == ([], [])


@pytest.mark.parametrize("jump", [-0.5, 0.5])
def test_a_clock_that_is_adjusted_a_little_leaves_a_step_its_times(jump: float) -> None:
    times = StepTimes({"a": 0.0})
    times.weights_served(0.0, 50.0)
    assert times.end_step(10.0 + jump, 60.0, None).seconds == 10.0 + jump


def test_an_instance_that_came_before_the_clock_was_set_back_a_little_has_no_negative_time() -> None:
    times = StepTimes({"a": 0.0})
    times.weights_served(0.0, 0.0)
    times.set_instances(["a", "b"], 9.0)
    interval = times.end_step(8.0, 8.0, None)
    assert (interval.seconds, interval.present) == (8.0, {"a": (0.0, 8.0)})
