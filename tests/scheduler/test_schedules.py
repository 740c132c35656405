"""Schedules under random events: the staleness bound holds and is reached, nothing is dropped, nothing locks up."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from scheduler.capacity.auto_schedule import during_change
from scheduler.schedule.schedules import KINDS, NAMES, Schedule, ScheduleState, due_within, make_schedule


@dataclass
class Driver:
    """A run in which everything takes as long as it likes: one random thing that may happen, after the other."""

    schedule: Schedule
    batch: int
    steps: int
    rng: random.Random
    changes: bool = False
    """The schedule may change: an exclusive one waits for what another has left running."""
    resumed_at: int = 0
    """Steps that were done before the run began."""
    generating: dict[int, int] = field(default_factory=dict)
    """Version that it was issued under, by group."""
    rewarding: dict[int, int] = field(default_factory=dict)
    complete: list[tuple[int, int, int]] = field(default_factory=list)
    """(issued under, completion, group), sorted."""
    untaken: Counter[int] = field(default_factory=Counter)
    """Number of these groups by the version that they were issued under."""
    trained: list[int] = field(default_factory=list)
    staleness: set[int] = field(default_factory=set)
    on_the_way: list[int] = field(default_factory=list)
    """Versions that were published and have not arrived."""
    events: int = 0
    largest_lag: int = 0

    def __post_init__(self) -> None:
        self.step = self.version = self.resumed_at
        self.issued = self.resumed_at * self.batch
        self.taken = self.completions = 0
        self.taking = self.schedule
        """Asked for what may be trained."""

    def state(self) -> ScheduleState:
        return ScheduleState(
            batch=self.batch,
            issued=self.issued,
            generated=self.issued - len(self.generating),
            version=self.version,
            step=self.step,
            taken=self.taken,
            complete=len(self.complete),
            due=due_within(self.untaken, self.step, self.taking.max_staleness),
            steps=self.steps,
        )

    def issue(self) -> None:
        if self.schedule.exclusive:
            assert self.taken == 0 and self.version == self.step, "issued while the trainer has the devices"
        self.generating[self.issued] = self.version
        self.untaken[self.version] += 1
        self.issued += 1

    def generate(self) -> None:
        # long and short groups: one that was issued early may come much later than its successors
        groups = list(self.generating)  # in the order of issue
        group = groups[-1] if self.rng.random() < 0.7 else self.rng.choice(groups)
        self.rewarding[group] = self.generating.pop(group)

    def reward(self) -> None:
        group = self.rng.choice(sorted(self.rewarding))
        self.completions += 1
        self.complete.append((self.rewarding.pop(group), self.completions, group))
        self.complete.sort()

    def take(self) -> None:
        if self.schedule.exclusive:
            assert not self.generating, "training began while something generates"
        version, _, group = self.complete.pop(0)
        self.untaken[version] -= 1
        if not self.untaken[version]:
            del self.untaken[version]
        assert 0 <= self.step - version <= self.taking.max_staleness
        self.staleness.add(self.step - version)
        self.trained.append(group)
        self.taken += 1

    def end_step(self) -> None:
        assert self.taken == self.batch
        self.step, self.taken = self.step + 1, 0
        if self.schedule.publishes(self.step, self.steps):
            self.on_the_way.append(self.step)

    def arrive(self) -> None:
        self.largest_lag = max(self.largest_lag, self.step - self.version)
        self.version = self.on_the_way.pop(0)

    def run(self, late: float, slow: float) -> None:
        """Until all is trained.

        Args:
            late: chance that weights on their way stay there although they might arrive.
            slow: chance that a group goes on generating.
        """
        while self.step < self.steps or self.on_the_way:
            self.one_event(late, slow)

    def one_event(self, late: float, slow: float) -> None:
        """Whatever may happen."""
        self.events += 1
        possible = []
        if self.generating:
            possible += [self.generate] * (1 if self.rng.random() < slow else 4)
        if self.rewarding:
            possible += [self.reward] * 2
        state = self.state()
        exclusive = self.changes and self.schedule.exclusive
        if self.schedule.may_issue(state) and not (exclusive and (self.taken or self.version < self.step)):
            possible += [self.issue] * 4
        if self.taken == self.batch:
            possible.append(self.end_step)
        elif self.complete and not (exclusive and self.generating) and self.taking.may_take(state, self.complete[0][0]):
            possible += [self.take] * 4
        if self.on_the_way and (not possible or self.rng.random() > late):
            possible.append(self.arrive)
        assert possible, f"locked up in {state}"
        self.rng.choice(possible)()


def allowed(name: str, sync_every: int) -> list[Schedule]:
    """The schedules of a name, by bound."""
    if name == "async":
        return [make_schedule(name, eta, sync_every) for eta in range(max(1, sync_every - 1), 6)]
    every_step_only = KINDS[name].overlaps and not KINDS[name].continuous
    return [] if every_step_only and sync_every > 1 else [make_schedule(name, sync_every=sync_every)]


EVERY = [schedule for name in NAMES for sync_every in (1, 2, 3) for schedule in allowed(name, sync_every)]
IDS = [f"{schedule.name}-{schedule.max_staleness}-every-{schedule.sync_every}" for schedule in EVERY]


@pytest.mark.parametrize("schedule", EVERY, ids=IDS)
def test_10_000_random_events_keep_the_bound_and_train_every_group_once(schedule: Schedule) -> None:
    events, seen, lag = 0, set[int](), 0
    for seed in range(1000):
        rng = random.Random(seed)
        driver = Driver(schedule, rng.choice([1, 2, 3, 8, 17]), rng.randint(1, 20), rng)
        driver.run(late=rng.choice([0.0, 0.5, 0.98]), slow=rng.choice([0.0, 0.5, 0.95]))
        assert sorted(driver.trained) == list(range(driver.steps * driver.batch)), "each once, none dropped"
        assert driver.version == driver.step == driver.steps
        events, seen, lag = events + driver.events, seen | driver.staleness, max(lag, driver.largest_lag)
        if events >= 10_000:
            break
    assert events >= 10_000
    assert seen == set(range(schedule.max_staleness + 1)), "every staleness up to the bound comes about"
    assert lag >= max(1, schedule.max_staleness), "weights came late"


@pytest.mark.parametrize("schedule", EVERY, ids=IDS)
def test_a_run_that_is_resumed_between_publications_keeps_its_rules(schedule: Schedule) -> None:
    for resumed_at in (1, 2, 3, 4, 5):
        for seed in range(10):
            rng = random.Random(seed)
            driver = Driver(schedule, rng.choice([1, 2, 5]), 9, rng, resumed_at=resumed_at)
            driver.run(late=0.5, slow=0.5)
            assert sorted(driver.trained) == list(range(resumed_at * driver.batch, 9 * driver.batch))
            assert max(driver.staleness) <= schedule.max_staleness


@pytest.mark.parametrize("seed", range(300))
def test_a_run_may_change_its_schedule_between_steps(seed: int) -> None:
    rng = random.Random(seed)
    driver = Driver(rng.choice(EVERY), rng.choice([1, 2, 5]), 20, rng, changes=True)
    changes = sorted(rng.sample(range(1, 20), 3))
    while driver.step < driver.steps or driver.on_the_way:
        driver.one_event(late=0.5, slow=0.5)
        if changes and driver.step == changes[0] and driver.taken == 0:
            changes.pop(0)
            driver.schedule = rng.choice(EVERY)
            # what was issued under the wider bound is still to be trained
            driver.taking = during_change(driver.taking, driver.schedule)
            if max([driver.version, *driver.on_the_way]) < driver.step:
                driver.on_the_way.append(driver.step)
    assert sorted(driver.trained) == list(range(driver.steps * driver.batch))


@pytest.mark.parametrize("name", ["colocated", "sync", "stream"])
@pytest.mark.parametrize("sync_every", [1, 2, 3])
def test_on_policy_schedules_train_all_of_a_version_before_the_next_is_used(name: str, sync_every: int) -> None:
    schedule = make_schedule(name, sync_every=sync_every)
    batch = 4
    state = ScheduleState(batch, 0, 0, version=0, step=0, taken=0, complete=0, due=(0,) * (sync_every - 1), steps=7)

    def issued(number: int, version: int) -> bool:
        return schedule.may_issue(ScheduleState(batch, number, number, version, version, 0, 0, state.due, 7))

    assert issued(sync_every * batch - 1, 0) and not issued(sync_every * batch, 0)
    assert issued(sync_every * batch, sync_every)
    assert not issued(7 * batch, 7), "no more than the run trains"


def test_whole_batches_wait_for_all_that_comes_before_the_next_publication() -> None:
    schedule = make_schedule("sync", sync_every=2)

    def may_take(step: int, taken: int, complete: int) -> bool:
        return schedule.may_take(ScheduleState(4, 8, 8, 0, step, taken, complete, (0,), steps=3), step // 2 * 2)

    assert may_take(0, 0, 8) and not may_take(0, 0, 7)
    assert may_take(0, 3, 5) and may_take(1, 0, 4) and may_take(1, 3, 1)
    assert may_take(2, 0, 4), "the last publication may have fewer steps"
    assert not may_take(0, 4, 8), "a step takes one batch"


def test_publications_are_every_so_many_steps_and_the_last() -> None:
    schedule = make_schedule("async", 2, 3)
    assert [step for step in range(1, 9) if schedule.publishes(step, 8)] == [3, 6, 8]


def test_due_counts_what_the_next_steps_must_take() -> None:
    # at step 5 with a bound of 2: issued under 3 is due now, under 4 in the next step, under 5 in the one after
    assert due_within({3: 1, 4: 2, 5: 1}, 5, 2) == (1, 3)
    assert due_within({}, 5, 3) == (0, 0, 0) and due_within({4: 1}, 4, 0) == ()


def test_a_group_that_is_due_keeps_its_place() -> None:
    schedule = make_schedule("async", 1)
    # one place is left in this step, and a group that is due has not come yet
    assert not schedule.may_take(ScheduleState(4, 12, 10, 1, 1, 3, 2, (1,), 9), issue_version=1)
    assert schedule.may_take(ScheduleState(4, 12, 10, 1, 1, 2, 2, (1,), 9), issue_version=1)
    assert schedule.may_take(ScheduleState(4, 12, 10, 1, 1, 3, 2, (1,), 9), issue_version=0), (
        "the one that is due may come"
    )


@pytest.mark.parametrize(
    ("name", "max_staleness", "sync_every", "complaint"),
    [
        ("fast", None, 1, "known: colocated, sync, stream, one_step_off, async"),
        ("sync", None, 0, "every 1 or more steps, not every 0"),
        ("sync", 1, 1, "sync has a staleness of 0; only async takes a bound"),
        ("async", 0, 1, "async needs a staleness of 1 or more, got 0"),
        ("async", 1, 3, "weights every 3 steps need a staleness of 2, got 1"),
        ("one_step_off", None, 2, "one_step_off publishes after every step, not every 2"),
    ],
)
def test_impossible_schedules_are_refused(
    name: str, max_staleness: int | None, sync_every: int, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        make_schedule(name, max_staleness, sync_every)
