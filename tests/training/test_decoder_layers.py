"""Each family's decoder layers are found and sharded, whatever the family calls their list."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BloomConfig,
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MptConfig,
    OpenAIGPTConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
    SiglipVisionConfig,
)

from streamrl.errors import RunFailed
from streamrl.training.decoder_layers import decoder_layers
from streamrl.training.learner import Division, _fully_shard
from streamrl.training.packing_proof import prove, small_model
from streamrl.training.policy_model import load_policy
from streamrl.training.trainer import Trainer
from tests.training.conftest import random_groups, run_config
from tests.training.trained import CPU, PPO, full

SMALL = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64}
SEES = Gemma3Config(  # the other list is longer
    text_config=Gemma3TextConfig(**SMALL, intermediate_size=64, head_dim=16).to_dict(),
    vision_config=SiglipVisionConfig(num_hidden_layers=5, hidden_size=64, num_attention_heads=2).to_dict(),
)
FAMILIES: list[tuple[PretrainedConfig, str]] = [
    (LlamaConfig(**SMALL, intermediate_size=64), "LlamaDecoderLayer"),
    (Qwen3MoeConfig(**SMALL, num_experts=4), "Qwen3MoeDecoderLayer"),
    (GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=64), "GPT2Block"),
    (OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=32), "OPTDecoderLayer"),
    (MptConfig(n_layers=3, d_model=32, n_heads=2, vocab_size=64), "MptBlock"),
    (SEES, "Gemma3DecoderLayer"),
]


@pytest.mark.parametrize("kind", [AutoModelForCausalLM, AutoModel], ids=["policy", "critic's trunk"])
@pytest.mark.parametrize(("config", "layer"), FAMILIES, ids=lambda one: one if isinstance(one, str) else "")
def test_the_decoder_layers_are_found(config: PretrainedConfig, layer: str, kind: type[AutoModel]) -> None:
    with torch.device("meta"):
        model = kind.from_config(config)
    assert [type(one).__name__ for one in decoder_layers(model)] == 3 * [layer]


def test_lists_beside_and_in_the_layers_are_not_taken_for_them() -> None:
    model = AutoModel.from_config(GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=64))
    layers = model.h
    del model.h
    model.norms = torch.nn.ModuleList(torch.nn.LayerNorm(32) for _ in range(9))
    model.h = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.ModuleList([layer])) for layer in layers)
    assert decoder_layers(model) is model.h
    model.h = torch.nn.ModuleList([torch.nn.Sequential(layers)])  # all weights are in the inner list, too
    assert decoder_layers(model) is model.h


def test_a_model_without_a_list_is_refused() -> None:
    model = AutoModel.from_config(LlamaConfig(**SMALL))
    model.layers = torch.nn.Linear(2, 2)
    with pytest.raises(RunFailed, match=r"cannot divide LlamaModel: it has no list .* expected model.dtype: float32"):
        decoder_layers(model)


@pytest.mark.parametrize("config", [GPT2Config(), OPTConfig(word_embed_proj_dim=128)], ids=["GPT-2", "OPT"])
def test_layers_of_other_names_are_sharded_and_trained_in_bf16(
    tmp_path: Path, one_rank: None, config: PretrainedConfig
) -> None:
    small_model(config).save_pretrained(tmp_path)
    model = {"path": str(tmp_path), "max_context": 256, "dtype": "bfloat16"}
    trainer = Trainer(run_config(tmp_path, model=model, algorithm=PPO), str(tmp_path), CPU)
    assert trainer.critic is not None
    for one in (trainer.policy, trainer.critic.model):
        assert one.copies is not None
    shared = load_policy(str(tmp_path))  # by several ranks
    _fully_shard(shared, trainer.run, CPU, Division())
    units = [module for module in shared.modules() if isinstance(module, FSDPModule)]
    assert units == [shared, *decoder_layers(shared.model)]
    before = {name: weight.clone() for name, weight in trainer.weights()}
    trainer.accumulate(random_groups(2), is_last=True)
    assert all(float(full(p.grad).norm()) > 0 for layer in decoder_layers(trainer.policy.model) for p in weights(layer))
    assert trainer.step(0, 10.0).refused is None
    assert any(not torch.equal(before[name], weight) for name, weight in trainer.weights())


def weights(layer: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in layer.parameters() if parameter.ndim > 1]


@pytest.mark.parametrize("config", [GPT2Config(), OpenAIGPTConfig(), BloomConfig()], ids=["GPT-2", "GPT", "Bloom"])
def test_the_proof_of_packing_names_layers_of_other_names(config: PretrainedConfig) -> None:
    proof = prove(config)
    assert not proof.unproven and not proof.refuted
    computed = [way for way in proof.ways if math.isfinite(way.logprob_error)]
    wrong = [way.differs for way in computed if way.differs]
    assert all(one.startswith("layer 0 (") for one in wrong)
    assert bool(wrong) == (config.model_type != "gpt2")
