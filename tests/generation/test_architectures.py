"""Architectures with which vLLM cannot generate are known by the sources, before anything starts."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from streamrl.generation.instance import architectures
from streamrl.generation.instance.architectures import no_architecture

WINDOWS = {"use_sliding_window": True, "sliding_window": 16, "num_hidden_layers": 2}


def reason(folder: Path, kind: str, name: str | None, on_cpus: bool = True, **values: Any) -> str:
    written = values | {"model_type": kind} | ({"architectures": [name]} if name else {})
    (folder / "config.json").write_text(json.dumps(written))
    return no_architecture(folder, on_cpus)


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("rwkv", "RwkvForCausalLM", "vLLM has no RwkvForCausalLM .* has an attention of its own"),
        (
            "bamba",
            "BambaForCausalLM",
            r"the last version that had it is 0.23.0, .* cannot compute \(linear_attention\)",
        ),
        ("openai-gpt", "OpenAIGPTLMHeadModel", "vLLM has no OpenAIGPTLMHeadModel .* has an attention of its own"),
        ("phimoe", "PhimoeForCausalLM", "ends at its routers"),
        ("llama", "FooForCausalLM", "vLLM has no FooForCausalLM .*, nor has transformers"),
        ("llama", "LlamaForSequenceClassification", "does not generate with .*, such as LlamaForCausalLM"),
        ("bert", "BertForMaskedLM", "does not generate with BertForMaskedLM"),
        ("qwen3", None, "a model whose config.json has no architectures; .* such as Qwen3ForCausalLM"),
        ("llama", "Qwen2ForCausalLM", "is Qwen2ForCausalLM, of which model_type is qwen2, and not llama"),
    ],
)
def test_what_vllm_cannot_generate_with_is_told(tmp_path: Path, kind: str, name: str | None, said: str) -> None:
    found = reason(tmp_path, kind, name)
    assert re.search(said, found), found
    assert len(found.splitlines()) == 1 and len(found) < 250
    assert reason(tmp_path, kind, name, on_cpus=False) == found


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("llama", "LlamaForCausalLM"),
        ("llama", "LlamaModel"),  # computed by the class that generates
        ("llama", "LLaMAForCausalLM"),  # an old name
        ("llama", None),
        ("gpt-sw3", "GPT2LMHeadModel"),
        ("helium", "HeliumForCausalLM"),  # by transformers
        ("olmo2", "Olmo2ForCausalLM"),
        ("doge", "DogeForCausalLM"),
    ],
)
def test_what_vllm_has_is_not_refused(tmp_path: Path, kind: str, name: str | None) -> None:
    assert reason(tmp_path, kind, name) == ""


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("mamba", "MambaForCausalLM", "selective_scan_fwd"),
        ("falcon_mamba", "FalconMambaForCausalLM", "selective_scan_fwd"),
        ("jamba", "JambaForCausalLM", "selective_scan_fwd"),
        ("nemotron_h", "NemotronHForCausalLM", "its experts have no gate"),
    ],
)
def test_what_vllm_lacks_on_cpus_is_refused_there_only(tmp_path: Path, kind: str, name: str, said: str) -> None:
    assert said in reason(tmp_path, kind, name) and reason(tmp_path, kind, name, on_cpus=False) == ""


def test_nemotron_h_without_experts_is_not_refused(tmp_path: Path) -> None:
    kinds = ["linear_attention", "mlp", "full_attention"]
    assert reason(tmp_path, "nemotron_h", "NemotronHForCausalLM", layers_block_type=kinds) == ""


@pytest.mark.parametrize(("kind", "name"), [("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")])
def test_windows_in_some_layers_of_qwen_are_refused(tmp_path: Path, kind: str, name: str) -> None:
    assert "max_window_layers" in reason(tmp_path, kind, name, max_window_layers=1, **WINDOWS)
    for layers in (0, 2):
        assert reason(tmp_path, kind, name, max_window_layers=layers, **WINDOWS) == ""


def test_nothing_is_said_without_vllm_or_of_what_a_plugin_may_bring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(architectures, "_has_plugins", lambda: True)
        assert reason(tmp_path, "llama", "FooForCausalLM") == ""
    monkeypatch.setattr(architectures, "_tables", lambda package, file: {})
    assert reason(tmp_path, "llama", "FooForCausalLM") == ""


def test_tables_are_read_as_they_are() -> None:
    read = architectures._tables("transformers", "models/auto/modeling_auto.py")
    assert read["MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"] == dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    of_vllm = architectures._tables("vllm", "model_executor/models/registry.py")
    assert {*architectures.GENERATING, *architectures.OTHERS, architectures.EARLIER} <= of_vllm.keys()
    assert of_vllm["_TEXT_GENERATION_MODELS"]["Qwen3ForCausalLM"] == ("qwen3", "Qwen3ForCausalLM")


def test_tables_of_a_package_that_was_not_found_are_read_once_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "vllm", None)  # it is not found
        assert architectures._tables("vllm", "model_executor/models/registry.py") == {}
    assert architectures._tables("vllm", "model_executor/models/registry.py")
