"""Ranks that read only their slices of a model have, bit for bit, what they would have of one that is loaded whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig

from streamrl.errors import RunFailed
from streamrl.training.critic import Critic, load_critic
from streamrl.training.learner import Division, shard
from streamrl.training.packing_proof import small_model
from streamrl.training.policy_model import Policy, load_policy
from streamrl.training.sliced_loading import is_empty
from streamrl.training.token_logprobs import LogitTransform
from streamrl.verify.families import FAMILIES
from tests.ports import free_port
from tests.tiny_model import save_tiny_model
from tests.training.conftest import run_config, run_ranks
from tests.training.trained import CPU


def _equal(ours: Policy | Critic, theirs: Policy | Critic) -> None:
    parameters = dict(theirs.named_parameters())
    assert list(parameters) == list(dict(ours.named_parameters()))  # tied ones come once
    for name, one in ours.named_parameters():
        other = parameters[name]
        assert isinstance(one, DTensor) and isinstance(other, DTensor)
        assert (one.placements, one.dtype, one.shape, one.stride(), one.requires_grad) == (
            other.placements,
            other.dtype,
            other.shape,
            other.stride(),
            other.requires_grad,
        ), name
        assert torch.equal(one.to_local(), other.to_local()), name
    buffers = dict(theirs.named_buffers())
    assert buffers and list(buffers) == list(dict(ours.named_buffers()))
    for name, one in ours.named_buffers():
        assert one.dtype == buffers[name].dtype and torch.equal(one, buffers[name]), name
    assert ours.model.config.to_dict() == theirs.model.config.to_dict()
    if ours.model.can_generate():
        assert ours.model.generation_config.to_dict() == theirs.model.generation_config.to_dict()
    assert [one.training for one in ours.modules()] == [one.training for one in theirs.modules()]


def _rank(rank: int, ranks: int, port: int, models: list[str], division: Division) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    for path in models:
        run = run_config(Path(path), model={"path": path, "dtype": "bfloat16"})
        for trainable in (True, False):
            policy = load_policy(path, recomputation=trainable, shards=division.shards)
            assert is_empty(policy.model)
            policy = shard(policy, run, CPU, trainable, division)
            _equal(policy, shard(load_policy(path, recomputation=trainable), run, CPU, trainable, division))
        critic = load_critic(path, shards=division.shards)
        assert is_empty(critic.model)
        critic = shard(critic, run, CPU, True, division)
        _equal(critic, shard(load_critic(path), run, CPU, True, division))
    unknown = load_policy(models[0], shards=division.shards)
    unknown.transform = LogitTransform(2.0)
    with pytest.raises(RunFailed, match="is not known to the trainer"):
        shard(unknown, run_config(Path(models[0])), CPU, True, division)
    dist.destroy_process_group()


def _save(family: str, folder: Path) -> str:
    """Write a small model in bf16, in several files."""
    model = small_model(FAMILIES[family](), seed=0).to(torch.bfloat16)
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.95, eos_token_id=[1, 2])
    model.save_pretrained(folder / family, max_shard_size="60KB")
    assert len(list((folder / family).glob("*.safetensors"))) > 1
    return str(folder / family)


@pytest.mark.parametrize(
    ("ranks", "division", "families"),
    [
        # rotary frequencies, scaled embeddings and a tied head, fused experts, the routers' biases
        (2, Division(), ["Llama", "Qwen2", "Gemma 3", "Qwen3-MoE", "gpt-oss", "DeepSeek-V3"]),
        (3, Division(), ["Llama", "Qwen3-MoE"]),  # shards of different sizes
        (4, Division(copies=2), ["Llama"]),
        (4, Division(layers=2), ["Llama", "Gemma 2"]),
    ],
)
def test_slices_have_the_bits_of_a_whole_load(
    ranks: int, division: Division, families: list[str], tmp_path: Path
) -> None:
    models = [str(save_tiny_model(tmp_path / "tiny", kv_heads=2)), *(_save(family, tmp_path) for family in families)]
    run_ranks(ranks, _rank, ranks, free_port(), models, division)
