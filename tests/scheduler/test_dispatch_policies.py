"""All policies: every request is placed once, no instance is over-full, what leaves comes back."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scheduler.cost.decode import PAPER_7B_H800, QWEN_7B, StepCurve, roofline
from scheduler.cost.hardware import device
from scheduler.cost.length_forecast import Forecast
from scheduler.dispatch import planned
from scheduler.dispatch.baselines import LongestFirst, Random, TwoChoices
from scheduler.dispatch.partition import BY_LOAD, LONGEST_BY_LOAD, plan
from scheduler.dispatch.planned import Algorithm2, SkewAware
from scheduler.dispatch.policy import REGULAR, TAIL, Fleet, Request
from scheduler.dispatch.registry import POLICIES, make_policy
from scheduler.simulation.generation_simulator import SimulatedInstance, SimulatedRequest, simulate


@pytest.mark.parametrize("known", [True, False], ids=["forecasts", "none"])
@pytest.mark.parametrize("withdrawn", [False, True], ids=["all stay", "some withdrawn"])
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_random_life_loses_nothing_and_never_overfills(name: str, seed: int, known: bool, withdrawn: bool) -> None:
    rng = random.Random(seed)
    policy = make_policy(name, affinity=2)
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
            policy.finished(ended, lengths[ended])
        if withdrawn and rng.random() < 0.1:
            wanted = [r for r in lengths if r not in todo and r not in done]
            away = set(rng.sample(wanted, len(wanted) // 3)) | {"unknown"}
            before = policy.waiting
            policy.withdraw(away)
            assert before - policy.waiting == len((away - {"unknown"}) - set(running))
            running = {r: i for r, i in running.items() if r not in away}
            todo += sorted(away - {"unknown"})
        if rng.random() < 0.05 and len(slots) > 1:
            gone = rng.choice(sorted(slots))
            handed_back = policy.leave(gone)
            assert {r for r, i in running.items() if i == gone} <= set(handed_back)
            running = {r: i for r, i in running.items() if i != gone}
            del slots[gone]
            policy.submit([request(request_id) for request_id in handed_back])
    assert policy.waiting == 0 and sorted(done) == sorted(lengths)


def test_longest_first_starts_the_longest_requests_first() -> None:
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


@pytest.mark.parametrize("affinity", [0, 3])
@pytest.mark.parametrize("seed", range(12))
def test_without_forecasts_ours_decides_as_least_loaded_step_by_step(seed: int, affinity: int) -> None:
    rng = random.Random(seed)
    ours, reference = make_policy("skew-aware", 500, affinity), make_policy("least-loaded", 500, affinity)
    slots, running, produced, fresh = dict[str, int](), dict[str, str](), dict[str, float](), 0

    def both(call: str, *arguments: object) -> Any:
        first, second = (getattr(policy, call)(*arguments) for policy in (ours, reference))
        assert first == second
        return first or []

    for event in range(400):
        kind = rng.random()
        if kind < 0.1 and len(slots) < 5:
            slots[f"i{event}"] = rng.randint(1, 6)
            both("join", f"i{event}", slots[f"i{event}"], PAPER_7B_H800)
        elif kind < 0.15 and slots:
            gone = rng.choice(sorted(slots))
            del slots[gone]
            back = both("leave", gone)
            for request_id in back:
                del running[request_id]
            both("submit", [Request(r, r.split(".")[0]) for r in back])
        elif kind < 0.4:
            both("submit", [Request(f"g{fresh // 4}.{fresh + n}", f"g{fresh // 4}") for n in range(rng.randint(1, 9))])
            fresh += 10
        elif kind < 0.8 and running:
            ended = rng.choice(sorted(running))
            del running[ended]
            both("finished", ended, 40.0)
        for decision in both("decide", lambda request_id: produced.setdefault(request_id, rng.uniform(0, 400))):
            assert not decision.moved
            running[decision.request_id] = decision.instance
        assert ours.waiting == reference.waiting


def test_a_trial_places_as_the_fleet_would_and_changes_nothing() -> None:
    fleet = Fleet(affinity=2)
    for name in "ab":
        fleet.join(name, 4, PAPER_7B_H800)
    fleet.place_by_load(deque([Request("x0", "x"), Request("y0", "y"), Request("z0", "z")]))  # x, z on a; y on b
    more = [Request("x1", "x"), Request("y1", "y"), Request("z1", "z"), Request("w0", "w")]
    tried = fleet.trial().place_by_load(deque(more))
    assert sorted(fleet.where) == ["x0", "y0", "z0"] and len(fleet.instances["a"].running) == 2
    assert tried == fleet.place_by_load(deque(more)) and [d.instance for d in tried] == list("abab")


def test_where_no_plan_is_surely_cheaper_ours_decides_as_least_loaded() -> None:
    """All forecasts are the same, so whatever looks better than placement by load is luck."""
    ours, reference = SkewAware(True, 4000, 4), make_policy("least-loaded", 4000, 4)
    requests = [Request(f"{n}", f"{n // 4}", Forecast.lognormal(6.0, 0.6)) for n in range(96)]
    for policy in (ours, reference):
        for name in "abc":
            policy.join(name, 12, PAPER_7B_H800)
    started: list[str] = []
    for first in (0, 48):  # what waits when more requests come is planned again
        for policy in (ours, reference):
            policy.submit(requests[first : first + 48])
        waited = ours.waiting
        decisions, alike = ours.decide(lambda _: 0.0), reference.decide()
        assert decisions == alike and ours.plan is not None and ours.plan.kind == BY_LOAD
        assert sum(map(len, ours.plan.queues)) == waited
        started += [decision.request_id for decision in decisions]
    while started:
        ended = started.pop(0)
        for policy in (ours, reference):
            policy.finished(ended)
        decisions = [decision for decision in ours.decide(lambda _: 0.0) if not decision.moved]
        if reference.waiting:
            assert decisions == reference.decide() and ours.waiting == reference.waiting
        started += [decision.request_id for decision in decisions]
    assert ours.waiting == reference.waiting == 0


def test_requests_without_a_forecast_are_placed_by_load_beside_a_plan() -> None:
    policy = SkewAware(affinity=2)
    policy.join("a", 6, PAPER_7B_H800)
    policy.join("b", 6, PAPER_7B_H800)
    policy.submit([Request(str(n), str(n), Forecast.exactly(100)) for n in range(4)])
    policy.submit([Request(f"x{n}", "x") for n in range(3)])
    where = {d.request_id: d.instance for d in policy.decide()}
    assert policy.plan is not None and sum(map(len, policy.plan.queues)) == 4
    assert len({where[f"x{n}"] for n in range(3)}) == 1, "siblings share an instance"
    assert policy.waiting == 0
    # what an instance had comes back; what has a forecast is planned again, the rest is placed by load
    back = policy.leave(where["x0"])
    assert {"x0", "x1", "x2"} <= set(back)
    policy.submit([Request(r, "x", None if r.startswith("x") else Forecast.exactly(100)) for r in back])
    other = "b" if where["x0"] == "a" else "a"
    had = len(policy.instances[other].running)
    assert len(policy.decide()) == 6 - had and len(policy.instances[other].running) == 6 and policy.waiting == 1


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


def test_a_later_batch_is_planned_beside_what_runs() -> None:
    policy = SkewAware()
    policy.join("a", 64, PAPER_7B_H800)
    policy.submit([Request(f"first{n}", "g", Forecast.exactly(2000)) for n in range(20)])
    policy.decide()
    policy.join("b", 64, PAPER_7B_H800)
    policy.submit([Request(f"second{n}", "g", Forecast.exactly(2000)) for n in range(20)])
    assert sum(d.instance == "b" for d in policy.decide(lambda _: 10.0)) >= 18


@pytest.mark.parametrize("slots", [16, 64])
def test_waiting_requests_go_to_an_instance_that_ran_out_of_work(slots: int) -> None:
    policy = SkewAware()
    for name in "ab":
        policy.join(name, slots, PAPER_7B_H800)
    # forecasts say all alike; in truth those on b are short
    policy.submit([Request(str(n), str(n), Forecast((800.0, 1000.0, 1200.0))) for n in range(4 * slots)])
    where = {d.request_id: d.instance for d in policy.decide(lambda _: 0.0)}
    started = set(where)
    while policy.waiting:
        ended = next(iter(policy.instances["b"].running), None)
        assert ended is not None, "b is idle while requests wait"
        policy.finished(ended, 10.0)
        started |= {d.request_id for d in policy.decide(lambda _: 10.0)}
    assert len(started) == 4 * slots and {where[r] for r in policy.instances["a"].running} == {"a"}


@pytest.mark.parametrize("known", [True, False], ids=["known", "forecasts"])
@pytest.mark.parametrize("name", ["a", "b", "c", "d"])
def test_the_longest_requests_go_to_the_tail_pool(name: str, known: bool) -> None:
    policy = SkewAware()
    for other in "abcd":
        policy.join(other, 256, StepCurve((1, 8, 64), (10e-3, 20e-3, 90e-3)), TAIL if other == name else REGULAR)
    lengths = [15_000.0] * 4 + [300.0 + 2 * n for n in range(252)]
    forecasts = [Forecast.exactly(x) if known else Forecast((0.8 * x, x, 1.2 * x)) for x in lengths]
    policy.submit([Request(str(n), str(n), forecast) for n, forecast in enumerate(forecasts)])
    decisions = policy.decide()
    assert "0" in policy.instances[name].running
    if not known:  # then the plan isolates a tail, on three of the four
        tail = {d.instance for d in decisions if d.route == TAIL}
        assert name in tail and len(tail) < 4


def test_what_waits_starts_on_any_instance_of_its_stretch_the_longest_first() -> None:
    policy = SkewAware()
    for name in "ab":
        policy.join(name, 2, PAPER_7B_H800)
    lengths = [900, 800, 700, 600, 500, 400, 300, 200]
    policy.submit([Request(str(n), str(n), Forecast((n - 0.5, n + 0.5))) for n in lengths])
    first = {d.request_id: d.instance for d in policy.decide()}
    assert set(first) == {"900", "800", "700", "600"}
    assert policy.plan is not None and policy.plan.stretches == ((0, 1),)
    on_b = [request_id for request_id, name in first.items() if name == "b"]
    started = []
    for request_id in on_b:  # b is quick: it takes what waits for a as well
        policy.finished(request_id)
        started += [(d.request_id, d.instance) for d in policy.decide()]
    for request_id, _ in list(started):
        policy.finished(request_id)
        started += [(d.request_id, d.instance) for d in policy.decide()]
    assert started == [("500", "b"), ("400", "b"), ("300", "b"), ("200", "b")]


@pytest.mark.parametrize("name", ["skew-aware", "skew-aware-static", "algorithm2"])
@pytest.mark.parametrize("seed", range(4))
def test_tokens_that_a_request_brings_count_as_its_prompt(name: str, seed: int) -> None:
    rng = random.Random(seed)
    lengths = {f"{n}": float(rng.randint(1000, 16_000)) for n in range(48)}
    kept = {one: rng.choice([0, 0, int(0.95 * length)]) for one, length in lengths.items()}
    told, bare = make_policy(name, 16_000), make_policy(name, 16_000)
    for policy in (told, bare):
        for instance in "abc":
            policy.join(instance, 4, PAPER_7B_H800)
    told.submit([Request(one, one, Forecast.exactly(length), 100) for one, length in lengths.items()])
    bare.submit(
        [Request(one, one, Forecast.exactly(length - kept[one]), 100 + kept[one]) for one, length in lengths.items()]
    )
    running: set[str] = set()

    def produced(request_id: str) -> float:
        return 20.0 if request_id in running else 0.0

    while told.waiting or running:
        decisions = told.decide(lambda one: kept[one] + produced(one))
        assert decisions == bare.decide(produced)
        running.update(decision.request_id for decision in decisions)
        ended = min(running, key=lambda one: (lengths[one] - kept[one], one))
        running.remove(ended)
        for policy in (told, bare):
            policy.finished(ended)


def test_two_choices_keep_loads_far_more_level_than_one() -> None:
    def spread(policy: Random | TwoChoices) -> int:
        for n in range(32):
            policy.join(f"i{n}", 1000)
        policy.submit(Request(f"r{n}", f"r{n}") for n in range(3200))
        loads = [0] * 32
        for decision in policy.decide():
            loads[int(decision.instance[1:])] += 1
        assert sum(loads) == 3200
        return max(loads) - min(loads)

    for seed in range(5):
        assert 4 * spread(TwoChoices(seed)) < spread(Random(seed))


def test_two_choices_of_one_instance_is_that_one() -> None:
    policy = TwoChoices()
    policy.join("only", 2)
    policy.submit([Request("r", "r")])
    assert [decision.instance for decision in policy.decide()] == ["only"]


def test_what_placement_by_load_would_keep_waiting_is_dealt_to_no_instance_with_free_slots() -> None:
    policy = SkewAware()
    policy.join("a", 9, StepCurve((1,), (10.0,)))
    policy.join("b", 2, StepCurve((1,), (1.0,)))
    requests = [Request(str(number), "g") for number in range(6)]
    assert policy._dealt_by_load(["a", "b"], requests, requests) == [[], [0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("seed", [0, 1])
def test_on_unequal_instances_uncertain_forecasts_are_as_good_as_longest_first(seed: int) -> None:
    """The longest come last, and slots are few: by load, slow instances would get some of them."""
    rng = np.random.default_rng(seed)
    lengths = np.linspace(300, 8000, 200) * rng.lognormal(0, 0.2, 200)
    told = [Forecast.lognormal(hint, 0.3) for hint in np.log(lengths) + 0.3 * rng.standard_normal(200)]
    requests = [SimulatedRequest(str(n), length, str(n), forecast=told[n]) for n, length in enumerate(lengths)]
    curves = [roofline(QWEN_7B, device(gpu)) for gpu in ("H100", "L40S")] * 4
    fleet = [SimulatedInstance(f"i{n}", curve, 32) for n, curve in enumerate(curves)]
    names = ("least-loaded", "longest-first", "skew-aware")
    by_load, longest_first, ours = (simulate(make_policy(name, 32_000), requests, fleet).makespan for name in names)
    assert longest_first < 0.9 * by_load
    assert ours < 1.03 * longest_first


def test_requests_that_are_placed_longest_first_by_load_start_in_this_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "plan", lambda *given, **more: replace(plan(*given, **more), kind=LONGEST_BY_LOAD))
    policies = SkewAware(migrate=False), LongestFirst()
    for policy in policies:
        policy.join("slow", 2, StepCurve((1, 2), (3.0, 3.0)))
        policy.join("fast", 2, StepCurve((1, 2), (1.0, 1.0)))
        policy.submit(Request(str(n), str(n), Forecast((90.0 * (n + 1), 110.0 * (n + 1)))) for n in range(8))
    ours, reference = policies
    while reference.waiting:
        begun = ours.decide()
        assert begun and begun == reference.decide() and ours.waiting == reference.waiting
        for policy in policies:
            policy.finished(begun[0].request_id)
