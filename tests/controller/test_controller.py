"""The controller's loop: what it waits for, what it answers, and as what it ends."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import AsyncMock, Mock

import pytest

from streamrl.config.run import RunConfig
from streamrl.controller.controller import Controller
from streamrl.controller.evaluation_runner import Evaluator
from streamrl.controller.group_source import GroupSource
from streamrl.controller.run_end import RunEnd
from streamrl.controller.telemetry import Telemetry
from streamrl.errors import RestartNeeded, RunFailed, UserError
from streamrl.protocol.controller_rewards import ScoreAnswer
from streamrl.protocol.operator import CheckpointNow
from streamrl.rollouts.kept_micro_batches import KeptMicroBatches, KeptStep
from streamrl.rollouts.ledger import KnownSteps, Ledger
from streamrl.rollouts.length_audit import has_limit
from streamrl.run_dir import jsonl, layout
from streamrl.run_dir.checkpoint_sums import file_sums, write_sums
from streamrl.run_dir.evaluations import read_evaluations
from streamrl.run_dir.metrics import MetricsRow, read_metrics
from streamrl.run_dir.status import read_status
from tests.controller.test_pool_and_batch import group_source
from tests.report.synthetic import make_row
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


def test_a_resumed_run_forgets_what_was_refused_after_its_checkpoint(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluating(controller)
    monkeypatch.setattr(controller, "groups", Mock())
    checkpoint = controller.checkpoints.path(10)
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps({"step": 10, "prompts": {}}))
    kept = KeptMicroBatches(controller.context.run_dir / layout.REFUSED)
    for step in (9, 12):
        kept.write(KeptStep(step, 1.0, "loss", {}, []))
    controller._restore()
    assert kept.steps() == [9]


STATE = '{"step": 2, "prompts": {"next_index": 4, "too_long": 0}}'


def resumable(controller: Controller, state: str = STATE) -> Path:
    """Give the run two steps and a checkpoint after them; return the checkpoint."""
    evaluating(controller)
    controller.groups = group_source(controller.context.run_dir / "prompts", max_tokens=4, context=64)
    for step in (1, 2):
        controller.ledger.train(step, step, [], 1.0)
        controller.telemetry.metrics.append(make_row(step))
    checkpoint = controller.checkpoints.path(2)
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(state)
    return checkpoint


def test_a_resumed_run_knows_the_time_left_at_the_pace_of_before_and_counts_it_down(controller: Controller) -> None:
    resumable(controller)
    controller._restore()
    pace, left = 18.15, controller.config.steps - 2
    controller.telemetry.write()
    assert read_status(controller.context.run_dir).eta_s == pytest.approx(left * pace)
    controller.times.weights_served(time.time() - 10.0, time.monotonic() - 10.0)
    controller.telemetry.write()
    eta_s = read_status(controller.context.run_dir).eta_s
    assert eta_s is not None and (left - 1) * pace <= eta_s <= left * pace - 10.0


@pytest.mark.parametrize(
    "state", ["", STATE[:30], "\0" * 9, "[]", "{}", '{"step": 2, "prompts": []}', STATE.replace("2", "4"), None]
)
def test_a_damaged_checkpoint_is_named_and_ends_the_run(controller: Controller, state: str | None) -> None:
    checkpoint = resumable(controller, state or "")
    controller.ledger.checkpointed(1)  # killed before it knew that step 2 has one, for which the older one went
    if state is None:
        (checkpoint / "state.json").unlink()
    with pytest.raises(RunFailed) as found:
        controller._restore()
    message = str(found.value)
    assert message.startswith(f"checkpoint {checkpoint} cannot be read: ")
    assert message.endswith("rename it to lost_step_2: --resume then continues from the beginning (see docs: E1009)")
    checkpoint.rename(checkpoint.with_name("lost_step_2"))
    controller._restore()
    assert controller.ledger.steps() == 0


def test_a_position_that_has_changed_since_it_was_written_is_not_taken(controller: Controller) -> None:
    checkpoint = resumable(controller)
    write_sums(checkpoint, 2, file_sums(checkpoint, checkpoint.iterdir()))
    controller._restore()
    (checkpoint / "state.json").write_text(STATE.replace("4", "5"))
    with pytest.raises(RunFailed, match=r"cannot be read: state\.json does not match its checksum; "):
        controller._restore()


def test_a_run_whose_newest_checkpoint_is_missing_is_not_rewound(controller: Controller) -> None:
    checkpoint = resumable(controller)
    controller.ledger.checkpointed(2)
    checkpoint.rename(lost := checkpoint.with_name("elsewhere"))
    with pytest.raises(RunFailed, match="step_2 is missing: without it the run would continue from the beginning"):
        controller._restore()
    assert controller.ledger.steps() == len(read_metrics(controller.telemetry.metrics.path)) == 2
    lost.rename(checkpoint.with_name("lost_step_2"))
    controller.groups = Mock()
    controller._restore()
    assert controller.ledger.steps() == controller.ledger.known().checkpoint == 0
    controller._restore()


@pytest.mark.parametrize("sound", [True, False])
def test_a_run_without_checkpoints_begins_again_only_if_its_ledger_knows_its_steps(
    controller: Controller, sound: bool
) -> None:
    checkpoint = resumable(controller)
    shutil.rmtree(checkpoint)
    metrics = controller.telemetry.metrics.path
    if not sound:  # as in a copy without it
        controller.ledger.close()
        controller.ledger.path.unlink()
        with pytest.raises(RunFailed, match=r"has files of 2 steps, and neither .*lost_step_2 \(see docs: E1009\)$"):
            for _ in range(2):  # the second time it has been made anew
                controller.ledger = Ledger(controller.ledger.path, resumed=True)
                controller._restore()
        assert len(read_metrics(metrics)) == 2
        controller.checkpoints.lost(2).mkdir()
    controller.groups = Mock()
    controller._restore()
    assert (controller.ledger.known(), read_metrics(metrics)) == (KnownSteps(0, 0), [])


def test_a_run_that_was_killed_while_it_began_again_does_so(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(resumable(controller))
    controller.groups = Mock()
    monkeypatch.setattr(controller.ledger, "rewind", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        controller._restore()
    monkeypatch.undo()
    controller._restore()
    assert controller.ledger.known() == KnownSteps(0, 0)


def test_a_newest_checkpoint_that_this_node_sees_late_is_waited_for(
    controller: Controller, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = resumable(controller)
    controller.ledger.checkpointed(2)
    checkpoint.rename(unseen := checkpoint.with_name("unseen"))
    looks: list[float] = []

    async def appears(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            unseen.rename(checkpoint)

    monkeypatch.setattr(asyncio, "sleep", appears)
    monkeypatch.setattr("streamrl.controller.controller.bind_home", Mock(side_effect=EOFError))
    monkeypatch.setattr("streamrl.controller.controller.GroupSource", Mock())
    controller.context = replace(controller.context, resume=True)
    with pytest.raises(EOFError):  # it has restored
        asyncio.run(controller._start())
    assert controller.training.step == 2 and len(looks) == 3
    assert sum("step_2 is missing" in line and line.endswith(" later") for line in caplog.messages) == 1
    checkpoint.rename(unseen)
    monkeypatch.setattr("streamrl.controller.controller.SEEN_S", -1.0)
    with pytest.raises(RunFailed, match="step_2 is missing"):
        asyncio.run(controller._start())


def test_a_run_of_an_earlier_version_whose_checkpoints_are_all_missing_is_not_rewound(controller: Controller) -> None:
    checkpoint = resumable(controller)
    for step in range(3, 12):
        controller.ledger.train(step, step, [], 1.0)
    controller.ledger._db.execute("DELETE FROM newest_checkpoint")
    controller.ledger = Ledger(controller.ledger.path)
    checkpoint.rename(lost := checkpoint.with_name("lost_step_2"))
    with pytest.raises(RunFailed, match="step_10 is missing: without it the run would continue from the beginning"):
        controller._restore()
    assert controller.ledger.steps() == 11
    lost.rename(checkpoint)  # any one shows that their folder is there
    controller.groups = Mock()
    controller._restore()
    assert controller.ledger.steps() == controller.ledger.known().checkpoint == 2


def test_a_run_with_more_metrics_than_others_read_at_once_goes_on(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumable(controller)
    controller.telemetry.metrics.append(make_row(3))
    monkeypatch.setattr(jsonl, "LARGEST_ROWS", 100)
    before = controller.telemetry
    controller.telemetry = Telemetry(before.context, before.hub, before.lengths)
    controller._restore()
    assert [row.step for row in jsonl.iter_rows(before.metrics.path, MetricsRow)] == [1, 2]


@pytest.mark.parametrize("lost", ["", layout.LEDGER, layout.METRICS])
def test_a_file_that_lacks_steps_of_the_checkpoint_is_named(
    controller: Controller, caplog: pytest.LogCaptureFixture, lost: str
) -> None:
    resumable(controller)
    if lost == layout.LEDGER:
        controller.ledger.rewind(2)
    if lost == layout.METRICS:
        controller.telemetry.metrics.rewind(0)
        controller.telemetry.metrics.append(make_row(2))
    caplog.set_level(logging.WARNING)
    controller._restore()
    assert [line.partition(" of the 2 steps")[0] for line in caplog.messages] == {
        "": [],
        layout.LEDGER: [f"{controller.ledger.path} knows 1"],
        layout.METRICS: [f"{controller.telemetry.metrics.path} lacks 1"],
    }[lost]


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
