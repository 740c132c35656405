"""A resumed run goes back to its newest checkpoint, or says what is missing."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from streamrl.controller.controller import Controller
from streamrl.controller.telemetry import Telemetry
from streamrl.errors import RunFailed
from streamrl.rollouts.kept_micro_batches import KeptMicroBatches, KeptStep
from streamrl.rollouts.ledger import KnownSteps, Ledger
from streamrl.run_dir import jsonl, layout
from streamrl.run_dir.checkpoint_sums import file_sums, write_sums
from streamrl.run_dir.metrics import MetricsRow, read_metrics
from streamrl.run_dir.start_stages import history
from streamrl.run_dir.status import read_status
from tests.controller.test_controller import evaluating
from tests.controller.test_pool_and_batch import group_source
from tests.report.synthetic import make_row
from tests.security.conftest import controller as controller
from tests.security.conftest import sent as sent


def go_back(controller: Controller) -> None:
    controller._resumption().restore()


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
    go_back(controller)
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
    go_back(controller)
    pace, left = 18.15, controller.config.steps - 2
    controller.telemetry.write()
    assert read_status(controller.context.run_dir).eta_s == pytest.approx(left * pace)
    controller.times.weights_served(time.time() - 10.0, time.monotonic() - 10.0)
    controller.telemetry.write()
    eta_s = read_status(controller.context.run_dir).eta_s
    assert eta_s is not None and (left - 1) * pace <= eta_s <= left * pace - 10.0


def test_a_resumed_run_shows_what_it_reads(controller: Controller) -> None:
    resumable(controller)
    go_back(controller)
    stages = [stage.text for stage in history(controller.context.run_dir, "controller")]
    assert stages[-1] == "reading the lengths of the newest samples"
    Controller(replace(controller.context, resume=True))
    stages = [stage.text for stage in history(controller.context.run_dir, "controller")]
    assert stages[-1] == "reading the timeline of the run so far"


@pytest.mark.parametrize(
    "state", ["", STATE[:30], "\0" * 9, "[]", "{}", '{"step": 2, "prompts": []}', STATE.replace("2", "4"), None]
)
def test_a_damaged_checkpoint_is_named_and_ends_the_run(controller: Controller, state: str | None) -> None:
    checkpoint = resumable(controller, state or "")
    controller.ledger.checkpointed(1)  # killed before it knew that step 2 has one, for which the older one went
    if state is None:
        (checkpoint / "state.json").unlink()
    with pytest.raises(RunFailed) as found:
        go_back(controller)
    message = str(found.value)
    assert message.startswith(f"checkpoint {checkpoint} cannot be read: ")
    assert message.endswith("rename it to lost_step_2: --resume then continues from the beginning (see docs: E1009)")
    checkpoint.rename(checkpoint.with_name("lost_step_2"))
    go_back(controller)
    assert controller.ledger.steps() == 0


def test_a_position_that_has_changed_since_it_was_written_is_not_taken(controller: Controller) -> None:
    checkpoint = resumable(controller)
    write_sums(checkpoint, 2, file_sums(checkpoint, checkpoint.iterdir()))
    go_back(controller)
    (checkpoint / "state.json").write_text(STATE.replace("4", "5"))
    with pytest.raises(RunFailed, match=r"cannot be read: state\.json does not match its checksum; "):
        go_back(controller)


def test_a_run_whose_newest_checkpoint_is_missing_is_not_rewound(controller: Controller) -> None:
    checkpoint = resumable(controller)
    controller.ledger.checkpointed(2)
    checkpoint.rename(lost := checkpoint.with_name("elsewhere"))
    with pytest.raises(RunFailed, match="step_2 is missing: without it the run would continue from the beginning"):
        go_back(controller)
    assert controller.ledger.steps() == len(read_metrics(controller.telemetry.metrics.path)) == 2
    lost.rename(checkpoint.with_name("lost_step_2"))
    controller.groups = Mock()
    go_back(controller)
    assert controller.ledger.steps() == controller.ledger.known().checkpoint == 0
    go_back(controller)


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
                go_back(controller)
        assert len(read_metrics(metrics)) == 2
        controller.checkpoints.lost(2).mkdir()
    controller.groups = Mock()
    go_back(controller)
    assert (controller.ledger.known(), read_metrics(metrics)) == (KnownSteps(0, 0), [])


def test_a_run_that_was_killed_while_it_began_again_does_so(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(resumable(controller))
    controller.groups = Mock()
    monkeypatch.setattr(controller.ledger, "rewind", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        go_back(controller)
    monkeypatch.undo()
    go_back(controller)
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
    monkeypatch.setattr("streamrl.controller.resumption.SEEN_S", -1.0)
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
        go_back(controller)
    assert controller.ledger.steps() == 11
    lost.rename(checkpoint)  # any one shows that their folder is there
    controller.groups = Mock()
    go_back(controller)
    assert controller.ledger.steps() == controller.ledger.known().checkpoint == 2


def test_a_run_with_more_metrics_than_others_read_at_once_goes_on(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumable(controller)
    controller.telemetry.metrics.append(make_row(3))
    monkeypatch.setattr(jsonl, "LARGEST_ROWS", 100)
    before = controller.telemetry
    controller.telemetry = Telemetry(before.context, before.hub, before.lengths)
    go_back(controller)
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
    go_back(controller)
    assert [line.partition(" of the 2 steps")[0] for line in caplog.messages] == {
        "": [],
        layout.LEDGER: [f"{controller.ledger.path} knows 1"],
        layout.METRICS: [f"{controller.telemetry.metrics.path} lacks 1"],
    }[lost]
