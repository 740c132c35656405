"""Which parts of a model torch compiles, and what they keep for the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig, PretrainedConfig, Qwen2Config

from scheduler.cost import training_memory
from streamrl.config.run import RunConfig
from streamrl.errors import RunFailed
from streamrl.training.attention import OWN_ROWS, SHARED_PREFIX
from streamrl.training.compiled_parts import compile_parts, failures_told
from streamrl.training.policy_model import Policy

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "vocab_size": 8,
    "head_dim": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
LAYER = "model.layers.0"
PARTS = [f"{LAYER}.mlp", f"{LAYER}.input_layernorm", f"{LAYER}.post_attention_layernorm", "model.norm"]


def compiled_of(
    config: PretrainedConfig, attention: str, recomputation: bool | str = False, layers: int = 1
) -> set[str]:
    """Return the modules of a model that are compiled."""
    policy = Policy(AutoModelForCausalLM.from_config(config, attn_implementation=attention))
    run = RunConfig.model_validate({"optimizer": {"gradient_checkpointing": recomputation}})
    compile_parts(policy, run, layers)
    assert policy.fused
    modules = policy.model.named_modules()
    return {name for name, one in modules if one._compiled_call_impl is not None or "forward" in vars(one)}


@pytest.mark.parametrize("recomputation", [False, True])
def test_layers_whose_rows_attend_by_our_function_are_compiled_as_a_whole(recomputation: bool) -> None:
    for attention in (SHARED_PREFIX, OWN_ROWS):
        found = compiled_of(Qwen2Config(**SHAPE), attention, recomputation)
        assert found == {LAYER, "model.norm"}


@pytest.mark.parametrize("recomputation", [False, True])
def test_of_other_layers_norms_and_mlps_are_compiled(recomputation: bool) -> None:
    assert compiled_of(Qwen2Config(**SHAPE), "sdpa", recomputation) == set(PARTS)


def test_of_mixtures_norms_are_compiled_and_where_single_operations_count_nothing_is() -> None:
    assert compiled_of(GptOssConfig(**SHAPE, num_local_experts=2), SHARED_PREFIX) == set(PARTS[1:])
    assert compiled_of(Qwen2Config(**SHAPE), SHARED_PREFIX, "selective") == set()
    assert compiled_of(Qwen2Config(**SHAPE), SHARED_PREFIX, layers=2) == set()


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
    of_norms, of_mlp = training_memory.NORM_BYTES, training_memory.MLP_BYTES
    if compiled:
        of_norms, of_mlp = training_memory.COMPILED_NORM_BYTES, training_memory.COMPILED_MLP_BYTES
    scale = 4  # the norm's, one number in fp32
    assert found == of_norms / 2 * hidden + of_mlp * inner + scale


def test_a_part_that_torch_cannot_compile_ends_the_run_with_what_helps() -> None:
    def broken(*_: Any) -> Any:
        raise NotImplementedError("no kernel")

    with pytest.raises(RunFailed, match=r"no kernel.*; expected .* or optimizer.compile: false"), failures_told():
        torch.compile(lambda x: x + 1, backend=broken)(torch.zeros(3))
