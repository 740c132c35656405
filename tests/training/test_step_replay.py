"""A replayed step shows which group is not finite, and where it begins."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from streamrl.cli.replay import command
from streamrl.config.cluster import ClusterConfig
from streamrl.config.load import save_resolved
from streamrl.rollouts.kept_micro_batches import KeptMicroBatches, KeptStep
from streamrl.rollouts.train_groups import TrainGroup
from streamrl.run_dir import layout
from streamrl.run_dir.checkpoints import CheckpointFolder
from streamrl.training.step_replay import ReplayedGroup, StepReplay
from tests.tiny_model import save_tiny_model
from tests.training.conftest import random_groups, run_config

CLUSTER = {"hardware": "cpu", "sites": {"here": {"trainer": {"threads": 1}, "generation": [{"name": "one"}]}}}


def named(groups: list[TrainGroup]) -> list[TrainGroup]:
    return [
        replace(group, sequences=[replace(s, sample_id=f"{group.group_id}.{n}") for n, s in enumerate(group.sequences)])
        for group in groups
    ]


def kept_step(groups: list[TrainGroup]) -> KeptStep:
    return KeptStep(1, 20.0, "loss of micro-batch 2 is not finite", {"g1": "loss"}, [[groups[:1], []], [groups[1:]]])


def with_infinite_reward(group: TrainGroup) -> TrainGroup:
    return replace(group, sequences=[replace(group.sequences[0], advantage=math.inf), *group.sequences[1:]])


def test_an_infinite_advantage_is_named_with_its_sample(tiny_model: Path, one_rank: None, tmp_path: Path) -> None:
    first, second, third = named(random_groups(3))
    replay = StepReplay(run_config(tiny_model), str(tiny_model), CheckpointFolder(tmp_path), 1)
    found = list(replay.groups(kept_step([first, with_infinite_reward(second), third])))
    assert replay.checkpoint is None and replay.bad_weight() is None
    assert [(one.micro_batch, one.group_id, one.finite) for one in found] == [
        (1, "g0", True),
        (2, "g1", False),
        (2, "g2", True),
    ]
    assert found[1].inputs == "advantage of g1.0 is inf" and not math.isfinite(found[1].loss)
    assert found[0].grad_norm > 0


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_the_first_module_that_is_not_finite_is_named(
    tiny_model: Path, one_rank: None, tmp_path: Path, backward: bool
) -> None:
    replay = StepReplay(run_config(tiny_model), str(tiny_model), CheckpointFolder(tmp_path), 1)
    layer = replay.trainer.policy.model.base_model.layers[0].mlp.down_proj

    def break_it(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor | None:
        if not backward:
            return output * math.nan
        output.register_hook(lambda gradient: gradient * math.nan)
        return None

    layer.register_forward_hook(break_it)
    found: list[ReplayedGroup] = list(replay.groups(kept_step(named(random_groups(2)))))
    kind = "gradient of the output" if backward else "output"
    expected = "mlp.act_fn" if backward else "mlp.down_proj"
    assert all(one.where.startswith(kind + " of model.model.layers.0.") for one in found), found
    if not backward:
        assert expected in found[0].where
    assert all(math.isfinite(one.loss) == backward and not math.isfinite(one.grad_norm) for one in found)


def with_checkpoint(folder: Path, replay: StepReplay) -> CheckpointFolder:
    checkpoints = CheckpointFolder(folder / "checkpoints")
    checkpoints.begin(1)
    replay.trainer.save(checkpoints.partial(1))
    (checkpoints.partial(1) / "state.json").write_text("{}")
    checkpoints.commit(1, 2)
    return checkpoints


def test_a_step_after_a_checkpoint_is_replayed_though_the_models_files_lack_weights(
    one_rank: None, tmp_path: Path
) -> None:
    model = save_tiny_model(tmp_path / "model")
    first = StepReplay(run_config(model), str(model), CheckpointFolder(tmp_path / "none"), 1)
    checkpoints = with_checkpoint(tmp_path, first)
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    again = StepReplay(run_config(model), str(model), checkpoints, 2)
    for ours, theirs in zip(again.trainer.policy.parameters(), first.trainer.policy.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_critic_of_another_size_is_replayed_as_it_was_trained(
    tiny_model: Path, one_rank: None, tmp_path: Path
) -> None:
    own = save_tiny_model(tmp_path / "critic")
    small = LlamaConfig.from_pretrained(own, num_hidden_layers=1, hidden_size=32)
    LlamaForCausalLM(small).save_pretrained(own)
    run = run_config(tiny_model, algorithm={"name": "ppo", "critic": {"path": str(own)}})
    first = StepReplay(run, str(tiny_model), CheckpointFolder(tmp_path / "none"), 1)
    checkpoints = with_checkpoint(tmp_path, first)
    for replay in (first, StepReplay(run, str(tiny_model), checkpoints, 2)):
        assert replay.trainer.critic is not None and len(replay.trainer.critic.model.model.layers) == 1
    assert replay.checkpoint == 1 and all(one.finite for one in replay.groups(kept_step(named(random_groups(2)))))


def test_a_gradient_of_the_critic_alone_makes_a_group_not_finite(
    tiny_model: Path, one_rank: None, tmp_path: Path
) -> None:
    run = run_config(tiny_model, algorithm={"name": "ppo", "critic": {}})
    replay = StepReplay(run, str(tiny_model), CheckpointFolder(tmp_path), 1)
    kept = kept_step(named(random_groups(2)))
    assert replay.trainer.critic is not None
    good = list(replay.groups(kept))
    assert all(one.finite and one.critic_grad_norm for one in good)
    replay.trainer.critic.model.head.weight.register_hook(lambda gradient: gradient * math.nan)
    bad = list(replay.groups(kept))
    assert [(one.finite, one.where, one.grad_norm) for one in bad] == [(False, "", one.grad_norm) for one in good]


def test_the_command_prints_every_group_and_refuses_a_step_without_micro_batches(
    tiny_model: Path, one_rank: None, tmp_path: Path
) -> None:
    save_resolved(tmp_path, ClusterConfig.model_validate(CLUSTER), run_config(tiny_model))
    first, second = named(random_groups(2))
    KeptMicroBatches(tmp_path / layout.REFUSED).write(kept_step([first, with_infinite_reward(second)]))
    result = CliRunner(env={"COLUMNS": "160"}).invoke(command, [str(tmp_path), "1"], catch_exceptions=False)
    assert result.exit_code == 0
    for part in (
        "was refused: loss of micro-batch 2",
        "the initial model",
        "advantage of g1.0 is inf",
        "1 of 2 groups",
    ):
        assert part in result.output, result.output
    missing = CliRunner().invoke(command, [str(tmp_path), "7"])
    assert "step 7 has no micro-batches to replay" in str(missing.exception)


def test_a_cause_that_others_have_written_moves_no_cursor(tmp_path: Path) -> None:
    save_resolved(tmp_path, ClusterConfig.model_validate(CLUSTER), run_config(tmp_path / "gone"))
    kept = replace(kept_step(named(random_groups(1))), cause="loss \x1b[2J")
    KeptMicroBatches(tmp_path / layout.REFUSED).write(kept)
    assert "was refused: loss ?[2J" in CliRunner().invoke(command, [str(tmp_path), "1"]).output
