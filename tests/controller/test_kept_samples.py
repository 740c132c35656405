"""A run that has gone back to a checkpoint: what it takes over, and what it generates again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from scheduler.schedule.schedules import Schedule
from streamrl.controller.controller import Controller
from streamrl.controller.group_pool import GroupPool
from streamrl.controller.issuer import Issuer
from streamrl.controller.kept_samples import KeptSample, issue_groups, kept_samples, prompt_digest
from streamrl.errors import RunFailed
from streamrl.protocol.controller_rewards import ScoreAnswer
from streamrl.protocol.samples import sample_to_wire
from streamrl.rollouts.ledger import _checksum, pack_content
from streamrl.rollouts.types import Group, Sample
from streamrl.rollouts.void import VoidCause
from tests.rollouts.test_row_parts import TWO_TURNS, episode
from tests.security.conftest import controller as controller
from tests.security.conftest import sent as sent
from tests.security.hostile_world import OWN, Sent, batch, hear, said, sample

FIRST, SECOND = "p0-0.000", "p0-0.001"


def again(**changes: Any) -> Group:
    """The group that the world has given to home, as a resume makes it once more."""
    return replace(Group("p0-0", 1, 0, "p0", "t", 0, "", OWN, 2), **changes)


def go_back(controller: Controller, step: int = 0) -> None:
    """Let the controller begin anew after a checkpoint of `step`, as a new process would."""
    controller.ledger.rewind(step + 1)
    controller.pool.groups.clear()
    controller.pool.received.clear()
    controller.pool._missing.clear()
    controller.pool.resume_at(step)
    controller.services._dispatch.withdraw(["p0-0", "p1-0"])
    controller.rewarders._open["rewards-home"].clear()
    controller.training.step = step


def content_of(played: Sample) -> bytes:
    body, arrays = sample_to_wire(played)
    return pack_content(msgspec.to_builtins(body), arrays)


def kept_by(controller: Controller, group: Group) -> list[KeptSample]:
    return kept_samples(controller.ledger, group, 0, controller.training.step, controller.sample_limits)


def issue_again(controller: Controller, group: Group, version: int = 0) -> None:
    async def issue() -> None:
        controller.pool.issue([group], version)
        await controller._generate([group])

    asyncio.run(issue())


def test_a_finished_sample_is_scored_again_and_only_what_its_group_lacks_is_generated(
    controller: Controller, sent: Sent
) -> None:
    hear(controller, batch("service-home", sample("home", 0, 0, text="the answer")))
    go_back(controller)
    assert controller.ledger.count_kept() == 1
    group = again()
    issue_again(controller, group)
    assert [ids for _, ids in sent.ordered() if ids] == [[SECOND]]
    assert list(controller.rewarders._open["rewards-home"]) == [FIRST]
    kept, _ = controller.pool.received[FIRST]
    assert kept.text == "the answer" and kept.logprobs.tobytes() == sample("home", 0, 0).logprobs.tobytes()
    assert controller.ledger.counts() == {"finished": 1, "issued": 1} and controller.ledger.count_kept() == 0
    # it ends like any other
    [(service, _)] = [order for order in sent.ordered() if order[1]]
    hear(controller, batch(service, sample(service.removeprefix("service-"), 0, 1)))
    for one in (FIRST, SECOND):
        hear(controller, said("rewards-home", ScoreAnswer(sample_id=one, reward=1.0, seconds=0.0)))
    assert group.complete and controller.pool.complete == 1 and group.kept == 1
    assert controller.ledger.counts() == {"scored": 2}
    assert controller.services._dispatch.groups_of(service.removeprefix("service-")) == []


def test_a_group_that_is_whole_goes_to_no_site(controller: Controller, sent: Sent) -> None:
    hear(controller, batch("service-home", sample("home", 0, 0), sample("home", 0, 1)))
    go_back(controller)
    issue_again(controller, again())
    assert sent.ordered() == [] and controller.pool.running == 0 and controller.pool.generated == 1
    go_back(controller)  # and it is kept once more
    issue_again(controller, again())
    assert sent.ordered() == [] and sorted(controller.pool.received) == [FIRST, SECOND]


def test_what_a_later_version_has_drawn_is_generated_again(controller: Controller, sent: Sent) -> None:
    controller.training.step = 1
    mixed = np.array([0, 0, 1, 1], np.int32)
    hear(controller, batch("service-home", sample("home", 0, 0, token_versions=mixed), sample("home", 0, 1)))
    go_back(controller, 0)
    issue_again(controller, again())
    assert [ids for _, ids in sent.ordered() if ids] == [[FIRST]]


@pytest.mark.parametrize(
    ("bound", "step", "taken_over"), [(0, 6, False), (1, 6, True), (2, 6, True), (1, 7, False), (2, 7, True)]
)
def test_a_sample_is_taken_over_while_the_schedule_admits_its_age_and_then_counts_as_that_old(
    controller: Controller, sent: Sent, monkeypatch: pytest.MonkeyPatch, bound: int, step: int, taken_over: bool
) -> None:
    """A group may be trained as late as in the step that it is issued for."""
    monkeypatch.setattr(controller.issuer, "schedule", Schedule("async", bound, False, False))
    controller.training.step = 5
    versions = np.array([4, 4, 5, 5], np.int32)
    hear(controller, batch("service-home", sample("home", 0, 0, token_versions=versions)))
    go_back(controller, 5)
    issue_again(controller, group := again(step=step), version=5)
    assert (FIRST in controller.pool.received) == taken_over
    orders = [one for _, kind, body in sent.messages if kind == "generate" for one in body["groups"]]
    assert {one["oldest"] for one in orders} == {step - 1 - bound}
    assert group.issue_version == (4 if taken_over else 5)


def test_a_sample_that_was_continued_from_before_a_resume_counts_as_old_as_its_first_token(
    controller: Controller, sent: Sent
) -> None:
    controller.training.step = 5
    go_back(controller, 5)
    issue_again(controller, group := again(step=6), version=5)
    [(service, _)] = [order for order in sent.ordered() if order[1]]
    versions = np.array([4, 4, 5, 5], np.int32)
    hear(controller, batch(service, sample(service.removeprefix("service-"), 0, 0, token_versions=versions)))
    assert group.issue_version == 4
    hear(controller, batch(service, sample(service.removeprefix("service-"), 0, 1, token_versions=versions + 1)))
    assert group.issue_version == 4


def test_a_prompt_that_has_changed_is_generated_again(controller: Controller, sent: Sent) -> None:
    hear(controller, batch("service-home", sample("home", 0, 0), sample("home", 0, 1)))
    go_back(controller)
    issue_again(controller, again(prompt_tokens=OWN + 1))
    assert [ids for _, ids in sent.ordered() if ids] == [[FIRST, SECOND]]


def test_samples_of_other_settings_are_generated_again(controller: Controller, sent: Sent) -> None:
    hear(controller, batch("service-home", sample("home", 0, 0), sample("home", 0, 1)))
    go_back(controller)
    issue_again(controller, again(settings='{"temperature": 0.5}'))
    assert [ids for _, ids in sent.ordered() if ids] == [[FIRST, SECOND]]


def test_an_agents_prompt_is_what_its_task_gives_it_and_that_of_a_completion_are_its_tokens() -> None:
    other: dict[str, Any] = {"reward_input": {"answer": "5"}}
    assert prompt_digest(again()) == prompt_digest(again(**other)) != prompt_digest(again(prompt_tokens=OWN[:3]))
    assert prompt_digest(again(agent=True)) != prompt_digest(again(agent=True, **other))


@pytest.mark.parametrize(("cause", "taken_over"), [(None, True), (VoidCause.CRASH, False)])
def test_a_void_episode_is_played_again_and_another_one_is_not(
    controller: Controller, cause: VoidCause | None, taken_over: bool
) -> None:
    group = again(group_id="x", size=1, agent=True)
    played = episode("x.000", [TWO_TURNS])
    assert played.trajectory is not None
    told = msgspec.structs.replace(
        played.trajectory, reward=None if cause else 1.0, void_cause=cause, void_text="it raised"
    )
    played = replace(played, trajectory=told, group_id="x")
    issue_groups(controller.ledger, [group])
    controller.ledger.finish([(played, content_of(played))])
    go_back(controller, 9)
    assert [one.sample.sample_id for one in kept_by(controller, group)] == ["x.000"] * taken_over


def test_a_sample_that_cannot_be_read_is_generated_again(controller: Controller, sent: Sent) -> None:
    hear(controller, batch("service-home", sample("home", 0, 0), sample("home", 0, 1)))
    controller.ledger._db.execute("UPDATE contents SET content = x'c1' WHERE sample_id = ?", (FIRST,))
    go_back(controller)
    issue_again(controller, again())
    assert [ids for _, ids in sent.ordered() if ids] == [[FIRST]]


@pytest.mark.parametrize("before_its_checksum", [False, True])
def test_a_sample_that_is_damaged_on_disk_is_generated_again(
    controller: Controller, sent: Sent, before_its_checksum: bool
) -> None:
    """One flipped bit makes another token; under a checksum that fits, it is noticed outside the vocabulary."""
    drawn = sample("home", 0, 0)
    hear(controller, batch("service-home", drawn, sample("home", 0, 1)))
    ((content,),) = controller.ledger._db.execute("SELECT content FROM contents WHERE sample_id = ?", (FIRST,))
    place, damaged = content.index(drawn.completion_tokens.tobytes()), bytearray(content)
    damaged[place + (3 if before_its_checksum else 0)] ^= 1
    controller.ledger._db.execute("UPDATE contents SET content = ? WHERE sample_id = ?", (bytes(damaged), FIRST))
    if before_its_checksum:
        checksum = _checksum(FIRST, bytes(damaged))
        controller.ledger._db.execute("UPDATE samples SET checksum = ? WHERE sample_id = ?", (checksum, FIRST))
    go_back(controller)
    issue_again(controller, again())
    assert [ids for _, ids in sent.ordered() if ids] == [[FIRST]]


@pytest.mark.parametrize(("agent", "stored_as"), [(False, SECOND), (True, FIRST)])
def test_what_is_another_sample_than_the_kept_one_is_generated_again(
    controller: Controller, sent: Sent, agent: bool, stored_as: str
) -> None:
    hear(controller, batch("service-home", sample("home", 0, 0)))
    go_back(controller)
    prompt = prompt_digest(group := again(agent=agent))
    ((content,),) = controller.ledger._db.execute("SELECT content FROM kept")
    stored = stored_as, prompt, _checksum(stored_as, content)
    controller.ledger._db.execute("UPDATE kept SET sample_id = ?, prompt = ?, checksum = ?", stored)
    assert kept_by(controller, group) == []


def test_nothing_is_taken_over_from_instances_that_do_not_compute_what_the_trainer_does(
    controller: Controller, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    hear(controller, batch("service-home", sample("home", 0, 0)))
    controller.guard.judge("they differ")
    monkeypatch.setattr(controller.guard, "_wanted", "stop")
    with pytest.raises(RunFailed, match="they differ"):
        controller.guard.judge("they differ")
    assert controller.ledger.count_kept() == 0
    go_back(controller)
    assert kept_by(controller, again()) == []


def test_groups_that_are_done_as_they_are_issued_admit_others() -> None:
    """One that dynamic sampling drops at once gives its place to another, and no message would come to ask again."""
    pool, generated = GroupPool(1, 1), []

    def new_group() -> Group:
        pool.issue([group := again(group_id=f"g{len(generated)}")], 0)
        return group

    async def generate(groups: list[Group], budget: int | None) -> None:
        generated.extend(groups)
        if len(generated) < 3:
            for group in groups:
                pool.generated += 1
                pool.drop(group.group_id)

    run: Any = SimpleNamespace(steps=1, schedule=SimpleNamespace(name="sync", max_staleness=None, sync_every=1))
    run.schedule.rounds, run.batch = None, SimpleNamespace(prompts_per_step=1)
    services: Any = SimpleNamespace(version=0)
    issuer = Issuer(run, pool, services, new_group, generate)
    asyncio.run(issuer.issue(0, 0))
    assert [group.group_id for group in generated] == ["g0", "g1", "g2"]
