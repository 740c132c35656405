"""The controller's loop: what it waits for, what it answers, and as what it ends."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import AsyncMock

import pytest

from streamrl.config.run import RunConfig
from streamrl.controller.controller import Controller
from streamrl.controller.evaluation_runner import Evaluator
from streamrl.controller.group_source import GroupSource
from streamrl.controller.run_end import RunEnd
from streamrl.errors import RestartNeeded, RunFailed, UserError
from streamrl.protocol.controller_rewards import ScoreAnswer
from streamrl.protocol.operator import CheckpointNow
from streamrl.rollouts.length_audit import has_limit
from streamrl.run_dir import layout
from streamrl.run_dir.evaluations import read_evaluations
from streamrl.run_dir.status import read_status
from tests.security.conftest import controller as controller
from tests.security.conftest import sent as sent
from tests.security.hostile_world import OWN, SITES, Sent, batch, hear, said, sample, two_sites


def evaluating(controller: Controller) -> Evaluator:
    """Let the controller evaluate a greedy and a sampled completion of one held-out prompt."""
    held_out = controller.context.run_dir / "held_out.jsonl"
    held_out.write_text(json.dumps({"prompt": "1 + 1", "answer": "2"}))
    task = {"kind": "file", "name": "sums", "path": str(held_out), "reward": "exact_match"}
    run = RunConfig.model_validate({"evaluation": {"tasks": [task], "prompts": 1, "samples": 1}})
    groups = cast(GroupSource, SimpleNamespace(tokens=lambda prompt: OWN, longest_prompt=len(OWN)))
    evaluator = Evaluator(run, controller.context.run_dir, groups, lambda step, score: None)
    controller._build(groups, evaluator)
    return evaluator


def waited_for(controller: Controller) -> set[str]:
    """Return what the controller waits for before it receives its next message."""
    controller._register_waits()
    return {str(wait["waiting_for"]).rpartition(" of ")[0] for wait in controller.waits.snapshot()}


def test_another_site_may_be_away_while_its_samples_and_rewards_are_waited_for(controller: Controller) -> None:
    evaluating(controller)
    hear(controller, batch("service-home", sample("home", 0, 0)))
    controller._register_waits()
    limits = {str(wait["waiting_for"]).split()[1]: wait["limit_s"] for wait in controller.waits.snapshot()}
    own, away_s = controller.config, controller.context.cluster.absence_s
    assert limits["samples"] == own.longest_silence_s + away_s
    assert limits["rewards"] == own.longest_reward_s * 10 + own.deadlines.startup_s + away_s


def test_what_is_waited_for_after_the_last_step_are_measurements_and_no_samples(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluating(controller)
    monkeypatch.setattr(controller.training, "awaited_canaries", lambda: ["home-0", "home-1"])
    controller._register_waits()
    assert "2 canary measurements" in {wait["waiting_for"] for wait in controller.waits.snapshot()}


def test_an_evaluation_whose_samples_wait_for_rewards_waits_for_no_samples(controller: Controller, sent: Sent) -> None:
    evaluator = evaluating(controller)
    for number, site in enumerate(("home", "far")):  # training waits for nothing
        hear(controller, batch(f"service-{site}", *(sample(site, number, n) for n in (0, 1))))
        for n in (0, 1):
            answer = ScoreAnswer(sample_id=f"p{number}-0.{n:03d}", reward=1.0, seconds=0.0)
            hear(controller, said("rewards-home", answer))
    assert waited_for(controller) == set()
    [group] = evaluator.begin(0, 1.0)
    asyncio.run(controller.services.generate([group], [evaluator.samples(group)]))
    assert waited_for(controller) == {"2 samples"}
    [(service, ids)] = [order for order in sent.ordered() if order[1]]
    done = [sample(SITES[service], 0, sample_id=one, group_id=group.group_id) for one in ids]
    hear(controller, batch(service, done[0]))
    assert waited_for(controller) == {"1 samples", "1 rewards"}
    hear(controller, batch(service, done[1]))
    assert waited_for(controller) == {"1 rewards"}, "it had begun with the first sample"
    hear(controller, said("rewards-home", ScoreAnswer(sample_id=ids[0], reward=1.0, seconds=0.0)))
    assert "rewards" not in controller.waits.begun, "a reward renews the wait for the others"
    assert waited_for(controller) == {"1 rewards"}
    hear(controller, said("rewards-home", ScoreAnswer(sample_id=ids[1], reward=0.0, seconds=0.0)))
    assert waited_for(controller) == set()
    [row] = read_evaluations(controller.context.run_dir / layout.EVALUATIONS)
    assert (row.step, row.overall.samples) == (0, 2)


def test_a_checkpoint_that_was_asked_for_by_a_command_that_has_ended_is_saved(controller: Controller) -> None:
    del controller.hub.send  # type: ignore[method-assign]
    assert "checkpoint-1" not in controller.hub.peers
    hear(controller, said("checkpoint-1", CheckpointNow()))
    assert controller.training.checkpoint_wanted


def test_a_checkpoint_that_is_asked_for_after_the_last_step_is_that_of_the_last_step(
    controller: Controller, sent: Sent
) -> None:
    steps = controller.config.steps
    for done in (0, steps - 1, steps):
        controller.training.resume_at(done)
        hear(controller, said("checkpoint-1", CheckpointNow()))
    planned = [body["step"] for _, kind, body in sent.messages if kind == "checkpoint_planned"]
    assert planned == [1, steps, steps]


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (RunFailed("too many rewards are void"), "failed"),
        (UserError("no such file"), "failed"),
        (OSError(errno.ENOSPC, "no space"), "failed"),
        (ExceptionGroup("all", [RunFailed("lost")]), "failed"),
        (RestartNeeded("the trainer hangs"), "starting"),
        (ValueError("nobody has foreseen this"), "starting"),
        (ExceptionGroup("all", [KeyError("neither this")]), "starting"),
    ],
    ids=repr,
)
def test_other_sites_are_told_of_an_end_only_if_the_launcher_does_not_start_the_controller_again(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, error: Exception, state: str
) -> None:
    told: list[str] = []
    looked: list[int] = []

    async def fail() -> None:
        await asyncio.sleep(0)  # what is done beside begins
        raise error

    async def look(step: Callable[[], int]) -> None:
        looked.append(step())

    async def tell(state: str, error: str | None, patient: bool) -> list[str]:
        assert not patient
        told.append(state)
        return []

    monkeypatch.setattr(controller, "_start", fail)
    monkeypatch.setattr(controller.farewell, "tell", tell)
    monkeypatch.setattr(controller.telemetry.disk, "keep_looking", look)
    controller.telemetry.step = 3
    controller.hub.peers.clear()
    with pytest.raises(type(error)):
        asyncio.run(controller.run())
    status = read_status(controller.context.run_dir)
    assert status.state == state and told == [one for one in ("failed",) if one == state]
    assert status.error == (str(error) if told else None) and looked == [3]


@pytest.mark.parametrize("agents", [False, True])
def test_the_limit_of_a_call_is_no_limit_of_the_lengths_of_episodes(tmp_path: Path, sent: Sent, agents: bool) -> None:
    kind = {"kind": "agent", "run": "m:f"} if agents else {"kind": "file", "reward": "exact_match"}
    changes = {"tasks": [{"name": "a", "path": "p"} | kind], "sampling": {"max_tokens": 64}}
    with two_sites(tmp_path, sent, **changes) as controller:
        edges = controller.audit.end_step(1).edges
        assert edges[-1] == (controller.config.model.max_context if agents else 64 + 1)
    assert has_limit(edges) is not agents


async def stands_still() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("how", ["stopped", "error"])
def test_a_run_that_is_done_stays_so_while_the_sites_are_told(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    told: list[str] = []

    async def play() -> None:
        async def tell(state: str, error: str | None, patient: bool) -> list[str]:
            told.append(state)
            if len(told) > 1:
                assert not patient
                return ["far"]
            if how == "error":
                raise RunFailed("no room")
            running.cancel()
            await stands_still()
            return []

        monkeypatch.setattr(controller.farewell, "tell", tell)
        monkeypatch.setattr(controller, "_start", AsyncMock())
        monkeypatch.setattr(RunEnd, "reached", True)
        running = asyncio.ensure_future(controller.run())
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(play())
    status = read_status(controller.context.run_dir)
    assert (status.state, status.error, told) == ("done", None, ["done", "done"])
    assert status.untold == ["far"]
