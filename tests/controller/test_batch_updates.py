"""Several optimizer updates on one batch: each pass trains every sample once, on what its generator said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from streamrl.config.run import RunConfig
from streamrl.controller.length_predictor import StepLengths
from streamrl.controller.refused_steps import RefusedSteps
from streamrl.controller.step_batch import StepBatch
from streamrl.controller.step_metrics import step_metrics
from streamrl.controller.step_times import Interval, Traffic
from streamrl.protocol.controller_trainer import Refusal, StepDone
from streamrl.rollouts.kept_micro_batches import KeptMicroBatches
from streamrl.rollouts.length_audit import LengthAudit
from streamrl.rollouts.rollout_store import RolloutStore
from tests.controller.test_pool_and_batch import taken

REWARDS = {"a": [0.0, 1.0], "b": [1.0, 0.0], "c": [0.0, 4.0], "d": [1.0, 1.0]}
"""The last group is flat: it counts in its part's normalizer, and is not sent."""
STATS = {"tokens": 5.0, "ratio_sum": 5.0, "weight_sum": 5.0, "weight_sq_sum": 5.0} | {
    "seq_weight_sum": 2.0,
    "seq_weight_sq_sum": 2.0,
    "sequences": 2.0,
}


def batch_of(epochs: int, parts: int, seed: int = 0, **algorithm: Any) -> StepBatch:
    values = {
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 2, "epochs": epochs, "mini_batches": parts},
        "schedule": {"name": "sync"},
        "algorithm": {"name": "grpo", "aggregation": "token"} | algorithm,
        "seed": seed,
    }
    return taken(RunConfig.model_validate(values), REWARDS)


def send(batch: StepBatch) -> list[tuple[str, tuple[float, ...], float]]:
    """Train one update; (sample id, log-probabilities, advantage) of what was sent, in its order."""
    found = []
    while (micro := batch.next_micro_batch(8, 2)) is not None:
        found += [
            (one.sample_id, tuple(one.logprobs.tolist()), one.advantage)
            for share in micro[0]
            for group in share
            for one in group.sequences
        ]
        batch.micro_batch_done([{"tokens": 5.0, "ratio_sum": 5.0} for _ in micro[0]])
    assert batch.trained
    return found


def updates(batch: StepBatch) -> list[list[tuple[str, tuple[float, ...], float]]]:
    found = [send(batch)]
    while batch.next_update():
        assert not batch.trained
        found.append(send(batch))
    return found


@pytest.mark.parametrize(("epochs", "parts"), [(3, 1), (1, 2), (3, 2), (2, 4)])
def test_every_pass_trains_each_sample_once_with_its_own_log_probabilities(epochs: int, parts: int) -> None:
    once = sorted(send(batch_of(1, 1)))
    assert len(once) == 6
    batch = batch_of(epochs, parts)
    every = updates(batch)
    assert len(batch.earlier_stats) + len(batch.stats) == 2 * batch.micro_batches  # of two workers
    assert len(every) == epochs * parts
    for epoch in range(epochs):
        assert sorted(one for update in every[epoch * parts : (epoch + 1) * parts] for one in update) == once


@pytest.mark.parametrize(("epochs", "parts"), [(2, 1), (1, 2)])
def test_the_mismatch_of_a_step_is_judged_by_its_first_update_alone(epochs: int, parts: int) -> None:
    def warning(*mismatches: float) -> str | None:
        batch = batch_of(epochs, parts)
        for number, mismatch in enumerate(mismatches):
            while batch.next_micro_batch(8, 1) is not None:
                batch.micro_batch_done([STATS | {"mismatch_sum": mismatch * STATS["tokens"]}])
            if number == 0:
                assert batch.next_update()
                batch = batch.without({batch.of_update[0].group_id})  # refused, and tried again
        times = Interval(0.0, 10.0, (), (), {"a": ()}, {"a": ()}, (), {"a": (0.0, 10.0)})
        result = StepDone(rank=0, started=0.0, finished=1.0, grad_norm=0.3, learning_rate=1e-3, skipped=False)
        few = *(batch, times, result, Traffic(), 0, None), *(StepLengths(None, None), LengthAudit(8).end_step(1))
        return step_metrics(*few, mismatch_bound=0.001).mismatch_warning

    assert warning(1e-5, 0.1) is None  # the policy has moved by the step's own update
    assert warning(0.1, 1e-5) is not None


def test_the_parts_of_a_pass_share_its_normalizer_whatever_has_a_gradient() -> None:
    whole, batch = batch_of(1, 1).normalizer, batch_of(2, 4)
    normalizers = [batch.normalizer]
    while batch.next_update():
        normalizers.append(batch.normalizer)
    assert sum(normalizers[:4]) == sum(normalizers[4:]) == whole
    assert batch.earlier_normalizer + batch.normalizer == 2 * whole


def test_the_order_is_another_in_each_pass_and_step_and_the_same_after_a_resume() -> None:
    def orders(batch: StepBatch) -> list[list[str]]:
        return [[one[0] for one in update] for update in updates(batch)]

    first = orders(batch_of(8, 1))
    assert first == orders(batch_of(8, 1))
    assert len({tuple(order) for order in first}) > 2
    assert first[1:] != orders(batch_of(8, 1, seed=1))[1:]
    later = batch_of(8, 1)
    later.step = 2
    assert first[1:] != orders(later)[1:]


def test_progress_counts_the_samples_of_the_first_pass() -> None:
    batch = batch_of(2, 2)
    assert batch.samples_trained == 2  # of the flat group
    seen = []
    while True:
        send(batch)
        seen.append(batch.samples_trained)
        if not batch.next_update():
            break
    assert 2 < seen[0] < 8
    assert seen[1:] == [8, 8, 8]


def test_a_refused_update_is_tried_again_without_its_group_and_the_passes_go_on(tmp_path: Path) -> None:
    batch = batch_of(2, 2)
    send(batch)
    assert batch.next_update()
    second = {one[0].partition(".")[0] for one in send(batch)}
    assert len(second) == 2
    bad = min(second)
    steps = RefusedSteps(KeptMicroBatches(tmp_path), 3)
    steps.refused(batch, Refusal("loss", "micro-batch 1"))
    while steps.examining:
        here = {group.group_id for share in steps.next() for group in share}
        batch = steps.examined(batch, [{bad: Refusal("loss", "the group")} if bad in here else {}])
    assert batch.update == 1 and batch.earlier_stats and not batch.given_up
    rest = [sample for update in updates(batch) for sample, *_ in update]
    expected = {f"{name}.{n}": 1 + (name in second) for name in set("abc") - {bad} for n in range(2)}
    assert {sample: rest.count(sample) for sample in rest} == expected


@pytest.mark.parametrize("name", ["grpo", "reinforce_pp"])
def test_a_later_update_without_a_group_trains_on_the_advantages_of_the_first(name: str) -> None:
    batch = batch_of(2, 1, name=name)
    first = {sample: advantage for sample, _, advantage in send(batch)}
    of_groups = {key: dict(group.advantages) for key, group in batch.groups.items()}
    assert batch.next_update()
    again = batch.without({"c"})
    assert {sample: advantage for sample, _, advantage in send(again)} == {
        sample: advantage for sample, advantage in first.items() if not sample.startswith("c")
    }
    assert {group.group_id: group.advantages for group in again.groups_trained} == of_groups
    assert again.no_gradient == batch.no_gradient
    retried = batch_of(2, 1, name=name).without({"c"})  # of the first update: a batch that never had the group
    fewer = {sample: advantage for sample, _, advantage in send(retried)}
    assert (fewer == {sample: first[sample] for sample in fewer}) == (name == "grpo")


def test_a_later_update_without_a_group_is_not_whitened_anew() -> None:
    def of(batch: StepBatch) -> dict[str, list[float]]:
        rows = [row for pieces in batch.pieces.values() for group in pieces for row in group.sequences]
        return {row.sample_id: row.estimates[:, 0].tolist() for row in rows if row.estimates is not None}

    batch, rng = batch_of(2, 1, name="ppo", critic={}, whiten_advantages=True), np.random.default_rng(0)
    while (shares := batch.estimation.next(24, 1)) is not None:
        tokens = sum(group.loss_tokens for group in shares[0])
        batch.estimated([rng.normal(size=(tokens, 3)).astype(np.float32)])
    first = of(batch)
    assert of(batch.without({"a"})) != {key: values for key, values in first.items() if not key.startswith("a")}
    send(batch)
    assert batch.next_update()
    again = batch.without({"a"})
    assert of(again) == {key: values for key, values in first.items() if not key.startswith("a")}
    assert not again.awaits_estimates and len(send(again)) == 6


def test_a_group_that_an_earlier_update_has_trained_is_recorded_as_trained() -> None:
    batch = batch_of(2, 2)
    assert [one.group_id for one in batch.without({"a"}).groups_never_trained] == ["a"]
    send(batch)
    earlier = {group.group_id for group in batch.of_update}
    assert batch.next_update()
    batch = batch.without({"b"})
    send(batch)
    assert batch.next_update()
    every, used = set(REWARDS), {"b"} & earlier
    assert {one.group_id for one in batch.groups_trained} == every - {"b"} | used
    assert {one.group_id for one in batch.groups_never_trained} == {"b"} - used
    later = min(set(batch.groups) - {"d"})
    batch = batch.without({later})  # in the second pass all others have been trained
    assert {one.group_id for one in batch.groups_trained} == every - {"b"} | used
    assert [group.group_id for group in batch.not_finite] == ["b", later]


def test_each_update_of_a_step_that_is_refused_is_tried_again_and_the_step_counts_once(tmp_path: Path) -> None:
    batch, steps = batch_of(3, 1), RefusedSteps(KeptMicroBatches(tmp_path), 2)
    for update, bad in enumerate("ab"):
        send(batch)
        steps.refused(batch, Refusal("loss", "micro-batch 1"))
        assert steps.examining and not batch.given_up
        while steps.examining:
            here = {group.group_id for share in steps.next() for group in share}
            batch = steps.examined(batch, [{bad: Refusal("loss", "the group")} if bad in here else {}])
        assert batch.update == update and not batch.given_up
        assert {sample for sample, *_ in send(batch)}.isdisjoint({"a.0", f"{bad}.0"})
        assert batch.next_update()
    assert steps.count == 1 and [group.group_id for group in batch.not_finite] == ["a", "b"]
    assert batch.refusal is not None and "group a" in batch.refusal and "group b" in batch.refusal


def test_a_skipped_update_ends_the_step() -> None:
    batch = batch_of(4, 1, max_importance_ratio=1.5)
    send(batch)
    assert batch.next_update()
    send(batch)
    batch.stats[0]["ratio_sum"] = 1e6
    assert batch.off_policy and not batch.next_update()
    batch = batch_of(4, 1)
    send(batch)
    batch.given_up = True
    assert not batch.next_update()


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_critics_trainer_gets_rewards_which_are_recorded_as_no_advantages(epochs: int, tmp_path: Path) -> None:
    batch = batch_of(epochs, 1, name="ppo", critic={})
    rewards = {one.sample.sample_id: one.reward for group in batch.groups.values() for one in group.members()}
    sent = {row.sample_id: row.advantage for pieces in batch.pieces.values() for one in pieces for row in one.sequences}
    assert sent == rewards and len(set(rewards.values())) > 1
    rows = pq.read_table(RolloutStore(tmp_path).write(1, list(batch.groups.values()))).to_pylist()
    assert {row["sample_id"]: (row["reward"], row["advantage"]) for row in rows} == {
        sample: (reward, None) for sample, reward in rewards.items()
    }
    assert bool(batch.held_back) == batch.awaits_estimates == (epochs > 1)
