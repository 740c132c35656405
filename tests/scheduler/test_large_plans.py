"""Plans for many instances: the same choices as request by request, without looking at all slots for each request."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from scheduler.cost.decode import PAPER_7B_H800, Floats, StepCurve
from scheduler.cost.expected_time import Worker
from scheduler.cost.length_forecast import Forecast
from scheduler.dispatch import partition, partition_candidates, planned, slot_filling
from scheduler.dispatch.planned import SkewAware
from scheduler.dispatch.policy import REGULAR, Request
from scheduler.dispatch.registry import make_policy
from scheduler.dispatch.slot_filling import Slots, fill_slots

READING = StepCurve((1, 64), (0.01, 0.02), 1e-6)
"""The step time of an instance that takes time for each token of context."""


def one_after_another(free_at: Floats, pace: Floats, lengths: Floats) -> tuple[Slots, Floats]:
    chosen, ended = np.zeros(lengths.shape, dtype=np.int64), np.zeros(lengths.shape)
    for scenario, free in enumerate(free_at):
        for request, length in enumerate(lengths[scenario]):
            slot = int(free.argmin())
            free[slot] += length * pace[slot]
            chosen[scenario, request], ended[scenario, request] = slot, free[slot]
    return chosen, ended


def drawn(kind: str, rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    lengths = rng.lognormal(6.0, 1.0, shape)
    match kind:
        case "short":
            lengths[:] = rng.integers(0, 2, shape)
        case "mixed":
            lengths = np.where(rng.random(shape) < 0.5, 1.0, lengths)
        case "ties":
            lengths = np.round(lengths / 200) * 200
    return lengths


@pytest.mark.parametrize("kind", ["usual", "short", "mixed", "ties"])
@pytest.mark.parametrize(("slots", "requests"), [(1, 5), (7, 3), (40, 200), (300, 700), (3000, 1500)])
def test_requests_get_the_slots_that_they_would_get_one_after_another(kind: str, slots: int, requests: int) -> None:
    rng = np.random.default_rng(slots)
    free_at = drawn("ties" if kind == "ties" else "usual", rng, (3, slots))
    pace, lengths = rng.choice([0.5, 0.5, 0.75], slots), drawn(kind, rng, (3, requests))
    expected, found = free_at.copy(), free_at.copy()
    for ours, by_hand in zip(fill_slots(found, pace, lengths), one_after_another(expected, pace, lengths), strict=True):
        assert np.array_equal(ours, by_hand)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("kind", ["usual", "short", "mixed", "ties"])
def test_all_slots_are_looked_at_once_for_many_requests(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, first_free = [], slot_filling._first_free

    def looked(free: Floats, size: int) -> Slots:
        looks.append(size)
        return first_free(free, size)

    monkeypatch.setattr(slot_filling, "_first_free", looked)
    rng, slots = np.random.default_rng(1), 4096
    fill_slots(drawn("usual", rng, (1, slots)), np.full(slots, 0.5), drawn(kind, rng, (1, slots)))
    assert len(looks) <= 1 + 4 * slots / looks[0]


def test_identical_instances_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for module, name in ((partition_candidates, "marginal_costs"), (partition, "context_seconds")):
        found = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, name=name, found=found: asked.append(name) or found(*args))
    means = np.arange(40.0, 0.0, -1.0)
    worker = Worker(READING, 1)
    partition_candidates.greedy(means, [worker] * 10)
    assert asked == ["marginal_costs"]
    asked.clear()
    timed = partition._Timed(means[None], [worker] * 10, [range(40, 40)] * 10)
    queues = partition_candidates.even(40, [1] * 10)
    timed("even", queues, [list(range(10))])
    assert asked == ["context_seconds"] * (10 + 1)  # what runs on each, and once what waits for any


def test_full_instances_do_not_look_for_what_they_might_start() -> None:
    policy = SkewAware()
    for name in "abcd":
        policy.join(name, 2, PAPER_7B_H800)
        for slot in range(2):
            policy.start(Request(f"{name}{slot}", name, Forecast.exactly(100)), policy.instances[name])
    policy.queues = {name: deque([(Request(f"{name}2", name, Forecast.exactly(100)), REGULAR)]) for name in "abcd"}
    policy._mates = {name: list("abcd") for name in "abcd"}
    asked: list[str] = []
    fill_from = policy._fill_from
    policy._fill_from = lambda name, sources: asked.append(name) or fill_from(name, sources)  # type: ignore[method-assign, func-returns-value]
    policy.finished("c1")
    assert [(start.request_id, start.instance) for start in policy.decide()] == [("a2", "c")] and asked == ["c"]


def test_what_is_too_much_to_plan_is_placed_by_load_and_planned_once_it_is_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planned, "MOST_PLANNED", 40)
    ours, reference = SkewAware(True, 4000, 4), make_policy("least-loaded", 4000, 4)
    rng = np.random.default_rng(2)
    requests = [Request(f"{n}", f"{n // 4}", Forecast.lognormal(rng.uniform(3, 8), 0.2)) for n in range(41)]
    for policy in (ours, reference):
        for name in "abc":
            policy.join(name, 4, PAPER_7B_H800)
        policy.submit(requests)
    started = ours.decide()
    assert started == reference.decide() and ours.plan is None and ours.waiting == reference.waiting == 29
    ours.withdraw({"40"})
    ours.finished(started[0].request_id)
    ours.submit([Request("one more", "more", Forecast.exactly(4000))])
    ours.decide()
    assert ours.plan is not None and sum(map(len, ours.plan.queues)) == 29


def test_what_runs_counts_as_much_to_plan_as_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "MOST_PLANNED", 40)
    policy = SkewAware(True, 4000)
    requests = [Request(f"{n}", f"{n}", Forecast.exactly(100 * n + 1)) for n in range(41)]
    for number, name in enumerate("abc"):
        policy.join(name, 4, PAPER_7B_H800)
        for request in requests[4 * number : 4 * number + 4]:
            policy.start(request, policy.instances[name])
    policy.submit(requests[12:])
    assert policy.decide() == [] and policy.plan is None and policy.waiting == 29
    policy.withdraw({"40"})
    policy.finished("0")
    policy.submit(requests[40:])
    policy.decide()
    assert policy.plan is not None and sum(map(len, policy.plan.queues)) == 29
