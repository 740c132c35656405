"""`streamrl verify` of models with only a config.json, with vLLM."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import GptOssConfig, LlamaConfig, MistralConfig, PretrainedConfig, Qwen3MoeConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from streamrl.machine.cpu import this_cpu
from streamrl.training.packing_choice import choose_packing
from streamrl.training.packing_proof import prove
from streamrl.verify import kept_comparison
from streamrl.verify.families import FAMILIES
from streamrl.verify.generator_checks import check_generators
from streamrl.verify.small_folder import small_order
from tests import warm
from tests.cli.calling import streamrl


@pytest.fixture(autouse=True)
def processes_begin_with_everything_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", warm.Popen)


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(architectures=["MistralForCausalLM"]),
        LlamaConfig(architectures=["LlamaForCausalLM"], vocab_size=20),  # fewer tokens than bytes
        Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], norm_topk_prob=True),  # experts are packed for the CPU
        GptOssConfig(architectures=["GptOssForCausalLM"]),  # vLLM's loader copies experts and sinks itself
    ],
    ids=lambda config: str(config.model_type),
)
def test_the_table_of_a_model(
    config: PretrainedConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config.save_pretrained(tmp_path / "model")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(kept_comparison, "result_file", lambda kind, key: tmp_path / f"{kind}-{key}.json")
    assert streamrl(monkeypatch, "verify", tmp_path / "model") == 0
    assert kept_comparison.kept_comparison(tmp_path / "model") == ""  # for the next launch
    printed, said = capsys.readouterr()
    assert "shards" not in said  # no bars of the small models that are written
    rows = {line.split("│")[1].strip(): line for line in printed.splitlines() if line.startswith("│")}
    assert "works" in rows["packing"] and f"shared (proven for {config.model_type}" in rows["packing"]
    assert "sampled tokens within" in rows["trainer against vLLM"]
    assert "bit for bit" in rows["a weight version against a fresh engine"]
    assert "works" in rows["new weights between tokens"]
    assert "bit for bit" in rows["weights in fp8"] and "bit for bit" in rows["weights in int8"]
    int8 = rows["layers in int8"]
    if this_cpu().has_int8 and config.model_type in ("mistral", "llama"):
        assert "works" in int8 and "equal a fresh engine's bit for bit" in int8
    else:
        assert "not checked" in int8 or "refused" in int8
    assert "not checked" in rows["stop tokens"]


def test_what_vllm_computes_otherwise_by_itself_is_made_alike(tmp_path: Path) -> None:
    """A window with one token more, experts chosen without their bias, and parameters rounded to bf16."""
    orders = []
    for number, family in enumerate(("Cohere 2 MoE", "ERNIE 4.5 MoE", "Apertus")):
        config, folder = FAMILIES[family](), tmp_path / str(number)
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
        folder.mkdir()
        packing = choose_packing("auto", prove(config), 64)
        orders.append(replace(small_order(config, packing, folder), codes=(), in_int8=False))
    for findings in check_generators(orders):
        assert [found.verdict for found in findings] == ["works"] * 3, findings


def test_a_vllm_for_gpus_is_asked_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from streamrl.verify import generator_stages
    from streamrl.verify.generator_order import Order

    for_gpus = SimpleNamespace(is_cpu=lambda: False, device_type="cuda")
    monkeypatch.setattr(generator_stages, "current_platform", for_gpus)
    found = generator_stages.answer(Order(("first", "second"), "eager", str(tmp_path)))
    assert found["stages"] == {} and found["lacks"].endswith("the vLLM that is installed computes on cuda")
    assert not list(tmp_path.iterdir())
