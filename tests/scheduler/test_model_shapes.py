"""Shapes of models as their `config.json` says, or leaves out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from scheduler.cost.decode import COMPUTE_EFFICIENCY, MEMORY_EFFICIENCY, STEP_OVERHEAD_S, roofline
from scheduler.cost.hardware import device
from scheduler.cost.model_shapes import MODELS, UNGATED, Transformer, uncounted

SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 32,
}


@pytest.mark.parametrize(("name", "parameters", "computed"), [("7b", 7.62e9, 7.07e9), ("1.5b", 1.54e9, 1.54e9)])
def test_a_step_reads_no_embedding_that_is_only_looked_up_and_a_prompt_needs_no_head(
    name: str, parameters: float, computed: float
) -> None:
    model, gpu = MODELS[name], device("H100")
    assert (model.parameters, model.shape.parameters) == (pytest.approx(parameters, rel=5e-3), model.computed)
    assert model.computed == pytest.approx(computed, rel=5e-3)
    curve = roofline(model.shape, gpu)
    read = 2 * model.computed / (gpu.memory_bandwidth_gb_s * 1e9 * MEMORY_EFFICIENCY)
    assert float(curve.base(1)) == pytest.approx(read + STEP_OVERHEAD_S)
    layers = model.forward_flops(1.0, 0.0, predicting=0.0)
    assert curve.per_prefill_token == pytest.approx(layers / (gpu.bf16_tflops * 1e12 * COMPUTE_EFFICIENCY))


@pytest.mark.parametrize(
    ("text", "outer", "tied"),
    [
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": False, "model_type": "llava"}, True),
        ({"tie_word_embeddings": False, "model_type": "gemma3_text"}, {"tie_word_embeddings": True}, False),
        ({"tie_word_embeddings": None, "model_type": "llama"}, {"tie_word_embeddings": True}, True),
        ({"model_type": "gemma3_text"}, {"tie_word_embeddings": False, "model_type": "gemma3"}, False),
        ({"model_type": "gemma3_text"}, {"model_type": "gemma3"}, True),
        ({}, {"model_type": "gemma3"}, True),
        ({"model_type": "mistral"}, {"model_type": "mistral3"}, False),
        ({}, {}, False),
    ],
)
def test_the_head_is_the_embedding_as_the_text_part_says_or_the_whole_or_the_models_kind(
    text: dict[str, Any], outer: dict[str, Any], tied: bool
) -> None:
    assert Transformer.from_config("mine", {**outer, "text_config": SMALL | text}).tied is tied
    if not outer:
        assert Transformer.from_config("mine", SMALL | text).tied is tied


def test_kinds_of_models_are_tied_where_their_configuration_classes_are() -> None:
    decoders = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    seen, wrong = set(), set()
    for name in decoders - MODEL_FOR_MASKED_LM_MAPPING_NAMES.keys():
        try:
            config = CONFIG_MAPPING[name]()
            values = config.to_dict()
            inner = values.get("text_config") or {}
            for one in (values, inner):
                one.pop("tie_word_embeddings", None)
            found = Transformer.from_config(name, values).tied
        except Exception:  # what the cost model does not read, or has no default
            continue
        kind = inner.get("model_type") or name
        seen.add(kind)
        if found != bool(getattr(type(config.get_text_config()), "tie_word_embeddings", False)):
            wrong.add(kind)
    assert not wrong and len(seen) > 40 and "gemma3_text" in seen


@pytest.mark.parametrize("kind", ["apertus", "arcee", "jais2", "llama", "nanochat", "starcoder2"])
def test_a_model_has_as_many_weights_as_are_counted_or_no_gate(kind: str) -> None:
    config = CONFIG_MAPPING[kind](num_hidden_layers=4)
    values = config.to_dict()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = sum(weight.numel() for weight in model.parameters())
    gate = values["num_hidden_layers"] * values["hidden_size"] * values["intermediate_size"]
    as_gated = Transformer.from_config(kind, values | {"model_type": "llama"}).parameters
    assert as_gated - (gate if kind in UNGATED else 0) == pytest.approx(weights, rel=2e-3)
    if kind in UNGATED:
        with pytest.raises(ValueError, match=f"the MLP of a {kind} model has no gate"):
            Transformer.from_config(kind, values)


def test_models_whose_weights_are_not_those_of_a_dense_decoder_are_told_from_others() -> None:
    found = {kind: uncounted(CONFIG_MAPPING[kind]().to_dict()) for kind in ("bamba", "zamba2", "falcon_h1", "lfm2_moe")}
    assert set(found.values()) == {"recurrent layers or convolutions"}, found
    assert uncounted(CONFIG_MAPPING["youtu"]().to_dict()) == "latent attention"
    for kind in ("gemma4_text", "gemma4"):
        assert uncounted(CONFIG_MAPPING[kind]().to_dict()) == "embeddings of every layer"
    assert not uncounted(CONFIG_MAPPING["gemma4_text"](hidden_size_per_layer_input=0).to_dict())
    for kind in ("llama", "qwen3", "gemma3_text", "olmo3", "smollm3", "cohere2", "granite"):
        assert not uncounted(CONFIG_MAPPING[kind]().to_dict()), kind
