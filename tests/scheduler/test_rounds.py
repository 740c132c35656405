"""Rounds: they end with enough groups or when nothing can go on, nothing is lost, no group is older than its bound."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from scheduler.schedule.rounds import PartialRollouts, Round, Rounds, TailBatching, taking
from scheduler.schedule.schedules import ScheduleState, due_within, make_schedule


def test_tail_rounds_by_hand() -> None:
    planner = TailBatching(batch=2, over_issue=1.5)
    assert planner.begin(0) == Round(new=3, resumed=(), needed=2)
    planner.started(["a", "b", "c"])
    planner.completed("c")
    assert not planner.over
    with pytest.raises(RuntimeError, match="not over"):
        planner.end()
    with pytest.raises(RuntimeError, match="under way"):
        planner.begin(0)
    planner.completed("a")
    assert planner.over and planner.end() == ["b"] and not planner.again
    planner.taken("a")
    planner.taken("c")
    planner.begin(1)
    planner.started(["d", "e", "f"])
    planner.completed("d")
    planner.completed("e")
    assert planner.end() == ["f"]
    planner.taken("d")
    planner.taken("e")
    assert planner.begin(2) == Round(new=0, resumed=("b", "f"), needed=2)
    planner.completed("f")
    assert not planner.over, "a tail round waits for all"
    planner.completed("b")
    assert planner.end() == [] and planner.deferred == []
    with pytest.raises(KeyError, match="neither of this round nor put off"):
        planner.completed("b")
    planner.taken("b")
    with pytest.raises(KeyError):
        planner.taken("b")


def test_a_group_that_completes_after_its_round_counts_for_the_next() -> None:
    planner = TailBatching(batch=2, over_issue=2)
    planner.begin(0)
    planner.started("abcd")
    planner.completed("a")
    planner.completed("b")
    assert planner.end() == ["c", "d"]
    planner.completed("d")
    assert planner.deferred == ["c"]
    planner.taken("a")
    planner.taken("b")
    assert planner.begin(1) == Round(new=2, resumed=(), needed=1)


def test_partial_rollouts_by_hand() -> None:
    planner = PartialRollouts(batch=2, round_tokens=100, over_issue=1.5)
    assert planner.begin(0) == Round(new=3, resumed=(), needed=2, budget=100)
    planner.started("abc")
    planner.completed("a")
    planner.parked("b")
    assert not planner.over, "one of three may still complete"
    with pytest.raises(KeyError, match="cannot be parked"):
        planner.parked("a")
    planner.parked("c")
    assert planner.over, "nothing can go on"
    assert planner.end() == ["b", "c"] and planner.again
    # one is complete, so one more is needed; three are open again
    assert planner.begin(0) == Round(new=1, resumed=("b", "c"), needed=1, budget=100)
    planner.started("d")
    planner.completed("c")
    assert planner.over and planner.end() == ["b", "d"] and not planner.again
    planner.taken("a")
    planner.taken("c")
    assert planner.begin(1) == Round(new=1, resumed=("b", "d"), needed=2, budget=100)


def test_a_group_that_would_get_too_old_is_resumed_and_waited_for() -> None:
    planner = TailBatching(batch=3, over_issue=1.3, max_age=1)
    assert planner.begin(0).new == 4
    planner.started("abcd")
    for group in "abc":
        planner.completed(group)
    assert planner.end() == ["d"]
    for group in "abc":
        planner.taken(group)
    assert planner.begin(1) == Round(new=3, resumed=("d",), needed=3)
    planner.started("efg")
    for group in "efg":
        planner.completed(group)
    assert not planner.over, "this step must train d"
    planner.completed("d")
    assert planner.over and planner.end() == []


def test_the_age_bound_limits_how_many_are_issued_too_many() -> None:
    assert TailBatching(batch=4, over_issue=3, max_age=0).begin(0).new == 4
    assert TailBatching(batch=4, over_issue=3, max_age=1).begin(0).new == 8
    assert PartialRollouts(batch=4, round_tokens=1, over_issue=3, max_age=1).begin(0).new == 8
    assert TailBatching(batch=10, over_issue=1.1).begin(0).new == 11, "11.000000000000002 is 11"


def test_dropped_groups_are_replaced_in_a_round_of_the_same_weights() -> None:
    planner = TailBatching(batch=2, over_issue=1)
    planner.begin(0)
    planner.started("ab")
    planner.dropped("a")
    planner.completed("b")
    assert planner.over and planner.end() == [] and planner.again
    assert planner.begin(0) == Round(new=1, resumed=(), needed=1)
    with pytest.raises(KeyError, match="neither of this round"):
        planner.dropped("b")


KINDS: list[Callable[[int, float, int | None], Rounds]] = [
    lambda batch, over_issue, max_age: TailBatching(batch, over_issue, max_age),
    lambda batch, over_issue, max_age: PartialRollouts(batch, 7, over_issue, max_age),
]


class Driver:
    """A run by rounds in which random groups complete, are parked or dropped. One in eight is a straggler, which
    completes only where the round cannot end without it."""

    def __init__(self, planner: Rounds, rng: random.Random, streams: bool) -> None:
        self.planner, self.rng, self.streams = planner, rng, streams
        self.schedule = taking(make_schedule("stream"), planner)
        self.under: dict[str, int] = {}
        """Version that it was issued under, by group that is not trained."""
        self.complete: list[str] = []
        self.trained: list[str] = []
        self.stragglers: set[str] = set()
        self.issued = self.dropped = self.step = self.oldest = 0
        self.room = planner.batch

    def train(self) -> None:
        """As long as something may be taken, in order."""
        while self.room and self.complete:
            self.complete.sort(key=self.under.__getitem__)
            first = self.under[self.complete[0]]
            due = due_within(Counter(self.under.values()), self.step, self.schedule.max_staleness)
            batch, step = self.planner.batch, self.step
            state = ScheduleState(batch, 0, 0, step, step, batch - self.room, len(self.complete), due, 1000)
            if not self.schedule.may_take(state, first):
                return
            group = self.complete.pop(0)
            del self.under[group]
            self.oldest = max(self.oldest, step - first)
            self.planner.taken(group)
            self.trained.append(group)
            self.room -= 1

    def round(self) -> None:
        current = self.planner.begin(self.step)
        names = [str(self.issued + n) for n in range(current.new)]
        self.issued += len(names)
        self.planner.started(names)
        self.under |= dict.fromkeys(names, self.step)
        self.stragglers |= {name for name in names if self.rng.random() < 0.125}
        unfinished = [*names, *current.resumed]
        active = list(unfinished)
        while not self.planner.over:
            group = self.rng.choice([name for name in active if name not in self.stragglers] or active)
            active.remove(group)
            if current.budget is not None and self.rng.random() < 0.3:
                self.planner.parked(group)
                continue
            unfinished.remove(group)
            if self.rng.random() < 0.05:
                self.planner.dropped(group)
                self.dropped += 1
                del self.under[group]
                continue
            self.planner.completed(group)
            self.complete.append(group)
            if self.streams:
                self.train()
        assert sorted(self.planner.end()) == sorted(unfinished)

    def one_step(self) -> None:
        self.room = self.planner.batch
        self.round()
        rounds = 1
        while self.planner.again:
            assert rounds < 400, "the rounds of one version never end"
            self.round()
            rounds += 1
        self.train()
        assert self.room == 0, "a step that is not full after its rounds"
        self.step += 1


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("max_age", [None, 0, 1, 2, 5])
@pytest.mark.parametrize("kind", KINDS, ids=["tail", "partial"])
def test_every_group_is_trained_once_or_open_and_none_is_older_than_the_bound(
    kind: Callable[[int, float, int | None], Rounds], max_age: int | None, streams: bool
) -> None:
    oldest = 0
    for seed in range(25):
        rng = random.Random(seed)
        batch = rng.randint(1, 8)
        driver = Driver(kind(batch, rng.uniform(1, 2.5), max_age), rng, streams)
        for _ in range(30):
            driver.one_step()
        assert len(set(driver.trained)) == len(driver.trained) == 30 * batch
        assert set(driver.trained).isdisjoint(driver.under)
        assert len(driver.trained) + driver.dropped + len(driver.under) == driver.issued, "nothing is lost"
        oldest = max(oldest, driver.oldest)
    if max_age is not None:
        assert oldest == max_age, "the bound is kept, and used"


@pytest.mark.parametrize(("batch", "factor"), [(0, 1.5), (2, 0.9), (2, float("nan")), (2, float("inf"))])
def test_impossible_rounds_are_refused(batch: int, factor: float) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        TailBatching(batch, factor)
    with pytest.raises(ValueError, match="1 or more"):
        PartialRollouts(batch, 10, factor)


def test_an_empty_budget_and_a_negative_age_are_refused() -> None:
    with pytest.raises(ValueError, match="budget of 1 token or more"):
        PartialRollouts(2, 0)
    with pytest.raises(ValueError, match="must not be negative"):
        TailBatching(2, max_age=-1)
