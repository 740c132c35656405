"""Rounds of a live run: the planner thinks in groups, the run in samples."""

from __future__ import annotations

import pytest

from streamrl.config.run import RunConfig
from streamrl.controller.group_pool import GroupPool
from streamrl.controller.live_rounds import LiveRounds, NoRounds, make_rounds
from tests.controller.test_pool_and_batch import empty_group, finish
from tests.rollouts.test_rollouts import make_sample


def rounds_of(**rounds: object) -> tuple[LiveRounds, GroupPool]:
    schedule = {"name": "stream", "rounds": rounds}
    run = RunConfig.model_validate({"schedule": schedule, "batch": {"prompts_per_step": 2, "samples_per_prompt": 2}})
    pool = GroupPool(2, 9)
    live = make_rounds(run, pool)
    assert live is not None
    return live, pool


def begin(live: LiveRounds, pool: GroupPool, version: int, names: str) -> tuple[str, ...]:
    """Begins a round with these new groups; those that it resumes."""
    assert live.may_begin(version, version)
    current = live.begin(version)
    assert current.new == len(names)
    pool.issue([empty_group(name) for name in names], version)
    live.planner.started(names)
    return current.resumed


def test_a_schedule_without_rounds_has_none() -> None:
    assert type(make_rounds(RunConfig(), GroupPool(2, 9))) is NoRounds


def test_what_a_batch_does_not_need_is_put_off_and_gone_on_with() -> None:
    live, pool = rounds_of(kind="tail_batching", over_issue=2.0)
    assert begin(live, pool, 0, "abcd") == ()
    assert not live.may_train(1, whole_batches=False) and not live.may_train(0, whole_batches=True)
    pool.finish(make_sample("a.0"), 0.0)
    for name in "bc":
        finish(pool, name, [1.0, 0.0])
        live.planner.completed(name)
        live.planner.taken(pool.take().group_id)
    assert live.resting == 0
    assert live.end_if_over() == ["a", "d"]
    assert live.resting == 3 == pool.running  # nobody works on them
    assert live.may_train(0, whole_batches=True)
    assert (live.count_deferred(), live.count_deferred()) == (3, 0)  # one sample of a, two of d
    assert not live.may_begin(0, 0) and not live.may_begin(0, 1)  # not before the new weights
    assert live.may_begin(1, 1)
    assert live.begin(1).resumed == ("a", "d")  # a whole batch has been put off
    assert live.resting == 0


def test_a_group_is_parked_when_all_its_samples_that_go_on_are() -> None:
    live, pool = rounds_of(kind="partial_rollouts", round_tokens=8)
    begin(live, pool, 0, "ab")
    live.parked("a.0", "a", 0)  # of another round
    live.parked("a.0", "a", 1)
    assert live.end_if_over() == []
    pool.finish(make_sample("a.1"), 0.0)
    live.finished("a")  # nothing of a is left to come in this round
    live.parked("b.0", "b", 1)
    assert live.resting == 2  # a.0 and b.0
    live.parked("b.1", "b", 1)
    assert live.end_if_over() == ["a", "b"]
    assert live.may_begin(0, 0)  # nothing could be trained: the next round begins under the same weights
    live.parked("b.1", "b", 1)  # crossed the end of the round on the way
    assert live.begin(0).resumed == ("a", "b")
    live.parked("b.1", "b", 1)
    assert live.end_if_over() == []


def test_a_sample_that_is_said_to_be_parked_and_is_not_of_the_round_changes_nothing() -> None:
    live, pool = rounds_of(kind="tail_batching", over_issue=1.5)
    begin(live, pool, 0, "abc")
    for name in "bc":
        finish(pool, name, [1.0, 0.0])
        live.planner.completed(name)
        live.planner.taken(pool.take().group_id)
    assert live.end_if_over() == ["a"]
    live.parked("a.0", "a", 1)
    assert live.resting == 2 == pool.running, "each counts once"
    assert begin(live, pool, 1, "def") == (), "one deferred group does not fill a batch"
    for number in (0, 1):
        live.parked(f"a.{number}", "a", 2)
    assert live.resting == 2 and live.end_if_over() == []


def test_rounds_that_cannot_carry_over_are_refused() -> None:
    with pytest.raises(ValueError, match="could not carry anything over"):
        rounds_of(kind="partial_rollouts", round_tokens=8, max_age=0)
    with pytest.raises(ValueError, match="rounds go with sync_every: 1"):
        RunConfig.model_validate({"schedule": {"name": "sync", "sync_every": 2, "rounds": {"kind": "tail_batching"}}})
