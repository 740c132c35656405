"""The dispatch policy: every request is placed once, no instance is over-full, loads stay level."""

from __future__ import annotations

import random

import pytest

from scheduler.dispatch.baselines import LeastLoaded
from scheduler.dispatch.policy import Request


def requests(groups: int, size: int) -> list[Request]:
    return [Request(f"g{g}.{i}", f"g{g}") for g in range(groups) for i in range(size)]


def test_first_come_first_served_to_the_emptiest_instance() -> None:
    policy = LeastLoaded()
    policy.join("a", 2)
    policy.join("b", 3)
    policy.submit(requests(7, 1))
    assert [(d.request_id, d.instance) for d in policy.decide()] == [
        ("g0.0", "a"),
        ("g1.0", "b"),
        ("g2.0", "a"),
        ("g3.0", "b"),
        ("g4.0", "b"),
    ]
    assert policy.waiting == 2
    assert policy.decide() == []
    policy.finished("g3.0")
    assert [(d.request_id, d.instance) for d in policy.decide()] == [("g5.0", "b")]


def test_siblings_share_an_instance_while_loads_are_level() -> None:
    policy = LeastLoaded(affinity=4)
    policy.join("a", 16)
    policy.join("b", 16)
    policy.submit(requests(8, 4))
    where: dict[str, set[str]] = {}
    for decision in policy.decide():
        where.setdefault(decision.request_id.split(".")[0], set()).add(decision.instance)
    assert all(len(instances) == 1 for instances in where.values())
    assert [len(load.running) for load in policy.instances.values()] == [16, 16]


@pytest.mark.parametrize("seed", range(20))
def test_random_life_places_everything_once_and_never_overfills(seed: int) -> None:
    rng = random.Random(seed)
    policy = LeastLoaded(affinity=rng.randrange(5))
    slots = {f"i{n}": rng.randint(1, 6) for n in range(3)}
    for name, count in slots.items():
        policy.join(name, count)
    todo, running, done = requests(10, 4), {}, []
    known = {r.request_id: r for r in todo}
    while todo or running or policy.waiting:
        if todo and rng.random() < 0.5:
            policy.submit([todo.pop()])
        for decision in policy.decide():
            assert decision.request_id not in running
            running[decision.request_id] = decision.instance
        for name, load in policy.instances.items():
            assert len(load.running) <= slots[name]
            assert set(load.running) == {r for r, i in running.items() if i == name}
        if running and rng.random() < 0.6:
            finished = rng.choice(sorted(running))
            del running[finished]
            done.append(finished)
            policy.finished(finished)
        if len(policy.instances) > 1 and rng.random() < 0.02:
            gone = rng.choice(sorted(policy.instances))
            back = policy.leave(gone)
            assert sorted(back) == sorted(r for r, i in running.items() if i == gone)
            for request_id in back:
                del running[request_id]
            policy.submit([known[request_id] for request_id in back])
    assert sorted(done) == sorted(known)


def test_impossible_instances_are_refused() -> None:
    policy = LeastLoaded()
    policy.join("a", 1)
    with pytest.raises(ValueError, match="0 slots"):
        policy.join("b", 0)
    with pytest.raises(ValueError, match="joined already"):
        policy.join("a", 1)
