"""Which parts of a model torch compiles, and what they keep for the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen2Config

from scheduler.cost import training_cost
from streamrl.config.run import RunConfig
from streamrl.training.compiled_parts import compile_parts
from streamrl.training.policy_model import Policy


@pytest.mark.parametrize("recomputation", [False, True, "selective"], ids=str)
def test_norms_and_mlps_are_compiled_where_no_single_operation_is_looked_at(recomputation: bool | str) -> None:
    config = Qwen2Config(num_hidden_layers=1, hidden_size=16, intermediate_size=16, vocab_size=8, num_attention_heads=2)
    policy = Policy(AutoModelForCausalLM.from_config(config))
    compile_parts(policy, RunConfig.model_validate({"optimizer": {"gradient_checkpointing": recomputation}}))
    compiled = [name for name, module in policy.model.named_modules() if module._compiled_call_impl is not None]
    layer = "model.layers.0"
    expected = [f"{layer}.mlp", f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", "model.norm"]
    assert compiled == ([] if recomputation == "selective" else expected)
    assert policy.fused


def test_experts_and_layers_that_ranks_share_are_not_compiled() -> None:
    shape = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 8, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    mixture = Policy(AutoModelForCausalLM.from_config(GptOssConfig(**shape, **heads, num_local_experts=2)))
    dense = Policy(AutoModelForCausalLM.from_config(Qwen2Config(**shape, **heads)))
    compile_parts(mixture, RunConfig())
    compile_parts(dense, RunConfig(), layers=2)
    for policy, norms in ((mixture, 3), (dense, 0)):
        kinds = [type(one).__name__ for one in policy.model.modules() if one._compiled_call_impl is not None]
        assert len(kinds) == norms and all(kind.endswith("RMSNorm") for kind in kinds)


@pytest.mark.parametrize("compiled", [False, True])
def test_norm_and_mlp_keep_what_the_cost_model_counts(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted per token in bf16, for one norm and the MLP behind it."""
    tokens, hidden, inner = 128, 64, 256
    plain = nn.Module.compile

    def compile_without_kernels(module: nn.Module, **options: Any) -> None:
        plain(module, backend="aot_eager_decomp_partition", **options)

    monkeypatch.setattr(nn.Module, "compile", compile_without_kernels)
    shape = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": 2, "vocab_size": 8}
    policy = Policy(AutoModelForCausalLM.from_config(Qwen2Config(num_hidden_layers=1, **shape)).bfloat16())
    if compiled:
        compile_parts(policy, RunConfig())
    layer = policy.model.model.layers[0]
    weights = {one.untyped_storage().data_ptr() for one in layer.parameters()}
    kept: dict[int, int] = {}

    def keep(one: torch.Tensor) -> torch.Tensor:
        kept[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        return one

    states = torch.randn(1, tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        layer.mlp(layer.post_attention_layernorm(states)).sum().backward()
    found = sum(size for place, size in kept.items() if place not in weights) / tokens
    of_norms, of_mlp = training_cost.NORM_BYTES, training_cost.MLP_BYTES
    if compiled:
        of_norms, of_mlp = training_cost.COMPILED_NORM_BYTES, training_cost.COMPILED_MLP_BYTES
    scale = 4  # the norm's, one number in fp32
    assert found == of_norms / 2 * hidden + of_mlp * inner + scale
