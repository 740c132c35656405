"""All policies: every request is placed once, no instance is over-full, what leaves comes back."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from scheduler.baselines import LeastLoaded, LongestFirst, Random, RoundRobin
from scheduler.cost import PAPER_7B_H800, StepCurve
from scheduler.forecast import Forecast
from scheduler.planned import Algorithm2, SkewAware
from scheduler.policy import TAIL, DispatchPolicy, Request

POLICIES: dict[str, Callable[[], DispatchPolicy]] = {
    "least-loaded": lambda: LeastLoaded(affinity=2),
    "longest-first": LongestFirst,
    "round-robin": RoundRobin,
    "random": Random,
    "algorithm 2": Algorithm2,
    "algorithm 2, max": lambda: Algorithm2("max"),
    "skew-aware": SkewAware,
}


@pytest.mark.parametrize("known", [True, False], ids=["forecasts", "none"])
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(6))
def test_random_life_loses_nothing_and_never_overfills(name: str, seed: int, known: bool) -> None:
    rng = random.Random(seed)
    policy = POLICIES[name]()
    slots = {f"i{n}": rng.randint(1, 6) for n in range(3)}
    for instance, count in slots.items():
        policy.join(instance, count, PAPER_7B_H800)
    lengths = {f"g{g}.{i}": rng.randint(1, 300) for g in range(12) for i in range(4)}

    def request(request_id: str) -> Request:
        forecast = Forecast((lengths[request_id] * 0.7, lengths[request_id] * 1.2)) if known else None
        return Request(request_id, request_id.split(".")[0], forecast, 10)

    todo, running, done = list(lengths), dict[str, str](), list[str]()
    produced = dict.fromkeys(lengths, 0.0)
    while len(done) < len(lengths):
        if todo and rng.random() < 0.4:
            policy.submit([request(todo.pop()) for _ in range(min(len(todo), rng.randint(1, 20)))])
        for decision in policy.decide(lambda request_id: produced[request_id]):
            assert (decision.request_id in running) == decision.moved
            running[decision.request_id] = decision.instance
        for instance, count in slots.items():
            assert sum(where == instance for where in running.values()) <= count
        for request_id in running:
            produced[request_id] += 20
        if running and rng.random() < 0.8:
            ended = rng.choice(sorted(running))
            del running[ended]
            done.append(ended)
            policy.finished(ended)
        if rng.random() < 0.05 and len(slots) > 1:
            gone = rng.choice(sorted(slots))
            handed_back = policy.leave(gone)
            assert {r for r, i in running.items() if i == gone} <= set(handed_back)
            running = {r: i for r, i in running.items() if i != gone}
            del slots[gone]
            policy.submit([request(request_id) for request_id in handed_back])
    assert policy.waiting == 0 and sorted(done) == sorted(lengths)


def test_longest_first_is_that() -> None:
    policy = LongestFirst()
    policy.join("a", 2)
    policy.submit([Request(str(n), "g", Forecast.exactly(n)) for n in (3, 9, 5)])
    assert [d.request_id for d in policy.decide()] == ["9", "5"]


def test_algorithm_2_gives_the_longest_fifth_their_own_instances() -> None:
    policy = Algorithm2()
    for name in "abcd":
        policy.join(name, 64, PAPER_7B_H800)
    policy.submit([Request(str(n), "g", Forecast.exactly(n + 1)) for n in range(100)])
    decisions = policy.decide()
    tail = [d for d in decisions if d.route == TAIL]
    assert {int(d.request_id) for d in tail} == set(range(80, 100))
    assert not {d.instance for d in tail} & {d.instance for d in decisions if d.route != TAIL}


def test_algorithm_2_with_one_instance_has_no_tail() -> None:
    policy = Algorithm2()
    policy.join("a", 64)
    policy.submit([Request(str(n), "g", Forecast.exactly(n + 1)) for n in range(10)])
    assert {d.route for d in policy.decide()} == {"regular"}


def test_without_trusted_forecasts_ours_deals_evenly() -> None:
    policy = SkewAware()
    for name in "abcd":
        policy.join(name, 64, PAPER_7B_H800)
    policy.submit([Request(str(n), "g", None if n == 7 else Forecast.exactly(n + 1)) for n in range(80)])
    decisions = policy.decide()
    assert all(sum(d.instance == name for d in decisions) == 20 for name in "abcd")
    assert policy.plan is None


def test_a_running_request_moves_to_an_empty_instance_and_keeps_its_slot_count() -> None:
    policy = SkewAware()
    steep = StepCurve((1, 64), (1.0, 30.0))
    policy.join("a", 64, steep)
    policy.join("b", 64, steep)
    # forecasts say all alike; in truth those on a go on and on while b runs dry
    policy.submit([Request(str(n), "g", Forecast((90.0, 100.0, 110.0))) for n in range(64)])
    placed = {d.request_id: d.instance for d in policy.decide(lambda _: 0.0)}
    for request_id, instance in placed.items():
        if instance == "b":
            policy.finished(request_id)
    moves = policy.decide(lambda _: 105.0)
    assert moves and all(move.moved and move.instance == "b" for move in moves)
    assert len(policy.instances["a"].running) + len(policy.instances["b"].running) == 32
