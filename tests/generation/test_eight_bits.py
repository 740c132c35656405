"""Whether instances multiply in 8 bits: what a device or model lacks, what `auto` makes of a probe, what vLLM gets."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from streamrl.config.generation import EightBits
from streamrl.config.run import RunConfig
from streamrl.errors import UserError
from streamrl.generation.instance.eight_bit_probe import StepProducts, layer_shapes
from streamrl.generation.instance.eight_bits import (
    TRIED,
    WORTH,
    choose,
    device_lacks,
    model_lacks,
    with_computation,
)
from streamrl.machine.cpu import Cpu
from streamrl.verify.families import FAMILIES
from streamrl.verify.generator_order import IN_INT8
from streamrl.weights.engine_codes import CodeCount, as_codes, version_as_codes
from streamrl.weights.quantize import CODE_TYPES, SCALE_SUFFIX, dequantize, quantize
from streamrl.weights.version import lay_out

RESULTS = Path(__file__).parents[2] / "experiments" / "results"
LEAST_MISMATCH = 1e-4
"""Nats; an engine in fp32 is a hundred times closer to the trainer."""
CORRECTED = {"name": "grpo", "off_policy": {"ratio_to": "proximal", "correction": "truncate"}}
VNNI = Cpu("a CPU", frozenset({"avx2", "avx512f", "avx512_vnni"}))
AMX = replace(VNNI, flags=VNNI.flags | {"avx512_bf16", "amx_bf16", "amx_tile", "amx_int8"})


def products(speedup: float) -> StepProducts:
    return StepProducts(((1, 1.0, speedup), (8, 2.0, 2 * speedup)))


@pytest.mark.parametrize(
    ("kind", "dtype", "cpu", "capability", "lacks"),
    [
        ("int8", "float32", VNNI, None, ""),
        ("int8", "bfloat16", AMX, None, ""),
        ("int8", "float32", AMX, None, "AMX take bfloat16 activations, and model.dtype is float32"),
        ("int8", "float32", Cpu("old", frozenset({"avx2"})), None, "this CPU has AVX2 without AVX-512"),
        ("int8", "float32", Cpu("old", frozenset({"avx2", "avx512f"})), None, "this CPU has AVX-512"),
        ("int8", "float32", Cpu("arm", frozenset({"asimd"})), None, "this CPU has NEON"),
        ("int8", "float32", Cpu("unlisted", frozenset()), None, "need AVX-512 VNNI"),
        ("int8", "bfloat16", replace(AMX, limits=("ATEN_CPU_CAPABILITY=avx2",)), None, "limited by ATEN_CPU"),
        ("fp8", "bfloat16", AMX, None, "CPU back end does not multiply in fp8"),
        ("fp8", "bfloat16", None, (9, 0), ""),
        ("fp8", "bfloat16", None, None, ""),
        ("fp8", "bfloat16", None, (8, 0), "needs compute capability 8.9, and a GPU here has 8.0"),
        ("int8", "bfloat16", None, (9, 0), "int8 is for CPUs"),
    ],
)
def test_a_device_without_kernels_is_named_with_what_it_lacks(
    kind: EightBits, dtype: str, cpu: Cpu | None, capability: tuple[int, int] | None, lacks: str
) -> None:
    found = device_lacks(kind, dtype, cpu, capability)
    assert lacks in found and bool(lacks) == bool(found)


def test_only_models_that_were_tried_and_are_not_quantized_are_computed_in_8_bits() -> None:
    tried = {"architectures": ["LlamaForCausalLM"]}
    assert model_lacks(tried) == model_lacks({"architectures": ["Qwen3ForCausalLM"]}) == ""
    assert "quantized already" in model_lacks(tried | {"quantization_config": {}})
    assert "this model is Qwen3MoeForCausalLM" in model_lacks({"architectures": ["Qwen3MoeForCausalLM"]})
    assert "unnamed" in model_lacks({})


def test_the_families_let_in_are_those_that_were_seen_to_load_and_compute_in_8_bits() -> None:
    kept = json.loads((RESULTS / "verify_families.json").read_text())["rows"]
    seen = {name for name, findings in findings_by_architecture(kept) if computed_in_int8(findings)}
    assert seen == TRIED


def findings_by_architecture(kept: list[dict[str, Any]]) -> list[tuple[str, dict[str, dict[str, str]]]]:
    names = {family: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config().model_type] for family, config in FAMILIES.items()}
    return [(names[one["family"]], {found["check"]: found for found in one["findings"]}) for one in kept]


def computed_in_int8(findings: dict[str, dict[str, str]]) -> bool:
    """Whether each version loaded as in a fresh engine, and the engine differs from the trainer as 8 bits do."""
    found = findings[IN_INT8]
    mismatch = re.search(r"(\S+) nats from the trainer", found["reason"])
    return found["verdict"] == "works" and mismatch is not None and float(mismatch[1]) > LEAST_MISMATCH


def test_auto_takes_8_bits_only_where_they_can_be_had_and_the_probe_finds_them_worth_it() -> None:
    assert choose("same", "anything", None, False).why == ""
    assert choose("auto", "", products(WORTH), False).kind == "int8"
    slow = choose("auto", "", products(WORTH - 0.01), False)
    assert slow.kind == "same" and "1.24 times as fast" in slow.why and "1.25 are asked for" in slow.why
    assert "no kernels" in choose("auto", "no kernels", None, False).why
    assert choose("auto", "", None, False).kind == choose("auto", "", products(9), True).kind == "same"
    assert choose("int8", "", None, False).kind == "int8"
    assert "never been run" in choose("fp8", "", None, True).why
    with pytest.raises(UserError, match=r"generation.compute: int8: no kernels; expected same or auto here"):
        choose("int8", "no kernels", None, False)


def test_a_run_file_must_correct_for_8_bits_and_not_round_twice() -> None:
    def run(**values: object) -> RunConfig:
        return RunConfig.model_validate({"generation": {"compute": "int8"}, "algorithm": CORRECTED} | values)

    for algorithm in (
        {"name": "grpo"},
        {"name": "grpo", "off_policy": {"ratio_to": "proximal"}},
    ):
        with pytest.raises(ValueError, match="off_policy does not correct for it"):
            run(algorithm=algorithm)
    for algorithm in (
        CORRECTED,
        {"name": "grpo", "off_policy": {"correction": "mask"}},
        {"name": "rloo", "off_policy": {"correction": "truncate"}},  # reinforce: the weight is not in a ratio
    ):
        assert run(algorithm=algorithm).generation.compute == "int8"
    assert run(weights={"generation_dtype": "int8"}).weights.generation_dtype == "int8"
    with pytest.raises(ValueError, match="would round weights twice"):
        run(weights={"generation_dtype": "fp8"})
    with pytest.raises(ValueError, match="nccl does not do"):
        run(weights={"backend": "nccl"})
    auto = RunConfig.model_validate({"generation": {"compute": "auto"}, "algorithm": CORRECTED})
    assert with_computation(auto, choose("auto", "no kernels", None, False)).generation.compute == "same"


def test_layers_are_fused_as_in_vllm() -> None:
    config = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    layer, head, count = layer_shapes(config | {"vocab_size": 49152, "num_hidden_layers": 30})
    assert layer == [(576, 960), (576, 576), (576, 3072), (1536, 576)]
    assert (head, count) == ((576, 49152), 30)
    assert layer_shapes(config | {"head_dim": 32, "vocab_size": 9, "num_hidden_layers": 1})[0][1] == (288, 576)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_an_engine_gets_the_same_codes_from_files_from_plain_versions_and_from_coded_ones(kind: EightBits) -> None:
    torch.manual_seed(0)
    weights = {
        "model.embed_tokens.weight": torch.randn(9, 4),
        "model.layers.0.mlp.down_proj.weight": torch.randn(4, 6),
        "model.layers.0.mlp.down_proj.bias": torch.randn(4),
        "model.norm.weight": torch.randn(4),
        "lm_head.weight": torch.randn(9, 4),
    }
    rounded = {name: one.to(torch.bfloat16) for name, one in weights.items()}
    name = "model.layers.0.mlp.down_proj.weight"
    codes, scales = quantize(rounded[name], kind)
    head = quantize(rounded["lm_head.weight"], kind)
    sent = dict(rounded) | {name: codes, name + SCALE_SUFFIX: scales}
    sent |= {"lm_head.weight": head[0], "lm_head.weight" + SCALE_SUFFIX: head[1]}
    files = dict(as_codes(weights.items(), kind, torch.bfloat16))
    plain = dict(version_as_codes(*lay_out(1, rounded.items()), kind, torch.bfloat16))
    coded = dict(version_as_codes(*lay_out(2, sent.items()), kind, torch.bfloat16))
    for found in (files, plain, coded):
        assert found.keys() == weights.keys() | {name + "_scale"}
        assert found[name].dtype == CODE_TYPES[kind] and found[name + "_scale"].shape == (4, 1)
        np.testing.assert_array_equal(found[name].float(), codes.float())
        np.testing.assert_array_equal(found[name + "_scale"][:, 0], scales)
    assert torch.equal(plain["lm_head.weight"], rounded["lm_head.weight"])  # it decides tokens: never in codes
    assert torch.equal(coded["lm_head.weight"], dequantize(*head, torch.bfloat16))


def test_codes_that_vllm_would_take_for_weights_are_noticed() -> None:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(4, 6, dtype=torch.int8), requires_grad=False)
    model.other = torch.nn.Parameter(torch.zeros(4, 6))
    count = CodeCount("int8")
    given = [("a", torch.zeros(4, 6, dtype=torch.int8)), ("b", torch.zeros(9))]
    assert [name for name, _ in count.counted(given)] == ["a", "b"]
    assert count.held_by(model) == 24 and count.problem(24) == ""
    assert list(count.counted(given)) and "take 24 codes of 8 bits, and the weights have 48" in count.problem(24)
    assert CodeCount("int8").problem(0) != ""  # a model without a layer in 8 bits


def test_a_run_file_that_was_not_resolved_starts_no_engine(tmp_path: Path) -> None:
    from streamrl.config.cluster import GenerationPool
    from streamrl.generation.instance.engine_config import eight_bit_arguments, engine_config

    values = {"generation": {"compute": "auto"}, "algorithm": CORRECTED, "model": {"dtype": "float32"}}
    auto = RunConfig.model_validate(values)
    with pytest.raises(ValueError, match="must be resolved"):
        engine_config(GenerationPool(), auto, cuda=False)
    int8 = RunConfig.model_validate(values | {"generation": {"compute": "int8"}})
    with pytest.raises(ValueError, match="instances of one worker"):
        eight_bit_arguments(int8, GenerationPool(gpus_per_replica=2))
    assert eight_bit_arguments(int8, GenerationPool())["load_format"] == "streamrl_int8"
    assert eight_bit_arguments(auto, GenerationPool()) == {}
