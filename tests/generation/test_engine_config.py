"""What vLLM is told about a model beyond its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamrl.generation.instance.engine_config import is_recurrent, overrides, wrong_kernels


def model(folder: Path, **config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", ["Cohere2ForCausalLM", "Cohere2MoeForCausalLM"])
def test_vllms_windows_of_cohere_2_are_made_those_of_transformers(name: str, tmp_path: Path) -> None:
    assert overrides(model(tmp_path, architectures=[name], sliding_window=4096)) == {"sliding_window": 4095}
    assert overrides(model(tmp_path, architectures=[name], sliding_window=None)) == {}
    assert overrides(model(tmp_path, architectures=["MistralForCausalLM"], sliding_window=4096)) == {}
    assert overrides(tmp_path / "nowhere") == {}


def test_torch_rotates_for_latent_attention_on_a_cpu(tmp_path: Path) -> None:
    assert wrong_kernels(model(tmp_path, kv_lora_rank=512)) == ["-rotary_embedding"]
    assert wrong_kernels(model(tmp_path, text_config={"kv_lora_rank": 512})) == ["-rotary_embedding"]
    assert wrong_kernels(model(tmp_path, kv_lora_rank=None)) == []
    assert wrong_kernels(model(tmp_path, architectures=["LlamaForCausalLM"])) == []
    assert wrong_kernels(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("config", "recurrent"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, False),
        ({"layer_types": ["linear_attention", "full_attention"]}, True),
        ({"text_config": {"layer_types": ["mamba"]}}, True),
        ({"layers_block_type": ["mamba", "attention"]}, True),
        ({"model_type": "qwen3_next", "num_hidden_layers": 4, "full_attention_interval": 4}, True),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M*-"}, True),
        ({"model_type": "bamba", "num_hidden_layers": 2, "attn_layer_indices": [1]}, True),
        ({"model_type": "zamba2"}, True),
        ({"model_type": "jamba", "attn_layer_period": 8, "attn_layer_offset": 4}, True),
        ({"model_type": "mamba2"}, True),
        ({"model_type": "llama"}, False),
        ({"model_type": "gpt_oss", "num_hidden_layers": 2}, False),
        ({"model_type": "unheard_of"}, False),
        ({}, False),
    ],
)
def test_a_model_with_recurrent_layers_caches_no_prefixes_on_a_cpu(
    config: dict[str, object], recurrent: bool, tmp_path: Path
) -> None:
    assert is_recurrent(model(tmp_path, **config)) is recurrent
