"""A lone rank's copies of the weights give the bits that FSDP2 gives."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import Gemma2Config, GPT2Config, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from streamrl.config.run import RunConfig
from streamrl.training import learner
from streamrl.training.learner import Division, Learner, copy_weights, reshard
from streamrl.training.packing import pack
from streamrl.training.packing_proof import small_model
from streamrl.training.policy_model import Policy, load_policy
from streamrl.weights.finite import whole
from tests.training.conftest import random_groups
from tests.training.trained import CPU

CONFIGS: dict[str, PretrainedConfig] = {
    "tied": Qwen2Config(tie_word_embeddings=True),
    "untied": Qwen2Config(tie_word_embeddings=False),
    "scaled embeddings, soft caps": Gemma2Config(),
    "experts": Qwen3MoeConfig(),
    "positions are weights": GPT2Config(),
}


def config(recomputation: bool | str = False) -> RunConfig:
    options = {"gradient_checkpointing": recomputation, "weight_decay": 0.1}
    return RunConfig.model_validate({"model": {"path": "m", "dtype": "bfloat16"}, "optimizer": options})


def saved(shape: PretrainedConfig, folder: Path) -> Path:
    small_model(shape).save_pretrained(folder)
    return folder


def learn(path: Path, run: RunConfig) -> tuple[Learner[Policy], list[torch.Tensor]]:
    """Make two updates of two micro-batches each; return the learner, and all that was computed."""
    one = Learner(load_policy(str(path), run.optimizer.gradient_checkpointing), 1e-2, run, CPU)
    found: list[torch.Tensor] = []
    for update in range(2):
        for micro_batch in range(2):
            batch = pack(random_groups(3, seed=2 * update + micro_batch))
            output = one.model(batch, 0.9)
            found += [output.logprobs.detach(), output.entropy.detach()]
            one.backward((output.logprobs * batch.advantages).sum(), is_last=micro_batch == 1)
        found += [whole(weight.grad).clone() for weight in one.model.parameters() if weight.grad is not None]
        found.append(torch.tensor(one.divide(100.0)))
        one.update(1e-2)
        found += [whole(weight).clone() for weight in one.model.parameters()]
    return one, found


@pytest.mark.parametrize(
    ("family", "recomputation"), [*((name, False) for name in CONFIGS), ("tied", True), ("tied", "selective")]
)
def test_weights_and_gradients_have_the_bits_of_fsdp2(
    family: str, recomputation: bool | str, tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, run = saved(CONFIGS[family], tmp_path), config(recomputation)
    ours, found = learn(path, run)
    assert not any(isinstance(module, FSDPModule) for module in ours.model.modules())

    def with_fsdp(model: Policy, run: RunConfig, device: torch.device, *_about: Any) -> Policy:
        learner._fully_shard(model, run, device, Division())
        return model

    monkeypatch.setattr(learner, "shard", with_fsdp)
    theirs, expected = learn(path, run)
    assert any(isinstance(weight, DTensor) for weight in theirs.model.parameters())
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_between_passes_the_parameters_are_the_weights(tmp_path: Path, one_rank: None) -> None:
    run = config()
    one = Learner(load_policy(str(saved(CONFIGS["tied"], tmp_path))), 1e-2, run, CPU)
    weights = dict(one.model.named_parameters())
    output = one.model(pack(random_groups(2)), 1.0)
    copies = dict(one.model.named_parameters())
    head = one.model.model.get_output_embeddings()
    assert head.weight is one.model.model.get_input_embeddings().weight  # tied copies are one
    assert copies.keys() == weights.keys() and not any(copies[name] is weights[name] for name in weights)
    assert {copy.dtype for copy in copies.values()} == {torch.bfloat16}
    for name, copy in copies.items():
        assert torch.equal(copy, weights[name].bfloat16())
    one.backward(output.logprobs.sum(), is_last=False)
    assert all(copy.grad is None for copy in copies.values())  # it is with the weights
    assert all(weight.grad is not None and weight.grad.dtype == torch.float32 for weight in weights.values())
    assert one.may_idle(is_last=True)  # a rank without work takes the update all the same
    reshard(one.model)
    assert all(parameter is weights[name] for name, parameter in one.model.named_parameters())
    assert all(copy.untyped_storage().nbytes() == 0 for copy in copies.values())
    with torch.no_grad():
        weights["model.model.norm.weight"].fill_(3.0)
        one.model(pack(random_groups(2)), 1.0)
    assert float(one.model.model.model.norm.weight[0]) == 3.0  # the copies are of the current weights


def test_a_frozen_copy_follows_and_keeps_nothing_for_a_backward_pass(tmp_path: Path, one_rank: None) -> None:
    path, run = saved(CONFIGS["untied"], tmp_path), config()
    one = Learner(load_policy(str(path)), 1e-2, run, CPU)
    frozen = learner.shard(load_policy(str(path)), run, CPU, trainable=False)
    batch = pack(random_groups(2))
    assert not frozen(batch, 1.0).logprobs.requires_grad
    with torch.no_grad():
        for weight in one.model.parameters():
            weight.mul_(1.5)
    expected = one.model(batch, 1.0).logprobs.detach()
    assert not torch.equal(frozen(batch, 1.0).logprobs, expected)
    copy_weights(one.model, frozen)
    assert torch.equal(frozen(batch, 1.0).logprobs, expected)


def test_a_model_that_is_gone_leaves_no_copies(tmp_path: Path, one_rank: None) -> None:
    one = learner.shard(load_policy(str(saved(CONFIGS["tied"], tmp_path))), config(), CPU, trainable=True)
    one(pack(random_groups(2)), 1.0)
    copy = weakref.ref(next(one.parameters()))
    del one
    gc.collect()
    assert copy() is None
