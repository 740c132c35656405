"""An instance's life: the table of transitions in full, and what no sequence of events can do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from streamrl.config.recovery import RecoveryConfig
from streamrl.generation.site.instance_life import EVENTS, InstanceLife, Life

ALLOWED = {
    ("starting", "met"): "stale",
    ("stale", "current"): "ready",
    ("stale", "silent"): "suspect",
    ("ready", "silent"): "suspect",
    ("suspect", "heard"): "ready",
    ("starting", "died"): "dead",
    ("stale", "died"): "dead",
    ("ready", "died"): "dead",
    ("suspect", "died"): "dead",
    ("dead", "restarted"): "starting",
    ("starting", "retired"): "draining",
    ("stale", "retired"): "draining",
    ("ready", "retired"): "draining",
    ("suspect", "retired"): "draining",
    ("dead", "retired"): "draining",
    ("draining", "left"): "gone",
}
"""The diagram of the module; everything else cannot happen."""


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", list(Life))
def test_each_event_leads_where_the_diagram_says_or_is_refused(state: Life, event: str) -> None:
    life = InstanceLife("here-a-0", "a", 0, process=7, state=state)
    after = ALLOWED.get((str(state), event))
    assert life.can(event) == (after is not None)
    if after is None:
        with pytest.raises(ValueError, match=f"here-a-0 is {state}: '{event}' cannot happen"):
            life.on(event)
        assert (life.state, life.process) == (state, 7)
    else:
        life.on(event)
        assert (str(life.state), life.process) == (after, 8 if event == "restarted" else 7)


def test_the_diagram_has_no_other_states_or_events() -> None:
    assert {event for _, event in ALLOWED} == set(EVENTS)
    assert {state for state, _ in ALLOWED} | set(ALLOWED.values()) == set(Life)


def test_nothing_comes_back_from_draining_and_nothing_at_all_from_gone() -> None:
    reached = {"draining"}
    for _ in Life:
        reached |= {after for (before, _), after in ALLOWED.items() if before in reached}
    assert reached == {"draining", "gone"}
    assert all(before != "gone" for before, _ in ALLOWED)


class LifeMachine(RuleBasedStateMachine):
    """A service that tells an instance any event at any time, and starts it again as the budget says."""

    @initialize(
        restarts=st.integers(0, 4),
        window_s=st.floats(1.0, 100.0),
        first_s=st.floats(0.1, 5.0),
        longest_s=st.floats(1.0, 20.0),
    )
    def begin(self, restarts: int, window_s: float, first_s: float, longest_s: float) -> None:
        self.budget = RecoveryConfig(restarts=restarts, window_s=window_s, pause_s=first_s, longest_pause_s=longest_s)
        self.life = InstanceLife("here-a-0", "a", 0)
        self.now, self.processes = 0.0, [1]
        self.deaths: list[tuple[float, float | None]] = []
        """When, and after which pause it was to start again."""
        self.current_since_met = self.leaving = self.missed = False

    @rule(event=st.sampled_from([event for event in EVENTS if event != "died"]))
    def happens(self, event: str) -> None:
        before = self.life.state
        if (str(before), event) not in ALLOWED:
            with pytest.raises(ValueError, match="cannot happen"):
                self.life.on(event)
            assert self.life.state is before
            return
        back_to_stale = event == "heard" and self.missed
        self.life.on(event)
        assert str(self.life.state) == ("stale" if back_to_stale else ALLOWED[str(before), event])
        if event == "silent":
            self.missed = before is Life.STALE
        self.current_since_met &= not back_to_stale
        if event == "restarted":
            self.processes.append(self.life.process)
        if event in ("met", "current"):
            self.current_since_met = event == "current"
        self.leaving |= event == "retired"

    @rule()
    def others_get_weights(self) -> None:
        if self.life.state is Life.SUSPECT:
            self.life.missed = self.missed = True

    @rule(seconds=st.floats(0, 60))
    def passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(seconds=st.floats(0, 3), weights=st.booleans())
    def dies(self, seconds: float, weights: bool) -> None:
        """Of any state that can; often right after it has come back."""
        if self.life.can("restarted"):
            for event in ("restarted", "met", *(["current"] if weights else [])):
                self.happens(event)
        self.now += seconds
        before, deaths = self.life.state, list(self.life.deaths)
        if not self.life.can("died"):
            with pytest.raises(ValueError, match="cannot happen"):
                self.life.died(self.now, self.budget)
            assert (self.life.state, self.life.deaths) == (before, deaths)
            return
        again = self.life.died(self.now, self.budget)
        assert self.life.state is Life.DEAD
        recent = [then for then, _ in self.deaths if self.now - then < self.budget.window_s]
        assert (again is None) == (len(recent) >= self.budget.restarts)
        pause = None if again is None else again - self.now
        if pause is not None:
            due = self.budget.pause_s * 2 ** len(recent)
            assert pause == pytest.approx(min(self.budget.longest_pause_s, due))
        self.deaths.append((self.now, pause))

    @invariant()
    def only_a_current_one_that_stays_is_ready(self) -> None:
        if self.life.state is Life.READY:
            assert self.current_since_met and not self.leaving
        assert not self.leaving or self.life.state in (Life.DRAINING, Life.GONE)

    @invariant()
    def each_process_has_the_next_number(self) -> None:
        assert self.processes == list(range(1, self.life.process + 1))

    @invariant()
    def no_window_has_more_restarts_than_the_budget(self) -> None:
        granted = [then for then, pause in self.deaths if pause is not None]
        for first in granted:
            inside = [then for then in granted if 0 <= then - first < self.budget.window_s]
            assert len(inside) <= self.budget.restarts

    @invariant()
    def what_is_remembered_of_deaths_is_bounded_by_the_window(self) -> None:
        newest = self.life.deaths[-1] if self.life.deaths else 0.0
        assert all(newest - then < self.budget.window_s for then in self.life.deaths)


def test_no_sequence_of_events_makes_an_outdated_or_leaving_instance_ready_or_breaks_its_budget() -> None:
    limits = settings(derandomize=True, max_examples=100, stateful_step_count=50)
    run_state_machine_as_test(LifeMachine, settings=limits)


@settings(derandomize=True, max_examples=60)
@given(st.lists(st.floats(0.0, 300.0), min_size=1, max_size=30), st.integers(0, 6))
def test_an_instance_that_is_quiet_for_a_window_begins_again_with_the_first_pause(
    gaps: list[float], restarts: int
) -> None:
    budget, life, now = RecoveryConfig(restarts=restarts), InstanceLife("here-a-0", "a", 0), 0.0
    for gap in [*gaps, budget.window_s + 1]:
        now += gap
        again = life.died(now, budget)
        assert again is None or now + budget.pause_s <= again <= now + budget.longest_pause_s
        life.on("restarted")
    assert again == (now + budget.pause_s if restarts else None)


def test_pauses_double_within_a_window_up_to_the_longest_until_the_budget_is_used_up() -> None:
    budget, life, pauses = RecoveryConfig(restarts=8, pause_s=0.5), InstanceLife("here-a-0", "a", 0), []
    for now in range(10):
        again = life.died(float(now), budget)
        pauses.append(None if again is None else again - now)
        life.on("restarted")
    assert pauses == [0.5, 1, 2, 4, 8, 16, 32, 60, None, None]
    assert InstanceLife("b", "a", 1).died(0.0, RecoveryConfig(restarts=0)) is None


def test_a_budget_of_very_many_restarts_only_waits_its_longest_pause() -> None:
    budget, life = RecoveryConfig(restarts=5000, window_s=1e9), InstanceLife("here-a-0", "a", 0)
    for death in range(2000):
        again = life.died(float(death), budget)
        life.on("restarted")
    assert again == 1999.0 + budget.longest_pause_s
