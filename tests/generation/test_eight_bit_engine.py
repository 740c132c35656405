"""Real vLLM that multiplies in int8: each version is exactly what a fresh engine makes of the same weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from streamrl.config.cluster import GenerationPool
from streamrl.config.generation import EightBits
from streamrl.config.run import RunConfig
from streamrl.errors import UserError
from streamrl.generation.instance.eight_bits import choose_here, quantization_config
from streamrl.generation.instance.engine import Engine
from streamrl.machine.cpu import this_cpu
from streamrl.rollouts.types import Sample, SampleRequest
from streamrl.verify.small_folder import save_byte_tokenizer
from streamrl.weights.quantize import SCALE_SUFFIX, is_quantized, quantize
from streamrl.weights.version import lay_out
from streamrl.weights.version_store import WeightStore
from tests.weights.world import fill

POOL = GenerationPool(max_batch=4, kv_cache_gb=0.05)


def save_narrow_model(folder: Path, seed: int) -> Path:
    """Writes a model whose sizes vLLM's AMX kernels do not take, so that oneDNN's compute it on every CPU."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 72, "intermediate_size": 104, "num_hidden_layers": 2, "vocab_size": 320}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    config = LlamaConfig(**sizes, **heads, tie_word_embeddings=True, initializer_range=0.2, eos_token_id=257)
    LlamaForCausalLM(config).save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder


def run_file(model: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": str(model), "max_context": 64, "dtype": "float32"},
            "sampling": {"max_tokens": 20},
            "generation": {"compute": "int8"},
            "algorithm": {"name": "grpo", "off_policy": {"ratio_to": "proximal", "correction": "truncate"}},
        }
    )


async def drawn(engine: Engine) -> list[Sample]:
    samples = []
    for n in range(3):
        request = SampleRequest(f"s{n}", "g", np.arange(n + 3, n + 13, dtype=np.int32), n, 0.0)
        samples.append(await engine.generate(request, "regular"))
    return [one for one in samples if isinstance(one, Sample)]


def equal(ours: Sequence[Sample], theirs: Sequence[Sample]) -> bool:
    return len(ours) == 3 and all(
        np.array_equal(one.completion_tokens, other.completion_tokens) and np.array_equal(one.logprobs, other.logprobs)
        for one, other in zip(ours, theirs, strict=True)
    )


async def updated(first: Path, second: Path, store: WeightStore, folder: Path) -> list[list[Sample]]:
    """Returns samples before any update, and after versions in which weights come plain and as codes."""
    weights = list(AutoModelForCausalLM.from_pretrained(second, dtype=torch.float32).named_parameters())
    coded: list[tuple[str, torch.Tensor]] = []
    for name, one in weights:
        codes = quantize(one.detach(), "int8") if is_quantized(name, tuple(one.shape)) else None
        coded += [(name, one)] if codes is None else [(name, codes[0]), (name + SCALE_SUFFIX, codes[1])]
    engine = Engine(POOL, run_file(first), False, "int8", "here")
    try:
        await engine.set_up_weights({"directory": str(folder)}, 0)
        found = [await drawn(engine)]
        for number, tensors in ((1, weights), (2, coded), (3, weights)):
            manifest, buffer = lay_out(number, tensors)
            fill(store, manifest, buffer)
            await engine.pause("recompute_kv", number)
            await engine.start_weight_update()
            await engine.update_weights({"number": number, "content_hash": manifest.version.content_hash})
            await engine.finish_weight_update(number)
            await engine.resume()
            found.append(await drawn(engine))
        return found
    finally:
        engine.close()


async def fresh(model: Path, folder: Path) -> list[Sample]:
    engine = Engine(POOL, run_file(model), False, "int8", "here")
    try:
        await engine.set_up_weights({"directory": str(folder)}, 0)
        return await drawn(engine)
    finally:
        engine.close()


def test_every_version_in_int8_is_what_a_fresh_engine_computes_or_a_cpu_without_kernels_refuses(tmp_path: Path) -> None:
    first, second = save_narrow_model(tmp_path / "first", 0), save_narrow_model(tmp_path / "second", 1)
    if not this_cpu().has_int8:
        with pytest.raises(UserError, match="int8 products need AVX-512 VNNI"):
            choose_here(run_file(first), cuda=False, workers=1)
        return
    folder = tmp_path / "store"
    before, *after = asyncio.run(updated(first, second, WeightStore(folder), folder))
    expected = asyncio.run(fresh(second, folder))
    assert not equal(before, expected)
    assert [equal(one, expected) for one in after] == [True] * 3


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_vllm_takes_our_description_for_dynamic_w8a8_with_a_scale_per_output(kind: EightBits) -> None:
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    config = CompressedTensorsConfig.from_config(quantization_config(kind))
    scheme = config.target_scheme_map["Linear"]
    assert config.ignore == ["lm_head"]
    if kind == "int8":
        assert config._is_dynamic_token_w8a8(scheme["weights"], scheme["input_activations"])
    else:
        assert config._is_fp8_w8a8(scheme["weights"], scheme["input_activations"])
    assert (scheme["weights"].strategy, scheme["input_activations"].strategy) == ("channel", "token")
    assert scheme["input_activations"].dynamic and not scheme["weights"].dynamic
