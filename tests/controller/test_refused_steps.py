"""What the controller does about a step that the trainer has refused."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from streamrl.controller.refused_steps import RefusedSteps
from streamrl.controller.step_batch import StepBatch
from streamrl.errors import RunFailed, UserError
from streamrl.protocol.controller_trainer import (
    FROM_CONTROLLER,
    FROM_TRAINER,
    Examine,
    ExamineDone,
    Refusal,
    StepDone,
)
from streamrl.protocol.message import MessageReader, Right, body_of, wire
from streamrl.rollouts.kept_micro_batches import KeptMicroBatches, KeptStep
from streamrl.rollouts.micro_batch_wire import from_wire, to_wire
from streamrl.training.trainer import StepResult
from streamrl.transport.endpoint import Speaker
from tests.controller.test_pool_and_batch import config, taken

LOSS = Refusal("loss", "micro-batch 0")


def sent_batch(**algorithm: object) -> StepBatch:
    """A batch of three groups whose micro-batches have all been trained."""
    batch = taken(config(**algorithm), {"a": [0.0, 1.0], "b": [1.0, 0.0], "c": [0.0, 4.0]})
    while (micro := batch.next_micro_batch(30, 2)) is not None:
        batch.micro_batch_done([{"tokens": 5.0, "ratio_sum": 5.0} for _ in micro[0]])
    assert batch.trained
    return batch


def refused(
    folder: Path, batch: StepBatch, found: dict[str, Refusal], limit: int = 3
) -> tuple[RefusedSteps, StepBatch]:
    steps = RefusedSteps(KeptMicroBatches(folder), limit)
    steps.refused(batch, LOSS)
    after, looked_at = batch, []
    while steps.examining:
        shares = steps.next()
        here = {group.group_id for share in shares for group in share}
        looked_at += sorted(here)
        after = steps.examined(batch, [{key: what for key, what in found.items() if key in here}])
    assert sorted(set(looked_at)) == sorted(batch.groups)
    return steps, after


@pytest.mark.parametrize("advantage", ["group", "batch"])
def test_the_second_attempt_is_the_step_of_the_batch_without_the_groups_found(tmp_path: Path, advantage: str) -> None:
    keys = {} if advantage == "group" else {"name": "reinforce_pp"}
    _, again = refused(tmp_path, sent_batch(**keys), {"b": LOSS})
    expected = taken(config(prompts=2, **keys), {"a": [0.0, 1.0], "c": [0.0, 4.0]})
    assert list(again.groups) == ["a", "c"] and [g.group_id for g in again.not_finite] == ["b"]
    assert again.normalizer == expected.normalizer and again.full and not again.given_up
    assert [[s.advantage for s in g.sequences] for g in again.queue] == [
        [s.advantage for s in g.sequences] for g in expected.queue
    ]
    assert (again.stats, again.sent, again.micro_batches, again.trained) == ([], [], 0, False)
    assert again.refusal is not None and "group b (samples b.0, b.1): loss of micro-batch 0" in again.refusal


def test_a_second_refusal_skips_the_step_and_counts_once(tmp_path: Path) -> None:
    steps, again = refused(tmp_path, sent_batch(), {"b": LOSS})
    steps.refused(again, LOSS)
    assert again.given_up and not steps.examining and steps.count == 1
    assert again.refusal is not None and "refused again" in again.refusal


@pytest.mark.parametrize("found", [{}, {"a": LOSS, "b": LOSS, "c": LOSS}], ids=["none", "all"])
def test_a_step_is_skipped_if_no_group_is_the_cause_or_all_are(tmp_path: Path, found: dict[str, Refusal]) -> None:
    batch = sent_batch()
    _, after = refused(tmp_path, batch, found)
    assert after is batch and batch.given_up and batch.trained


def test_the_run_ends_at_the_stated_number_of_refused_steps_and_says_what_it_found(tmp_path: Path) -> None:
    with pytest.raises(RunFailed) as error:
        refused(tmp_path, sent_batch(), {"b": Refusal("gradient", "model.layers.3.weight")}, limit=1)
    for part in ("end_after_refused is 1", "step 1", "group b", "b.0, b.1", "gradient of model.layers.3.weight"):
        assert part in str(error.value)


def test_a_damaged_weight_ends_the_run_at_once(tmp_path: Path) -> None:
    steps = RefusedSteps(KeptMicroBatches(tmp_path), 3)
    with pytest.raises(RunFailed, match=r"step 1: weight model\.norm is not finite, so that no step can be trained"):
        steps.refused(sent_batch(), Refusal("weight", "model.norm"))
    assert KeptMicroBatches(tmp_path).steps() == [1]


def test_a_damaged_weight_ends_the_run_at_the_second_attempt_too(tmp_path: Path) -> None:
    steps, again = refused(tmp_path, sent_batch(), {"b": LOSS})
    with pytest.raises(RunFailed, match=r"step 1: weight model\.norm is not finite, so that no step can be trained"):
        steps.refused(again, Refusal("weight", "model.norm"))


def test_the_micro_batches_of_a_refused_step_are_kept_as_they_were(tmp_path: Path) -> None:
    batch = sent_batch()
    refused(tmp_path, batch, {"b": LOSS})
    kept = KeptMicroBatches(tmp_path).read(1)
    assert (kept.step, kept.normalizer, kept.not_finite) == (1, batch.normalizer, {"b": str(LOSS)})
    for ours, theirs in zip(kept.micro_batches, [shares for shares in batch.sent if any(shares)], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert [g.group_id for g in one] == [g.group_id for g in other]
            for a, b in zip(
                (s for g in one for s in g.sequences), (s for g in other for s in g.sequences), strict=True
            ):
                assert a.completion_tokens.tolist() == b.completion_tokens.tolist()
                assert a.logprobs.tolist() == b.logprobs.tolist()
                assert (a.advantage, a.sample_id) == (b.advantage, b.sample_id) and a.sample_id
    with pytest.raises(UserError, match=r"step 7 has no micro-batches to replay.*kept are those of step 1"):
        KeptMicroBatches(tmp_path).read(7)


def test_a_run_that_goes_back_forgets_the_refused_steps_after_it(tmp_path: Path) -> None:
    kept = KeptMicroBatches(tmp_path)
    for step in (3, 10, 11, 12):
        kept.write(KeptStep(step, 1.0, "loss", {}, []))
    steps = RefusedSteps(kept, 3)
    steps.resume_at(10, 2)
    assert (steps.count, kept.steps()) == (2, [3, 10])


def test_what_the_trainer_finds_travels_to_the_controller() -> None:
    reads = MessageReader({"trainer": Right(FROM_TRAINER)})
    times: dict[str, Any] = {"rank": 0, "started": 1.0, "finished": 2.0}
    result = StepResult(float("nan"), 1e-3, True, LOSS)
    kind, body = wire(StepDone(**times, **asdict(result)))
    done = reads(Speaker("trainer-0", "trainer"), kind, body)
    assert isinstance(done, StepDone) and done.refused == LOSS and done.skipped
    kind, body = wire(ExamineDone(**times, not_finite={"b": LOSS}))
    assert reads(Speaker("trainer-0", "trainer"), kind, body) == ExamineDone(**times, not_finite={"b": LOSS})
    batch = sent_batch()
    share = next(share for shares in batch.sent for share in shares if share)
    body, arrays = to_wire(share)
    kind, body = wire(Examine(**body, reference_given=False))
    order = MessageReader(FROM_CONTROLLER)(Speaker("hub", "hub"), kind, body)
    assert isinstance(order, Examine)
    assert [group.group_id for group in from_wire(body_of(order), arrays)] == [group.group_id for group in share]
