"""Auto: predictions computed by hand, each schedule picked where it must win, changes that pay and no flapping."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import numpy as np
import pytest

from scheduler.capacity.auto_schedule import (
    AutoSchedule,
    Option,
    Profile,
    SchedulePrediction,
    during_change,
    lengths_differ,
    predict,
)
from scheduler.cost.decode import PAPER_7B_H800, StepCurve
from scheduler.dispatch.baselines import LeastLoaded
from scheduler.schedule.schedules import make_schedule
from scheduler.simulation.generation_simulator import SimulatedInstance
from tests.waiting import scaled

UNIT = StepCurve((1, 64), (1.0, 1.0))
"""A second per token, whatever the batch."""
BUSY = StepCurve((1, 64), (1.0, 64.0))
"""A second per token of the batch: a fuller instance is no more efficient."""
CONSTANT = Profile(
    [(5, (10, 10))],
    train_tokens_s=10.0,
    colocated_train_tokens_s=20.0,
    optimizer_s=2.0,
    reward_s=1.0,
    weights_s=3.0,
)
"""Batches of 4 groups: generation 10 s, 120 tokens to train on."""


def option(name: str, bound: int | None = None, every: int = 1, curve: StepCurve = UNIT, slots: int = 64) -> Option:
    return Option(name, make_schedule(name, bound, every), (SimulatedInstance("a", curve, slots),))


def options(curve: StepCurve = UNIT, slots: int = 64) -> list[Option]:
    return [option(name, None, 1, curve, slots) for name in ("stream", "sync", "colocated", "async")]


@pytest.mark.parametrize(
    ("chosen", "step", "generation", "training", "staleness"),
    [
        (option("sync"), 10 + 1 + 12 + 2 + 3, 10, 14, 0),
        (option("stream"), 28, 10, 14, 0),
        # with all devices: 6 s of training; the new weights are waited for once
        (option("colocated"), 10 + 1 + 6 + 2 + 3, 10, 8, 0),
        (option("colocated", every=2), (10 + 1 + 2 * 8 + 3) / 2, 5, 8, 0.5),
        # two batches are generated together and trained one after the other
        (option("sync", every=2), (10 + 1 + 2 * 14 + 3) / 2, 5, 14, 0.5),
        # the trainer never waits: the next batch is ready when it has ended
        (option("one_step_off"), 14, 10, 14, 1),
        (option("async"), 14, 10, 14, 1),
        (replace(option("sync"), train_tokens_s=120.0), 10 + 1 + 1 + 2 + 3, 10, 3, 0),
    ],
    ids=lambda value: value.label if isinstance(value, Option) else None,
)
def test_predictions_by_hand(chosen: Option, step: float, generation: float, training: float, staleness: float) -> None:
    predicted = predict(CONSTANT, chosen, LeastLoaded, 4)
    assert predicted.step_s == pytest.approx(step)
    assert predicted.training_s == pytest.approx(training)
    assert predicted.generation_bubble == pytest.approx(1 - predicted.generation_s / step)
    assert predicted.staleness_mean == pytest.approx(staleness)
    if chosen.schedule.max_staleness < chosen.schedule.sync_every:  # otherwise two batches may share the instance
        assert predicted.generation_s == pytest.approx(generation)


def reasoner(seed: int, scale: float = 1.0) -> list[tuple[int, list[int]]]:
    """Groups of 8 with a long tail."""
    rng = random.Random(seed)
    return [(200, [int(scale * min(20_000, rng.lognormvariate(7.4, 0.9))) for _ in range(8)]) for _ in range(128)]


def test_a_prediction_is_quick_and_the_same_for_the_same_seed() -> None:
    profile = Profile(reasoner(1), 40_000.0, weights_s=2.0)
    fleet = tuple(SimulatedInstance(f"i{n}", PAPER_7B_H800, 256) for n in range(2))
    chosen = Option("async", make_schedule("async"), fleet)
    begun = time.process_time()
    first = predict(profile, chosen, LeastLoaded, 64)
    assert time.process_time() - begun < scaled(2.0), "about 0.3 s on an idle core"
    assert predict(profile, chosen, LeastLoaded, 64) == first
    assert predict(profile, chosen, LeastLoaded, 64, seed=1) != first


def test_a_long_tail_and_a_slow_trainer_make_it_async() -> None:
    curve, slots = PAPER_7B_H800, 256
    profile = Profile(reasoner(2), 12_000.0, 16_000.0, 0.5, 0.2, 2.0)
    decision = AutoSchedule(options(curve, slots)).choose(profile, LeastLoaded, 16)
    assert decision.option.label == "async" and not decision.changed
    assert "overlap" in decision.why and len(decision.predictions) == 4


def test_little_generation_and_much_training_make_it_colocated() -> None:
    profile = Profile([(500, (5, 8))], train_tokens_s=50.0, colocated_train_tokens_s=100.0, weights_s=1.0)
    decision = AutoSchedule(options()).choose(profile, LeastLoaded, 4)
    assert decision.option.label == "colocated"
    assert "take turns on all devices" in decision.why
    slower = replace(profile, colocated_train_tokens_s=None)
    assert AutoSchedule(options()).choose(slower, LeastLoaded, 4).option.label != "colocated"


def test_without_a_gain_it_stays_on_policy() -> None:
    profile = Profile([(0, (100, 100))], train_tokens_s=1e6)
    decision = AutoSchedule(options(BUSY)).choose(profile, LeastLoaded, 4)
    assert decision.option.label == "stream"
    # a gain below 3 % is not worth the staleness
    slightly = replace(profile, optimizer_s=2.0)
    decision = AutoSchedule(options(BUSY)).choose(slightly, LeastLoaded, 4)
    assert decision.option.label == "stream"
    assert decision.why.endswith("async (staleness 1) would save 0.2%, which is not worth its staleness")


def test_a_split_of_the_devices_is_chosen_like_any_other_option() -> None:
    schedule = make_schedule("sync")
    engines = [SimulatedInstance(f"i{n}", BUSY, 64) for n in range(3)]
    one = Option("sync, 1 of 4 instances", schedule, tuple(engines[:1]), train_tokens_s=300.0)
    three = Option("sync, 3 of 4 instances", schedule, tuple(engines), train_tokens_s=100.0)
    much_to_generate = Profile([(0, (100, 100))], 1.0)
    assert AutoSchedule([one, three]).choose(much_to_generate, LeastLoaded, 8).option == three
    much_to_train = Profile([(10_000, (2, 2))], 1.0)
    assert AutoSchedule([one, three]).choose(much_to_train, LeastLoaded, 8).option == one


OPTIONS = options()


def told(**step_s: float) -> list[SchedulePrediction]:
    return [SchedulePrediction(o, step_s[o.label], 0.05, 0.03, 0.0) for o in OPTIONS if o.label in step_s]


def test_why_is_a_sentence_with_figures() -> None:
    decision = AutoSchedule(OPTIONS).decide(told(stream=7.9, sync=9.0, colocated=8.2, **{"async": 6.1}))
    assert decision.why == (
        "async (staleness 1): predicted 6.1 s a step against stream 7.9 s, colocated 8.2 s, sync 9.0 s: "
        "generation 5.8 s and training 5.9 s overlap"
    )
    only = AutoSchedule(OPTIONS[:1]).decide(told(stream=0.5))
    assert only.why == (
        "stream: predicted 0.5 s a step, the only option: training 0.48 s begins while generation, 0.47 s, goes on"
    )


def test_a_change_must_pay_and_a_change_back_to_on_policy_only_not_lose() -> None:
    auto = AutoSchedule(OPTIONS, min_steps=1)
    assert auto.decide(told(stream=10.0, **{"async": 9.8}), 0).option.label == "stream"
    stays = auto.decide(told(stream=10.0, **{"async": 9.6}), 5)
    assert stays.option.label == "stream" and not stays.changed
    assert stays.why.endswith("it stays although async (staleness 1) would be better: a change must save 5%")
    changes = auto.decide(told(stream=10.0, **{"async": 9.4}), 10)
    assert changes.option.label == "async" and changes.changed
    assert not auto.decide(told(stream=9.6, **{"async": 9.4}), 15).changed, "its gain is below 3 %, but it is one"
    back = auto.decide(told(stream=9.4, **{"async": 9.4}), 20)
    assert back.option.label == "stream" and back.changed


def test_noise_around_a_threshold_does_not_flap() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        auto = AutoSchedule(OPTIONS, min_steps=1)
        base = rng.choice([1.0, 0.97, 0.95])
        changes = [
            auto.decide(told(stream=10.0, **{"async": 10 * base * rng.uniform(0.98, 1.02)}), step).changed
            for step in range(100)
        ]
        assert sum(changes) <= 1


def test_changes_are_so_many_steps_apart() -> None:
    auto = AutoSchedule(OPTIONS, min_steps=20)
    auto.decide(told(stream=10.0, sync=12.0), 0)
    assert auto.decide(told(stream=10.0, sync=8.0), 3).changed, "the first change may come at any time"
    waits = auto.decide(told(stream=5.0, sync=8.0), 10)
    assert waits.option.label == "sync" and not waits.changed
    assert "the last change was 7 steps ago, and 20 must lie between two" in waits.why
    assert auto.decide(told(stream=5.0, sync=8.0), 23).changed


def test_an_option_that_is_no_longer_possible_is_left_at_once() -> None:
    auto = AutoSchedule(OPTIONS)
    assert auto.decide(told(stream=5.0, sync=8.0), 0).option.label == "stream"
    assert auto.decide(told(sync=8.0), 1).changed


def test_lengths_that_drift_lead_to_one_change() -> None:
    curve, slots = PAPER_7B_H800, 256
    auto = AutoSchedule([option("stream", None, 1, curve, slots), option("async", None, 1, curve, slots)])
    changes, chosen = [], 0
    for step in range(60):
        # answers of some 12 tokens beside 60 s of training; then they get 400 times as long
        now = Profile(reasoner(step, 0.005 if step < 30 else 2.0), 30_000.0, optimizer_s=60.0)
        if auto.drifted(now):
            decision = auto.choose(now, LeastLoaded, 16, step)
            chosen += 1
            changes += [(step, decision.option.label)] * decision.changed
    assert changes == [(30, "async")]
    assert chosen < 20, "chance makes it predict anew now and then, not always"


def test_environments_take_their_time_and_are_a_reason_to_predict_again() -> None:
    many = replace(CONSTANT, environment_s=4.0, environment_processes=8)
    assert predict(many, option("sync"), LeastLoaded, 4).step_s == pytest.approx(28 + 4)
    few = replace(many, environment_processes=1)  # one after the other for 8 samples
    assert predict(few, option("sync"), LeastLoaded, 4).step_s == pytest.approx(28 + 8 * 4)
    assert predict(few, option("async", 1), LeastLoaded, 4).step_s == pytest.approx(32)  # they hide all the rest
    auto = AutoSchedule([option("sync")])
    auto.choose(many, LeastLoaded, 4)
    assert not auto.drifted(replace(many, environment_s=4.4))
    assert auto.drifted(replace(many, environment_s=5.0)) and auto.drifted(CONSTANT)


def test_rewards_that_take_another_time_are_a_reason_to_predict_again_where_a_step_shows_it() -> None:
    auto = AutoSchedule([option("sync")])
    auto.choose(CONSTANT, LeastLoaded, 4)  # 28 s a step, 1 s of rewards
    assert not auto.drifted(replace(CONSTANT, reward_s=1.1)), "10 % of the rewards' time"
    assert not auto.drifted(replace(CONSTANT, reward_s=1.8)), "2.9 % of a step"
    assert auto.drifted(replace(CONSTANT, reward_s=1.9)) and auto.drifted(replace(CONSTANT, reward_s=0.1))


def test_drift_is_a_matter_of_the_mean_the_shape_or_the_trainer() -> None:
    auto = AutoSchedule(OPTIONS)
    before = Profile([(0, (100,))] * 50 + [(0, (200,))] * 50, 10.0)
    auto.choose(before, LeastLoaded, 2)
    assert not auto.drifted(before)
    somewhat = [(0, (100,))] * 55 + [(0, (200,))] * 45
    assert not auto.drifted(replace(before, groups=somewhat, train_tokens_s=11.0))
    assert auto.drifted(replace(before, groups=[(0, (120,))] * 50 + [(0, (240,))] * 50))
    assert auto.drifted(replace(before, groups=[(0, (150,))] * 100)), "the same mean, another shape"
    assert auto.drifted(replace(before, train_tokens_s=8.0))
    some = np.sort(np.random.default_rng(0).lognormal(7, 0.8, 3000))
    assert not lengths_differ(some, some * 1.1, 0.15) and lengths_differ(some, some * 1.2, 0.15)


def test_during_a_change_the_wider_bound_rules() -> None:
    sync, wide = make_schedule("sync"), make_schedule("async", 3)
    assert during_change(wide, sync) == replace(sync, max_staleness=3)
    assert during_change(sync, wide) == wide


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ValueError, match="one or more options"):
        AutoSchedule([])
    with pytest.raises(ValueError, match="different labels"):
        AutoSchedule([OPTIONS[0], OPTIONS[0]])
    with pytest.raises(ValueError, match="gains within"):
        AutoSchedule(OPTIONS, min_gain=1.0)
    with pytest.raises(ValueError, match="at least one group"):
        Profile([], 1.0)
    with pytest.raises(ValueError, match="at least one sample"):
        Profile([(1, ())], 1.0)
    with pytest.raises(ValueError, match="without predictions"):
        AutoSchedule(OPTIONS).decide([])
