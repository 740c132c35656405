"""Turns of episodes: where they are placed, and that no plan waits for them or makes them wait."""

from __future__ import annotations

import random

import pytest

from scheduler.cost.decode import StepCurve
from scheduler.cost.length_forecast import Forecast
from scheduler.dispatch.baselines import LeastLoaded
from scheduler.dispatch.group_probe import GroupProbe
from scheduler.dispatch.planned import SkewAware
from scheduler.dispatch.policy import Fleet, Instance, Request, worth_returning
from scheduler.dispatch.registry import POLICIES, make_policy

CURVE = StepCurve((1, 2, 4, 8), (0.01, 0.02, 0.04, 0.08), per_prefill_token=0.001)
"""10 ms more per step for each further request; 1 ms per prompt token."""


def turn(name: str, home: str = "", tokens: float | None = None, cached: int = 0) -> Request:
    forecast = None if tokens is None else Forecast.exactly(tokens)
    return Request(name, name.split("/")[0], forecast, 100, turn=True, home=home, cached_tokens=cached)


def instance(name: str, running: int, slots: int = 8, curve: StepCurve | None = CURVE) -> Instance:
    return Instance(name, slots, curve, running={str(n): Request(str(n), "g") for n in range(running)})


@pytest.mark.parametrize(
    ("tokens", "cached", "returns"),
    [
        (10, 200, True),  # 10 tokens, 20 ms more each: as long as 200 tokens of prompt
        (10, 199, False),
        (11, 200, False),
        (9, 200, True),
    ],
)
def test_a_turn_returns_while_it_loses_less_time_than_the_other_instance_needs_to_prefill(
    tokens: float, cached: int, returns: bool
) -> None:
    assert worth_returning(turn("e", "a", tokens, cached), instance("a", 3), instance("b", 1), 0) is returns


def test_a_full_instance_is_overloaded_and_an_emptier_one_never_is() -> None:
    one = turn("e", "a", 10, 1000)
    assert not worth_returning(one, instance("a", 8), instance("b", 7), 99)
    assert worth_returning(turn("e", "a", 10, 0), instance("a", 0), instance("b", 5), 0)


@pytest.mark.parametrize("unknown", ["length", "curve", "prefill"])
def test_without_times_or_lengths_a_home_may_be_some_requests_fuller(unknown: str) -> None:
    free = StepCurve(CURVE.batches, CURVE.seconds)
    curve = {"curve": None, "prefill": free}.get(unknown, CURVE)
    one = turn("e", "a", None if unknown == "length" else 10, 10_000)
    assert worth_returning(one, instance("a", 4, curve=curve), instance("b", 2, curve=curve), 2)
    assert not worth_returning(one, instance("a", 5, curve=curve), instance("b", 2, curve=curve), 2)


def test_a_faster_home_may_be_fuller_by_more_and_a_slower_one_by_less() -> None:
    one, quick = turn("e", "a", None), CURVE.scaled(0.5)
    for running, curve, returns in ((7, quick, True), (2, CURVE.scaled(2.0), False), (1, CURVE.scaled(2.0), True)):
        home = instance("a", running, curve=curve)
        assert worth_returning(one, home, instance("b", 1), 2) is returns  # steps of up to 0.04 s


def test_a_turn_does_not_wait_for_a_faster_instance_than_its_home() -> None:
    policy = LeastLoaded()
    policy.join("a", 8, CURVE.scaled(10.0))
    policy.join("b", 1, CURVE)
    policy.submit([turn("e1/0"), turn("e2/0")])
    assert [one.instance for one in policy.decide()] == ["b"] and policy.waiting == 1
    policy.withdraw({"e2/0"})
    policy.submit([turn("e3/1", "a", 1, 1000)])
    assert [one.instance for one in policy.decide()] == ["a"]


def fleet(policy: Fleet, *names: str, slots: int = 8) -> None:
    for name in names:
        policy.join(name, slots, CURVE)


@pytest.mark.parametrize("make", [LeastLoaded, SkewAware, GroupProbe])
def test_a_turn_goes_home_unless_its_home_is_overloaded_or_gone(make: type[LeastLoaded]) -> None:
    policy = make()
    fleet(policy, "a", "b", slots=3)
    policy.submit([turn("e1/0"), turn("e2/0")])
    assert [one.instance for one in policy.decide()] == ["a", "b"]
    for number in (1, 2):
        policy.submit([turn(f"e{number}/{number}", "b", 1, 1000)])
        assert [one.instance for one in policy.decide()] == ["b"]  # the fuller one
    policy.submit([turn("e3/1", "b", 1, 1000), turn("e4/1", "c", 1, 1000)])
    assert [one.instance for one in policy.decide()] == ["a", "a"]  # one home is full, the other one never was
    policy.leave("b")
    policy.finished("e1/0")
    policy.submit([turn("e1/9", "b", 1, 1000)])
    assert [one.instance for one in policy.decide()] == ["a"]


def test_where_all_slots_are_taken_turns_wait_for_their_homes_and_never_behind_each_other_for_good() -> None:
    policy = LeastLoaded()
    fleet(policy, "a", "b", slots=1)
    policy.submit([turn("x/0"), turn("y/0")])
    assert [one.instance for one in policy.decide()] == ["a", "b"]
    policy.submit([turn("e/1", "b", 1, 10), turn("f/1", "a", 1, 10), turn("new/0"), turn("g/1", "b", 1, 10)])
    assert policy.decide() == []
    policy.finished("x/0")
    assert [(one.request_id, one.instance) for one in policy.decide()] == [("f/1", "a")]
    policy.finished("f/1")  # nobody else's home: the first one goes elsewhere
    assert [(one.request_id, one.instance) for one in policy.decide()] == [("e/1", "a")]
    policy.finished("y/0")  # one without a home is never overtaken
    assert [(one.request_id, one.instance) for one in policy.decide()] == [("new/0", "b")]


def test_only_a_turn_whose_home_is_full_is_overtaken() -> None:
    policy = LeastLoaded()
    fleet(policy, "a", "b", slots=2)
    policy.submit([turn("x/0"), turn("y/0"), turn("z/0")])
    assert [one.instance for one in policy.decide()] == ["a", "b", "a"]
    policy.finished("x/0")
    policy.finished("z/0")
    policy.submit([turn("e/1", "b", 1, 1000), turn("f/1", "a", 1, 1000)])
    assert [(one.request_id, one.instance) for one in policy.decide()] == [("e/1", "b"), ("f/1", "a")]
    # b is full, and the last one waits for it; the first one has no home
    policy.submit([turn("new/0"), turn("g/1", "a", 1, 1000), turn("h/1", "b", 1, 1000)])
    assert [(one.request_id, one.instance) for one in policy.decide()] == [("new/0", "a")]


@pytest.mark.parametrize("make", [SkewAware, GroupProbe])
def test_turns_are_placed_without_a_plan_and_before_what_waits_for_one(make: type[SkewAware]) -> None:
    policy = make()
    fleet(policy, "a", slots=2)
    planned = [Request(f"g.{n}", "g", Forecast.exactly(100)) for n in range(4)]
    policy.submit(planned)
    assert len(policy.decide()) == 2 and policy.waiting == 2
    made = policy.plan
    policy.submit([turn("e/0", tokens=50), turn("e/1", tokens=50), turn("e/2", tokens=50)])
    policy.withdraw({"e/1"})
    assert policy.decide() == [] and policy.waiting == 4
    policy.finished("g.0", 100)
    assert [one.request_id for one in policy.decide()] == ["e/0"]
    assert policy.plan is made or make is GroupProbe  # which plans again as a sibling has ended
    policy.finished("e/0", 7)
    policy.finished("g.1", 100)
    assert [one.request_id for one in policy.decide()] == ["e/2", "g.2"]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(5))
def test_turns_beside_single_completions_are_all_placed_once_whatever_leaves(name: str, seed: int) -> None:
    rng, policy = random.Random(seed), make_policy(name, 100, 2)
    alive = {"a", "b", "c"}
    for one in alive:
        policy.join(one, 3, CURVE)
    known: dict[str, Request] = {}
    for n in range(40):
        group = f"g{n // 4}"
        forecast = Forecast.exactly(rng.randint(1, 90)) if rng.random() < 0.5 else None
        kind = rng.random() < 0.6
        home = rng.choice(["", "a", "b", "c", "x"]) if kind else ""
        known[f"{group}.{n}"] = Request(f"{group}.{n}", group, forecast, 9, kind, home, rng.randint(0, 200))
    todo, running, done = list(known), dict[str, str](), list[str]()
    while todo or running or policy.waiting:
        if todo and rng.random() < 0.7:
            policy.submit([known[todo.pop()] for _ in range(min(len(todo), rng.randint(1, 3)))])
        if rng.random() < 0.1 and len(alive) > 1:
            gone = rng.choice(sorted(alive))
            alive.discard(gone)
            back = policy.leave(gone)
            for one in back:
                running.pop(one, None)
            policy.submit([known[one] for one in back])
        elif rng.random() < 0.3 and len(alive) < 3:
            alive.add(new := min({"a", "b", "c"} - alive))
            policy.join(new, 3, CURVE)
        for decision in policy.decide(lambda _: 1.0):
            assert decision.instance in alive and (decision.moved or decision.request_id not in running)
            running[decision.request_id] = decision.instance
        assert all(list(running.values()).count(one) <= 3 for one in alive)
        if running and rng.random() < 0.8:
            ended = rng.choice(sorted(running))
            del running[ended]
            policy.finished(ended, rng.randint(1, 90))
            done.append(ended)
    assert sorted(done) == sorted(known)
