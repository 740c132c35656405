"""Elasticity: instances come and go by the rule, within limits, at the right price, and without flapping."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping

import pytest

from scheduler.capacity.elasticity import (
    REST_AFTER_FAILURE,
    UNDO,
    Change,
    Elasticity,
    PoolLimits,
    Predict,
    fleet_of,
    generation_time,
)
from scheduler.cost.decode import PAPER_7B_H800, StepCurve
from scheduler.dispatch.baselines import LeastLoaded
from scheduler.simulation.generation_simulator import SimulatedInstance

ONE = {"here/all": PoolLimits(1, 8)}


def shared(work: float, **speeds: float) -> Predict:
    """Work that instances share perfectly; speeds by pool, 1 for others."""
    return lambda replicas: work / sum(speeds.get(pool, 1.0) * count for pool, count in replicas.items())


def never(replicas: Mapping[str, int]) -> float:
    raise AssertionError("nothing is to be predicted in this step")


def drive(
    elasticity: Elasticity,
    replicas: Mapping[str, int],
    steps: int,
    generation: Callable[[int, Mapping[str, int]], float],
    training: Callable[[int], float],
    predict: Callable[[int], Predict],
) -> list[tuple[int, Change]]:
    """Runs steps, makes every change at once, and returns the changes with their steps."""
    now, changes = dict(replicas), []
    for step in range(steps):
        change = elasticity.step_done(generation(step, now), training(step), now, predict(step))
        if change is not None:
            assert change.before == now[change.pool] and abs(change.after - change.before) == 1
            changes.append((step, change))
            now[change.pool] = change.after
            elasticity.changed(now)
    return changes


def ask(
    limits: Mapping[str, PoolLimits], times: tuple[float, float], replicas: Mapping[str, int], predict: Predict
) -> Change | None:
    """What it asks for at the end of its patience."""
    elasticity = Elasticity(limits)
    assert elasticity.step_done(*times, replicas, predict) is None
    return elasticity.step_done(*times, replicas, predict)


def asked(
    limits: Mapping[str, PoolLimits], times: tuple[float, float], replicas: Mapping[str, int], predict: Predict
) -> Change:
    """The same where it does ask."""
    change = ask(limits, times, replicas, predict)
    assert change is not None
    return change


def directions(elasticity: Elasticity, size: int, training_s: float, steps: int, noise: float, seed: int) -> list[int]:
    """Changes (1 or -1) under constant lengths, of 100 s for `size` instances."""
    rng, predict = random.Random(seed), shared(100.0 * size)
    changes = drive(
        elasticity,
        {"here/all": size},
        steps,
        lambda _, now: predict(now) * rng.uniform(1 - noise, 1 + noise),
        lambda _: training_s * rng.uniform(1 - noise, 1 + noise),
        lambda _: predict,
    )
    return [change.after - change.before for _, change in changes]


def test_one_more_is_asked_for_when_generation_is_behind_by_more_than_it_saves() -> None:
    # two instances: a third saves a third, 10 of 30 s; the margin is 1.5 s
    change = ask(ONE, (30.0, 18.0), {"here/all": 2}, shared(60.0))
    assert change == Change(
        "here/all",
        2,
        3,
        "generation 30.0 s, training 18.0 s: one more instance of here/all is predicted to save 10.0 s",
    )
    assert ask(ONE, (30.0, 18.6), {"here/all": 2}, shared(60.0)) is None, "12 s behind is asked for, and 11.4 s are not"


def test_one_is_taken_when_generation_stays_quicker_without_it() -> None:
    # three instances: without one, 30 s instead of 20
    change = ask(ONE, (20.0, 32.0), {"here/all": 3}, shared(60.0))
    assert change == Change(
        "here/all",
        3,
        2,
        "generation 20.0 s, training 32.0 s: one instance fewer of here/all is predicted to cost 10.0 s, "
        "which training covers",
    )
    assert ask(ONE, (20.0, 31.5), {"here/all": 3}, shared(60.0)) is None, "30 s are within the margin of 31.5 s"


def test_an_instance_without_which_generation_is_predicted_quicker_is_counted_as_no_loss() -> None:
    change = asked(ONE, (20.0, 32.0), {"here/all": 3}, lambda replicas: 1.0 + 0.01 * replicas["here/all"])
    assert change.after == 2 and "is predicted to cost 0 s" in change.why


def test_only_ratios_of_predictions_count() -> None:
    for factor in (0.01, 1.0, 300.0):
        assert asked(ONE, (30.0, 18.0), {"here/all": 2}, shared(factor)).after == 3
        assert asked(ONE, (20.0, 32.0), {"here/all": 3}, shared(factor)).after == 2


def test_patience_wants_the_same_in_steps_in_a_row() -> None:
    elasticity, replicas = Elasticity(ONE, patience=3), {"here/all": 2}

    def behind() -> Change | None:
        return elasticity.step_done(30.0, 10.0, replicas, shared(60.0))

    assert behind() is None and behind() is None
    assert "that has held in 2 of 3 steps" in elasticity.note
    assert elasticity.step_done(20.0, 20.0, replicas, never) is None
    assert elasticity.note == "generation 20.0 s, training 20.0 s: no change of a pool is worth it"
    assert behind() is None and behind() is None
    change = behind()
    assert change is not None and elasticity.waiting is change and elasticity.note == change.why


def test_patience_is_counted_by_pool_and_direction() -> None:
    limits = {"a/x": PoolLimits(1, 8), "b/y": PoolLimits(1, 8)}
    elasticity, replicas = Elasticity(limits, margin=0.0), {"a/x": 2, "b/y": 2}
    for favourite, other in [("a/x", "b/y"), ("b/y", "a/x")] * 5:  # the other saves too little
        assert elasticity.step_done(30.0, 10.0, replicas, shared(100.0, **{favourite: 1.0, other: 0.05})) is None
    for step in range(10):  # one more, then one fewer
        times = (30.0, 10.0) if step % 2 else (10.0, 30.0)
        assert elasticity.step_done(*times, replicas, shared(100.0)) is None


def test_pools_that_take_turns_in_being_best_do_not_try_patience() -> None:
    limits = {"a/x": PoolLimits(1, 8), "b/y": PoolLimits(1, 8)}
    elasticity, replicas = Elasticity(limits), {"a/x": 2, "b/y": 2}
    assert elasticity.step_done(30.0, 10.0, replicas, shared(100.0, **{"a/x": 1.01})) is None
    change = elasticity.step_done(30.0, 10.0, replicas, shared(100.0, **{"b/y": 1.01}))
    assert change is not None and change.pool == "b/y"


def test_steps_are_ignored_until_a_change_has_taken_effect_and_has_settled() -> None:
    elasticity = Elasticity(ONE, patience=1, settle=2)
    assert elasticity.step_done(40.0, 10.0, {"here/all": 2}, shared(80.0)) is not None
    for _ in range(50):
        assert elasticity.step_done(40.0, 10.0, {"here/all": 2}, never) is None
    elasticity.changed({"here/all": 2})  # something else was changed: this pool is as before
    for _ in range(5):
        assert elasticity.step_done(40.0, 10.0, {"here/all": 2}, never) is None
    elasticity.changed({"here/all": 3})
    assert elasticity.waiting is None and elasticity.note == "now here/all 3"
    for _ in range(2):
        assert elasticity.step_done(40.0, 10.0, {"here/all": 3}, never) is None
    assert elasticity.step_done(40.0, 10.0, {"here/all": 3}, shared(80.0)) is not None


def test_somebody_elses_change_restarts_patience_and_settling() -> None:
    for told in (True, False):
        elasticity = Elasticity(ONE)
        assert elasticity.step_done(40.0, 10.0, {"here/all": 2}, shared(80.0)) is None
        if told:
            elasticity.changed({"here/all": 3})
        answers = [elasticity.step_done(40.0, 10.0, {"here/all": 3}, shared(80.0)) for _ in range(3)]
        assert [answer is not None for answer in answers] == [False, False, True], "one to settle, two of patience"


def test_a_change_that_failed_leaves_its_pool_alone_for_a_while() -> None:
    limits = {"a/x": PoolLimits(1, 8), "b/y": PoolLimits(1, 8)}
    elasticity, replicas = Elasticity(limits, settle=0), {"a/x": 2, "b/y": 2}
    elasticity.failed()  # nothing was asked for
    assert drive(elasticity, replicas, 1, lambda *_: 40.0, lambda _: 10.0, lambda _: shared(100.0)) == []
    asked = elasticity.step_done(40.0, 10.0, replicas, shared(100.0))
    assert asked is not None and asked.pool == "a/x"
    elasticity.failed()
    assert elasticity.waiting is None and elasticity.note == "a/x could not be changed from 2 to 3 instances"
    answers = [elasticity.step_done(40.0, 10.0, replicas, shared(100.0)) for _ in range(2)]
    assert answers[0] is None and answers[1] is not None and answers[1].pool == "b/y"
    only = Elasticity(ONE, patience=1, settle=0)
    assert only.step_done(40.0, 10.0, {"here/all": 2}, shared(80.0)) is not None
    only.failed()
    answers = [only.step_done(40.0, 10.0, {"here/all": 2}, shared(80.0)) for _ in range(REST_AFTER_FAILURE)]
    assert answers[:-1] == [None] * (REST_AFTER_FAILURE - 1) and answers[-1] is not None


@pytest.mark.parametrize(("start", "limit", "training"), [(2, 8, 1.0), (7, 1, 1000.0)])
def test_limits_are_reached_and_kept(start: int, limit: int, training: float) -> None:
    asked: list[int] = []

    def predict(replicas: Mapping[str, int]) -> float:
        asked.append(replicas["here/all"])
        return 100.0 / sum(replicas.values())

    changes = drive(
        Elasticity(ONE),
        {"here/all": start},
        100,
        lambda _, now: 100.0 / now["here/all"],
        lambda _: training,
        lambda _: predict,
    )
    assert changes[-1][1].after == limit and len(changes) == abs(limit - start)
    assert min(asked) >= 1 and max(asked) <= 8


def test_a_pool_outside_of_its_limits_comes_back_but_goes_no_further() -> None:
    assert ask(ONE, (40.0, 1.0), {"here/all": 9}, shared(1.0)) is None
    assert asked(ONE, (4.0, 100.0), {"here/all": 9}, shared(1.0)).after == 8


def test_the_last_instance_of_all_stays() -> None:
    limits = {"a/x": PoolLimits(0, 2), "b/y": PoolLimits(0, 2)}
    assert ask(limits, (1.0, 100.0), {"a/x": 1, "b/y": 0}, never) is None
    assert asked(limits, (1.0, 100.0), {"a/x": 1, "b/y": 1}, shared(1.0)).after == 0


def test_the_pool_that_saves_most_for_its_price_grows() -> None:
    def pool(x: float, y: float, fast: float = 1.5) -> str:
        limits = {"a/x": PoolLimits(1, 8, x), "b/y": PoolLimits(1, 8, y)}
        return asked(limits, (40.0, 5.0), {"a/x": 2, "b/y": 2}, shared(100.0, **{"b/y": fast})).pool

    assert pool(0.0, 0.0) == "b/y", "without prices, the quicker one"
    assert pool(0.0, 0.0, fast=1.0) == "a/x", "of like ones, by name"
    assert pool(1.0, 3.0) == "a/x"
    assert pool(3.0, 1.0) == "b/y"
    assert pool(1.0, 1.1) == "b/y"
    assert pool(0.0, 0.1) == "a/x", "what is free comes first"


def test_a_cheap_pool_that_saves_too_little_does_not_stand_in_the_way() -> None:
    limits = {"a/x": PoolLimits(1, 8, 0.01), "b/y": PoolLimits(1, 8, 3.0)}
    change = asked(limits, (40.0, 5.0), {"a/x": 2, "b/y": 2}, shared(100.0, **{"a/x": 0.05}))
    assert change.pool == "b/y" and change.why.endswith("for 3.00 USD/h")


def test_an_addition_waits_for_the_cheap_pool_rather_than_taking_the_dear_one() -> None:
    limits = {"a/x": PoolLimits(1, 8, 1.0), "b/y": PoolLimits(1, 8, 3.0)}
    predict = shared(100.0, **{"b/y": 0.8})
    replicas = {"a/x": 2, "b/y": 2}  # one of a/x saves 8.7 s of 40 s, one of b/y 7.3 s; the margin is 2 s
    assert ask(limits, (40.0, 30.0), replicas, predict) is None, "10 s would do for b/y"
    assert asked(limits, (40.0, 29.0), replicas, predict).pool == "a/x"


def test_the_dearest_pool_that_can_be_spared_shrinks() -> None:
    def pool(x: float, y: float, training: float = 100.0) -> Change:
        limits = {"a/x": PoolLimits(1, 8, x), "b/y": PoolLimits(1, 8, y)}
        change = ask(limits, (10.0, training), {"a/x": 2, "b/y": 2}, shared(100.0, **{"a/x": 2.0}))
        assert change is not None
        return change

    assert pool(0.0, 0.0).pool == "b/y", "without prices, the slower one"
    assert pool(2.0, 1.0).pool == "a/x"
    assert pool(1.0, 2.0).pool == "b/y" and pool(1.0, 2.0).why.endswith("which training covers, and saves 2.00 USD/h")
    # one a/x fewer would take 15 s, one b/y fewer 12 s
    assert pool(2.0, 1.0, training=14.0).pool == "b/y", "a/x cannot be spared"


def test_one_long_answer_never_brings_an_instance() -> None:
    groups = [(200, [300] * 8) for _ in range(8)]
    groups[3] = (200, [300] * 7 + [20_000])
    kinds = {"here/all": SimulatedInstance("", PAPER_7B_H800, 64)}

    def predict(replicas: Mapping[str, int]) -> float:
        return generation_time(groups, fleet_of(kinds, replicas), LeastLoaded)

    def changes(elasticity: Elasticity) -> list[tuple[int, Change]]:
        return drive(elasticity, {"here/all": 2}, 30, lambda _, now: predict(now), lambda _: 5.0, lambda _: predict)

    assert predict({"here/all": 2}) > 100
    assert changes(Elasticity(ONE)) == []
    assert len(changes(Elasticity(ONE, min_saving=0.0))) == 6, "the rule as published adds all that there are"


@pytest.mark.parametrize("size", [2, 4, 8, 14])
def test_noise_does_not_make_it_flap(size: int) -> None:
    for seed in range(12):
        training_s = 65.0 + 5 * seed  # from behind to ahead, both thresholds between
        found = directions(Elasticity({"here/all": PoolLimits(1, 64)}), size, training_s, 500, 0.1, seed)
        turns = sum(one != other for one, other in itertools.pairwise(found))
        assert turns <= 1, f"training {training_s:.1f} s: {found}"
        if size <= 4:
            assert len(found) <= 2


def test_without_noise_a_change_is_never_undone() -> None:
    for size in range(2, 19):
        for training_s in range(20, 200):
            bare = Elasticity({"here/all": PoolLimits(1, 64)}, patience=1, settle=0, margin=0.0)
            assert len(set(directions(bare, size, training_s, 30, 0.0, 0))) <= 1


def test_going_against_the_last_change_takes_more_steps() -> None:
    elasticity = Elasticity(ONE, settle=0)
    assert elasticity.step_done(40.0, 10.0, {"here/all": 2}, shared(80.0)) is None
    assert elasticity.step_done(40.0, 10.0, {"here/all": 2}, shared(80.0)) is not None
    elasticity.changed({"here/all": 3})
    answers = [elasticity.step_done(10.0, 40.0, {"here/all": 3}, shared(30.0)) for _ in range(2 * UNDO)]
    assert answers[:-1] == [None] * (2 * UNDO - 1) and answers[-1] is not None


def lengths(seed: int, scale: float) -> list[tuple[int, list[int]]]:
    """Groups of 8 with a tail."""
    rng = random.Random(seed)
    return [(200, [int(scale * min(8_000, rng.lognormvariate(6.5, 0.5))) for _ in range(8)]) for _ in range(24)]


def test_growing_lengths_bring_instances_and_shrinking_ones_take_them_away() -> None:
    # a step's time is nearly proportional to its batch: a large model, or a slow device
    kinds = {"here/all": SimulatedInstance("", StepCurve((1, 64), (0.01, 0.2)), 64)}

    def predict(step: int) -> Predict:
        scale = 1.0 if step < 10 or step >= 40 else 2.0
        groups = lengths(step, scale)
        return lambda replicas: generation_time(groups, fleet_of(kinds, replicas), LeastLoaded)

    first = predict(0)({"here/all": 3})
    changes = drive(
        Elasticity(ONE),
        {"here/all": 3},
        70,
        lambda step, now: 1.3 * predict(step)(now),  # the model is off by a factor
        lambda _: 1.3 * first,
        predict,
    )
    grown = [change.after for step, change in changes if step < 40]
    shrunk = [change.after for step, change in changes if step >= 40]
    assert min(step for step, _ in changes) in range(11, 16)
    assert grown == list(range(4, 4 + len(grown))) and len(grown) >= 1
    assert shrunk == list(range(grown[-1] - 1, grown[-1] - 1 - len(shrunk), -1)) and len(shrunk) >= 1
    assert len(changes) <= 8


def test_a_step_without_one_of_both_times_is_ignored() -> None:
    elasticity = Elasticity(ONE)
    assert elasticity.step_done(40.0, 10.0, {"here/all": 2}, shared(80.0)) is None
    assert elasticity.step_done(0.0, 10.0, {"here/all": 2}, never) is None
    assert elasticity.step_done(40.0, 0.0, {"here/all": 2}, never) is None
    assert elasticity.step_done(40.0, 10.0, {"here/all": 2}, shared(80.0)) is not None, "it did not end the row"


@pytest.mark.parametrize("times", [(-1.0, 1.0), (1.0, -1.0), (math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0)])
def test_impossible_times_are_refused(times: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="times must be 0 s or more"):
        Elasticity(ONE).step_done(*times, {"here/all": 2}, never)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_impossible_predictions_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="is predicted to take"):
        Elasticity(ONE).step_done(40.0, 10.0, {"here/all": 2}, lambda _: seconds)


def test_wrong_settings_are_refused() -> None:
    for lowest, highest in ((-1, 2), (3, 2), (0, 0)):
        with pytest.raises(ValueError, match="limits must be"):
            PoolLimits(lowest, highest)
    for price in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="price must be"):
            PoolLimits(1, 2, price)
    with pytest.raises(ValueError, match="at least one pool"):
        Elasticity({})
    with pytest.raises(ValueError, match="patience"):
        Elasticity(ONE, patience=0)
    with pytest.raises(ValueError, match="settle"):
        Elasticity(ONE, settle=-1)
    for margin, min_saving in ((1.0, 0.0), (-0.1, 0.0), (0.0, 1.0), (0.0, math.nan)):
        with pytest.raises(ValueError, match="shares within"):
            Elasticity(ONE, margin=margin, min_saving=min_saving)
    with pytest.raises(ValueError, match="given for here/all"):
        Elasticity(ONE).step_done(1.0, 1.0, {"other": 1}, never)
    with pytest.raises(ValueError, match="given for here/all"):
        Elasticity(ONE).changed({})


def test_generation_time_by_hand() -> None:
    kinds = {
        "a/x": SimulatedInstance("", StepCurve((1, 4), (1.0, 1.0), per_prefill_token=0.5), 4),
        "b/y": SimulatedInstance("", StepCurve((1, 4), (2.0, 2.0)), 4),
    }
    fleet = fleet_of(kinds, {"a/x": 2, "b/y": 1})
    assert [(one.name, one.slots, one.curve.seconds[0]) for one in fleet] == [
        ("a/x-0", 4, 1.0),
        ("a/x-1", 4, 1.0),
        ("b/y-0", 4, 2.0),
    ]
    # two groups, a prompt of 6 tokens read in and 10 tokens written; a sample without tokens counts as one
    assert generation_time([(6, [10]), (6, [10])], fleet[:2], LeastLoaded) == pytest.approx(3 + 10)
    assert generation_time([(6, [10, 0])], fleet[2:], LeastLoaded) == pytest.approx(20)
    assert generation_time([(0, [10] * 8)], fleet[2:], LeastLoaded) == pytest.approx(40), "in two turns"


def test_impossible_fleets_are_refused() -> None:
    kinds = {"a/x": SimulatedInstance("", PAPER_7B_H800, 4)}
    with pytest.raises(ValueError, match="list of instances is empty"):
        generation_time([(1, [1])], fleet_of(kinds, {"a/x": 0}), LeastLoaded)
    with pytest.raises(ValueError, match="nothing is known of instances of b/y"):
        fleet_of(kinds, {"b/y": 1})
    with pytest.raises(ValueError, match="must not be negative"):
        fleet_of(kinds, {"a/x": -1})
