"""Episodes of several rows: one ratio, weight and length per trajectory, against a loop over trajectories in torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from streamrl.config.algorithm import Algorithm
from streamrl.rollouts.kept_micro_batches import KeptMicroBatches, KeptStep
from streamrl.rollouts.micro_batch import split_into_micro_batches
from streamrl.rollouts.micro_batch_wire import from_wire, to_wire
from streamrl.rollouts.rank_shares import deal
from streamrl.rollouts.train_groups import TrainGroup, train_groups
from streamrl.rollouts.trajectory import NOT_SAMPLED, RowExtent, Trajectory
from streamrl.rollouts.types import Group, Sample, Scored
from streamrl.training.packing import pack
from streamrl.training.trainer import Trainer
from tests.rollouts.test_rollouts import make_sample
from tests.training.conftest import relative_error, run_config
from tests.training.trained import CPU, accumulated_gradient

SHAPES = [[3], [2, 4], [5, 1, 3], [1], [4, 2]]
"""Sampled tokens of each row of each episode."""


def episode(number: int, sampled: list[int], rng: np.random.Generator) -> Sample:
    """An episode; its second row is a fork of the first one, whose prompt it begins with."""
    tokens, versions, rows = list[int](), list[int](), list[RowExtent]()
    prompt = [1, 2, number]
    for place, count in enumerate(sampled):
        own = [*prompt, *rng.integers(3, 200, 2 * place).tolist()] if place < 2 else rng.integers(3, 200, 4).tolist()
        row, marks = list(own), [False] * len(own)
        for turn in range(count):
            row.append(int(rng.integers(3, 200)))
            marks.append(True)
            if turn % 2:  # a tool's result
                row += rng.integers(3, 200, 2).tolist()
                marks += [False, False]
        tokens += row
        versions += [0 if mark else NOT_SAMPLED for mark in marks]
        rows.append(RowExtent(tokens=len(row), prompt=len(own)))
    mask = np.asarray(versions) == 0
    return replace(
        make_sample(f"g.{number}", length=len(tokens)),
        completion_tokens=np.asarray(tokens, np.int32),
        token_versions=np.asarray(versions, np.int32),
        logprobs=np.where(mask, rng.normal(-5.55, 0.15, len(tokens)), 0).astype(np.float32),
        trajectory=Trajectory(rows=rows, reward=1.0, messages=[], steps=[]),
    )


def agent_group() -> Group:
    rng = np.random.default_rng(3)
    group = Group("g", 1, 0, "t/0", "t", 0, "p", np.arange(3, dtype=np.int32), len(SHAPES), agent=True)
    for number, shape in enumerate(SHAPES):
        sample = episode(number, shape, rng)
        group.scored[sample.sample_id] = Scored(sample, 1.0, None, 5.0)
        group.advantages[sample.sample_id] = [0.9, -1.1, 0.7, 1.3, -0.4][number]
    return group


def looped(algorithm: Algorithm, group: Group, model: Any) -> torch.Tensor:
    """The summed loss, one trajectory after the other and row by row."""
    total = torch.zeros(())
    for member in group.members():
        sample, start = member.sample, 0
        new, old = [], []
        assert sample.trajectory is not None
        for row in sample.trajectory.rows:
            at = slice(start, start + row.tokens)
            ids = torch.from_numpy(sample.completion_tokens[at].astype(np.int64))
            logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1].float(), -1)
            marks = torch.from_numpy(sample.token_versions[at] != NOT_SAMPLED)
            new.append(logprobs[torch.arange(len(ids) - 1), ids[1:]][marks[1:]])
            old.append(torch.from_numpy(sample.logprobs[at])[marks])
            start += row.tokens
        logp, gap = torch.cat(new), torch.cat(new) - torch.cat(old)
        advantage = group.advantages[sample.sample_id]
        match algorithm.surrogate:
            case "sequence_clip":
                low, high = algorithm.clip
                ratio = gap.mean().exp()
                loss = -torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage).expand(len(gap))
            case "clip":
                low, high = algorithm.clip
                loss = -torch.min(gap.exp() * advantage, gap.exp().clamp(1 - low, 1 + high) * advantage)
            case _:
                loss = -advantage * logp
        weight = torch.ones(())
        if algorithm.off_policy.correction == "truncate":
            logs = gap.detach()
            weight = (logs.sum() if algorithm.off_policy.level == "sequence" else logs.mean()).exp()
            weight = weight.clamp(max=algorithm.off_policy.high)
        total = total + weight * loss.sum() / (len(gap) if algorithm.aggregation == "sequence" else 1)
    return total


ALGORITHMS: list[dict[str, Any]] = [
    {"name": "gspo", "clip_low": 0.02, "clip_high": 0.03, "off_policy": {"ratio_to": "generator"}},
    {"name": "rloo", "off_policy": {"correction": "truncate", "level": "sequence", "high": 1.2}},
    {"name": "rloo", "off_policy": {"correction": "truncate", "level": "geometric", "high": 1.02}},
    {"name": "grpo", "aggregation": "sequence", "off_policy": {"ratio_to": "generator"}},
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=["gspo", "sequence", "geometric", "lengths"])
def test_ratios_weights_and_lengths_are_of_whole_trajectories_however_they_are_cut(
    tiny_model: Path, one_rank: None, algorithm: dict[str, Any]
) -> None:
    config, group = run_config(tiny_model, algorithm=algorithm), agent_group()
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    looped(config.algorithm, group, model).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    groups = train_groups(group, None, config.algorithm.needs_trajectories)
    trainer = Trainer(config, str(tiny_model), CPU)

    def gradient(parts: list[list[TrainGroup]]) -> torch.Tensor:
        return accumulated_gradient(trainer, [from_wire(*to_wire(part)) for part in parts])

    assert relative_error(gradient([groups]), expected) < 1e-5
    cut = split_into_micro_batches(groups, 12)
    assert len(cut) > 3 and relative_error(gradient(cut), expected) < 1e-5
    shares, rest = deal(groups, 10_000, 3)
    assert all(shares) and not rest and relative_error(gradient(shares), expected) < 1e-5
    separate = run_config(tiny_model, algorithm=algorithm, batch={"packing": "separate", "micro_batch_tokens": 64})
    trainer = Trainer(separate, str(tiny_model), CPU)
    assert relative_error(gradient([groups]), expected) < 1e-5


def test_rows_that_need_each_other_are_never_cut_apart_and_others_are() -> None:
    group = agent_group()
    together = train_groups(group, None, trajectories=True)
    names = [one.trajectory for one in together]
    assert names == ["", "", "g.1", "g.2", "g.2", "g.4"]  # a fork shares its prompt, the third row shares none
    for most in (1, 12, 20, 40):
        for parts in (split_into_micro_batches(together, most), deal(together, most, 2)[0], deal(together, most, 9)[0]):
            for name in ("g.1", "g.2", "g.4"):
                assert sum(name in [one.trajectory for one in part] for part in parts) <= 1
        batches = split_into_micro_batches(together, most)
        assert [one for batch in batches for one in batch] == together or most < 12
        assert sum(one.loss_tokens for batch in batches for one in batch) == sum(map(sum, SHAPES))
    apart = train_groups(group)
    assert {one.trajectory for one in apart} == {""}
    assert len(split_into_micro_batches(apart, 1)) == sum(map(len, SHAPES))  # a row each


def test_a_packed_row_numbers_trajectories_and_counts_their_tokens() -> None:
    group = agent_group()
    batch = pack(train_groups(group, None, trajectories=True))
    assert batch.sequences == len(SHAPES) and int(batch.row_ids.max()) + 1 == sum(map(len, SHAPES))
    for number in range(batch.sequences):
        own = batch.sequence_ids == number
        assert set(batch.sequence_tokens[own].tolist()) == {int(own.sum())}
    rows = pack(train_groups(group))
    assert rows.sequences == sum(map(len, SHAPES)) and torch.equal(rows.row_ids, rows.sequence_ids)
    lengths = sorted(set(zip(rows.row_ids.tolist(), rows.sequence_tokens.tolist(), strict=True)))
    assert sorted(tokens for _, tokens in lengths) == sorted(sum(shape) for shape in SHAPES for _ in shape)


def test_a_refused_step_keeps_what_belongs_together_and_older_files_have_no_such_rows(tmp_path: Path) -> None:
    group = agent_group()
    rows = [row.sample_id for one in train_groups(group) for row in one.sequences]
    estimates = {rows[0]: np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32)}
    kept, groups = KeptMicroBatches(tmp_path), train_groups(group, None, trajectories=True, estimates=estimates)
    path = kept.write(KeptStep(3, 1.0, "a loss", {}, [[groups]]))
    (back,) = kept.read(3).micro_batches[0]
    assert [one.trajectory for one in back] == [one.trajectory for one in groups]
    counted = [seq.trajectory_tokens for one in back for seq in one.sequences]
    assert counted == [seq.trajectory_tokens for one in groups for seq in one.sequences] and {None, 9} <= set(counted)
    found = {row.sample_id: row.estimates for one in back for row in one.sequences if row.estimates is not None}
    assert [(row, one.tolist()) for row, one in found.items()] == [(rows[0], estimates[rows[0]].tolist())]
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["trajectory", "trajectory_tokens", "estimates"]), path)
    (older,) = kept.read(3).micro_batches[0]
    assert {one.trajectory for one in older} == {""}
    assert {seq.trajectory_tokens for one in older for seq in one.sequences} == {None}
