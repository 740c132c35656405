"""Slow instances are found against the cost model, and get less."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from scheduler.cost.decode import StepCurve
from scheduler.cost.length_forecast import Forecast
from scheduler.dispatch.policy import Request
from scheduler.dispatch.registry import make_policy
from scheduler.dispatch.straggler import OTHERWISE, SLOW, STRETCHES, WELL, SlowWatch

NAMES = ("a", "b", "c")


def told(watch: SlowWatch, ratios: dict[str, float], times: int = STRETCHES) -> dict[str, float]:
    news: dict[str, float] = {}
    for _ in range(times):
        for name, ratio in ratios.items():
            watch.heard(name, ratio)
        news |= watch.changed(ratios)
    return news


def test_an_instance_slower_than_the_others_is_a_straggler_until_it_recovers() -> None:
    watch = SlowWatch()
    assert told(watch, {"a": 1.0, "b": 1.1, "c": 2.2}) == {"c": pytest.approx(2.2 / 1.05)}
    assert told(watch, {"a": 1.0, "b": 1.0, "c": (SLOW + WELL) / 2}, STRETCHES)["c"] == pytest.approx(
        (SLOW + WELL) / 2
    )  # still slow, by less
    assert told(watch, {"a": 1.0, "b": 1.0, "c": 1.1}) == {"c": 1.0}
    assert watch.factors == {}


def test_when_all_instances_slow_down_none_is_a_straggler() -> None:
    watch = SlowWatch()
    told(watch, dict.fromkeys(NAMES, 1.0))
    assert told(watch, dict.fromkeys(NAMES, 4.0)) == {}


def test_an_only_instance_and_a_young_one_are_not_judged() -> None:
    watch = SlowWatch()
    assert told(watch, {"a": 9.0}) == {}
    watch = SlowWatch()
    assert told(watch, {"a": 9.0, "b": 1.0}, STRETCHES - 1) == {}


def test_a_single_stretch_does_not_make_an_instance_slow() -> None:
    watch = SlowWatch()
    told(watch, dict.fromkeys(NAMES, 1.0))
    watch.heard("a", 50.0)
    assert watch.changed(NAMES) == {}


def test_noise_of_twenty_percent_makes_no_straggler() -> None:
    watch, draw = SlowWatch(), random.Random(3)
    for _ in range(2000):
        for name in NAMES:
            watch.heard(name, draw.uniform(0.8, 1.2))
        assert watch.changed(NAMES) == {}


def test_small_changes_of_a_stragglers_pace_are_not_reported_again() -> None:
    watch = SlowWatch()
    told(watch, {"a": 1.0, "b": 2.0})
    assert told(watch, {"a": 1.0, "b": 2.0 * OTHERWISE * 0.99}) == {}
    assert told(watch, {"a": 1.0, "b": 4.0}) != {}


def test_an_instance_at_a_bound_is_judged_as_beyond_it() -> None:
    watch = SlowWatch()
    assert told(watch, {"a": 1.0, "b": 1.5}) == {"b": 1.5}
    assert told(watch, {"a": 1.0, "b": 1.2}) == {"b": 1.0}
    told(watch, {"a": 1.0, "b": 2.0})
    assert told(watch, {"a": 1.0, "b": 2.5}) == {"b": 2.5}  # by a quarter
    assert told(watch, {"a": 1.0, "b": 2.0}) == {"b": 2.0}


def test_a_new_process_begins_anew() -> None:
    watch = SlowWatch()
    told(watch, {"a": 1.0, "b": 2.0})
    watch.forget("b")
    assert watch.factors == {}
    assert told(watch, {"a": 1.0, "b": 2.0}, STRETCHES - 1) == {}


@pytest.mark.parametrize("ratio", [-1.0, 0.0, float("inf"), float("nan")])
def test_an_impossible_pace_ratio_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match=f"took {ratio} times"):
        SlowWatch().heard("a", ratio)


@pytest.mark.parametrize("name", ["least-loaded", "longest-first", "skew-aware"])
def test_a_slow_instance_gets_less(name: str) -> None:
    curve = StepCurve.measured({1: 0.02, 32: 0.04})
    policy = make_policy(name)
    for instance in NAMES:
        policy.join(instance, 32, curve)
    policy.slow("c", 3.0)
    policy.submit([Request(f"r{n}", f"g{n}") for n in range(28)])
    placed = Counter(decision.instance for decision in policy.decide())
    assert placed == {"a": 12, "b": 12, "c": 4}
    policy.slow("c", 1.0)
    for n in range(28):
        policy.finished(f"r{n}")
    policy.submit([Request(f"s{n}", f"g{n}") for n in range(30)])
    assert Counter(decision.instance for decision in policy.decide()) == {"a": 10, "b": 10, "c": 10}


def test_plans_give_a_slow_instance_less() -> None:
    curve = StepCurve.measured({1: 0.02, 32: 0.04})
    policy = make_policy("skew-aware")
    for instance in NAMES:
        policy.join(instance, 32, curve)
    policy.slow("c", 3.0)
    policy.submit([Request(f"r{n}", f"g{n}", Forecast.exactly(100.0)) for n in range(24)])
    placed = Counter(decision.instance for decision in policy.decide())
    assert placed["c"] < min(placed["a"], placed["b"])


def test_an_unknown_instance_cannot_be_slow() -> None:
    policy = make_policy("least-loaded")
    policy.slow("gone", 2.0)  # it has left meanwhile
