"""Tail batching: rounds end with enough groups, stragglers come together in rounds of their own, nothing is lost."""

from __future__ import annotations

import random

import pytest

from scheduler.tail_batching import Round, TailBatching


def test_rounds_by_hand() -> None:
    planner = TailBatching(batch=2, over_issue=1.5)
    assert planner.begin() == Round(tail=False, new=3, resumed=(), needed=2)
    planner.started(["a", "b", "c"])
    planner.completed("c")
    assert not planner.over
    with pytest.raises(RuntimeError, match="not over"):
        planner.end()
    with pytest.raises(RuntimeError, match="under way"):
        planner.begin()
    planner.completed("a")
    assert planner.over and planner.end() == ["b"]
    planner.begin()
    planner.started(["d", "e", "f"])
    planner.completed("d")
    planner.completed("e")
    assert planner.end() == ["f"]
    assert planner.begin() == Round(tail=True, new=0, resumed=("b", "f"), needed=2)
    planner.completed("f")
    assert not planner.over, "a tail round waits for all"
    planner.completed("b")
    assert planner.end() == [] and planner.put_off == []
    with pytest.raises(KeyError, match="neither of this round nor put off"):
        planner.completed("b")


def test_a_group_that_completes_after_its_round_counts_for_the_next() -> None:
    planner = TailBatching(batch=2, over_issue=2)
    planner.begin()
    planner.started("abcd")
    planner.completed("a")
    planner.completed("b")
    assert planner.end() == ["c", "d"]
    planner.completed("d")
    assert planner.put_off == ["c"]
    assert planner.begin() == Round(tail=False, new=2, resumed=(), needed=1)


@pytest.mark.parametrize("seed", range(10))
def test_every_group_is_complete_once_and_every_round_fills_a_batch(seed: int) -> None:
    rng = random.Random(seed)
    batch = rng.randint(1, 8)
    planner = TailBatching(batch, rng.uniform(1, 2))
    done, issued, rounds = list[str](), 0, 200
    for number in range(1, rounds + 1):
        current = planner.begin()
        names = [str(issued + n) for n in range(current.new)]
        issued += current.new
        planner.started(names)
        pending = [*names, *current.resumed]
        while not planner.over:
            done.append(pending.pop(rng.randrange(len(pending))))
            planner.completed(done[-1])
        put_off = planner.end()
        assert sorted(put_off) == sorted(pending)
        assert len(done) >= number * batch
    assert len(set(done)) == len(done)
    assert set(done) | set(planner.put_off) == {str(n) for n in range(issued)}
    assert len(planner.put_off) < 2 * batch, "tail rounds come in time"


@pytest.mark.parametrize(("batch", "factor"), [(0, 1.5), (2, 0.9), (2, float("nan"))])
def test_impossible_rounds_are_refused(batch: int, factor: float) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        TailBatching(batch, factor)
