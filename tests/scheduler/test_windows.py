"""Layers that see a window of the context, and layers that share the keys and values of others."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from scheduler.cost.decode import roofline
from scheduler.cost.generation_cost import (
    Batch,
    reads_of,
    replica_kind,
    request_bytes,
    slots_of,
    tokens_in_flight,
)
from scheduler.cost.hardware import CPU, device
from scheduler.cost.model_shapes import MODELS, Transformer, square_cost, text_part, uncounted
from streamrl.planning.planning_inputs import find_lengths

SMALL: dict[str, Any] = {
    "num_hidden_layers": 12,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 32,
}
GEMMA = replace(MODELS["7b"], layers=26, window=1024, windowed=22)
"""A 7B model with the layers of Gemma 3 1B: every sixth sees all tokens."""
MISTRAL = replace(MODELS["7b"], window=4096, windowed=28)
PAPER = Batch.of(find_lengths("20k")[0], 1024, 512)


def read(**values: Any) -> tuple[int, int, tuple[int, int]]:
    found = Transformer.from_config("mine", SMALL | values)
    return found.window, found.windowed, found.shared


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({}, (0, 0, (0, 0))),
        ({"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 6}, (512, 10, (0, 0))),
        ({"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 5}, (512, 10, (0, 0))),
        ({"model_type": "gemma3", "sliding_window": 512}, (512, 10, (0, 0))),
        ({"model_type": "gemma2", "sliding_window": 4096}, (4096, 6, (0, 0))),
        ({"model_type": "cohere2", "sliding_window": 4096}, (4096, 9, (0, 0))),
        ({"model_type": "mistral", "sliding_window": 4096}, (4096, 12, (0, 0))),
        ({"model_type": "mistral"}, (4096, 12, (0, 0))),
        ({"model_type": "mistral", "sliding_window": None}, (0, 0, (0, 0))),
        ({"model_type": "phi3", "sliding_window": 2047}, (2047, 12, (0, 0))),
        ({"model_type": "phi3", "sliding_window": 0}, (0, 0, (0, 0))),
        ({"model_type": "qwen2", "sliding_window": 64, "max_window_layers": 8}, (0, 0, (0, 0))),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 8},
            (64, 4, (0, 0)),
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 12},
            (0, 0, (0, 0)),
        ),
        ({"use_sliding_window": False, "sliding_window": 64}, (0, 0, (0, 0))),
        ({"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 6}, (64, 6, (0, 0))),
        ({"sliding_window": 64, "layer_types": ["full_attention"] * 12}, (0, 0, (0, 0))),
        (
            {
                "model_type": "gemma3n_text",
                "sliding_window": 512,
                "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 3,
                "num_kv_shared_layers": 5,
            },
            (512, 9, (2, 3)),
        ),
        ({"num_kv_shared_layers": 4}, (0, 0, (4, 0))),
        ({"num_kv_shared_layers": None}, (0, 0, (0, 0))),
    ],
)
def test_windows_and_shared_layers_are_read(values: dict[str, Any], found: tuple[int, int, tuple[int, int]]) -> None:
    assert read(**values) == found
    assert read(text_config=SMALL | values) == found


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"sliding_window": "4096"}, r"sliding_window must be a whole number or null, got '4096'"),
        ({"sliding_window": True}, r"sliding_window must be a whole number or null, got True"),
        ({"sliding_window": [64]}, r"sliding_window must be a whole number or null, got \[64\]"),
        ({"sliding_window": 64, "layer_types": ["full_attention"] * 3}, r"a type for each of the 12 layers, got 3"),
        (
            {"sliding_window": 64, "max_window_layers": "8"},
            r"max_window_layers must be a whole number or null, got '8'",
        ),
        ({"sliding_window": 64, "sliding_window_pattern": "LLG"}, r"sliding_window_pattern must be a whole number "),
        ({"num_kv_shared_layers": 12}, r"num_kv_shared_layers must be a whole number below 12, the layers, got 12"),
        ({"num_kv_shared_layers": "1"}, r"num_kv_shared_layers must be a whole number below 12, the layers, got '1'"),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(values: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        read(**values)


def test_kinds_of_models_have_the_windows_of_their_configuration_classes() -> None:
    seen, wrong = set(), {}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - MODEL_FOR_MASKED_LM_MAPPING_NAMES.keys():
        for asked in ({}, {"use_sliding_window": True, "sliding_window": 77}):
            try:
                config = CONFIG_MAPPING[kind](**asked)
                values = config.to_dict()
                if uncounted(values):
                    continue
                listed = Transformer.from_config(kind, values)
                bare = copy.deepcopy(values)
                for key in ("layer_types", *(["sliding_window"] if not asked else [])):
                    text_part(bare).pop(key, None)  # type: ignore[attr-defined]
                found = Transformer.from_config(kind, bare)
            except Exception:  # what the cost model does not read, or has no default
                continue
            text = config.get_text_config()
            window, types = getattr(text, "sliding_window", None) or 0, getattr(text, "layer_types", None)
            narrow = types.count("sliding_attention") if types else listed.layers
            expected = (window, narrow) if window and narrow else (0, 0)
            if not expected == (found.window, found.windowed) == (listed.window, listed.windowed):
                wrong[text.model_type] = expected, (found.window, found.windowed)
            elif narrow and window:
                seen.add(text.model_type)
    assert not wrong
    assert {"cohere2", "gemma2", "gemma3_text", "mistral", "phi3", "qwen2", "qwen3", "smollm3"} <= seen


@pytest.mark.parametrize("model", [GEMMA, MISTRAL, replace(GEMMA, shared=(2, 10)), MODELS["7b"]])
@pytest.mark.parametrize("tokens", [1, 700, 1024, 1025, 9000])
def test_attention_is_the_sum_over_tokens_of_what_each_sees(model: Transformer, tokens: int) -> None:
    position = np.arange(1, tokens + 1)
    seen = sum(
        np.minimum(position, model.window if number < model.windowed else tokens) for number in range(model.layers)
    )
    assert [model.layers * model.seen(one) for one in position[-3:]] == pytest.approx(list(np.asarray(seen)[-3:]))
    # half of the square: a token sees itself by half
    halves = [
        np.minimum(position, model.window) if number < model.windowed else position for number in range(model.layers)
    ]
    exact = sum(2 * float(one.sum()) - min(tokens, one.max()) for one in halves)
    assert model.layers * model.pairs(float(tokens)) == pytest.approx(exact, rel=1e-3 if tokens > 1 else 1e-9)
    assert model.pairs(np.asarray([float(tokens)])) == pytest.approx(model.pairs(float(tokens)))


def test_a_model_without_windows_is_counted_as_before() -> None:
    model = MODELS["7b"]
    assert model.cached(123.4) == model.most_cached(123.4) == model.seen(123.4) == 123.4
    assert model.most_cached(100, block=32) == 128 and model.layers_of_a_block == model.layers
    assert model.pairs(123.4) == 123.4**2 and reads_of(model, PAPER) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("every", "narrow", "each"),
    [(4, 22, 4), (1, 5, 1), (12, 13, 13), (2, 3, 2), (10, 14, 14), (10, 15, 10), (28, 0, 28), (0, 28, 28)],
)
def test_groups_of_layers_are_as_large_as_the_rarer_kind_or_both_as_the_other(
    every: int, narrow: int, each: int
) -> None:
    model = replace(GEMMA, layers=every + narrow, windowed=narrow)
    assert model.layers_of_a_block == each
    held = -(-every // each) * each * 9000 + -(-narrow // each) * each * 1024
    assert model.layers * model.cached(9000) == pytest.approx(held)
    assert model.layers * model.most_cached(9000) == pytest.approx(
        -(-every // each) * each * 9000 + -(-narrow // each) * each * 9000
    )


def test_shared_layers_cache_nothing_and_are_read() -> None:
    model = replace(GEMMA, layers=12, windowed=10, shared=(1, 4))
    assert 12 * model.cached(5000) == pytest.approx(1 * 5000 + 6 * 1024)
    assert 12 * model.seen(5000) == pytest.approx(2 * 5000 + 10 * 1024)
    plain = replace(MODELS["7b"], shared=(14, 0))
    assert plain.cached(5000) == 2500 and plain.seen(5000) == 5000 and plain.most_cached(5000) == 2500


def test_a_window_that_holds_all_saves_nothing() -> None:
    model, full = replace(MISTRAL, window=40_000), MODELS["7b"]
    for count in (model.cached, model.seen, model.most_cached, model.pairs):
        assert count(20_000.0) == getattr(full, count.__name__)(20_000.0)
    gpu = device("H100")
    assert reads_of(model, PAPER) == (0.0, 1.0) and slots_of(model, gpu, 1, PAPER) == slots_of(full, gpu, 1, PAPER)
    assert square_cost(SMALL | {"sliding_window": 64}, 64) == square_cost(SMALL)
    assert 0 < square_cost(SMALL | {"sliding_window": 64}, 640) < 0.2 * square_cost(SMALL)


def test_what_windows_hold_over_time_is_exact() -> None:
    batch = Batch((3000.0, 900.0, 40.0), 3, 200.0)
    contexts = np.concatenate([200 + np.arange(length) + 0.5 for length in (3000, 900, 40)])
    assert batch.in_window(1024) == pytest.approx(np.minimum(contexts, 1024).mean(), rel=1e-5)
    assert batch.in_window(1e9) == pytest.approx(batch.running_context)
    slope, fixed = np.polyfit(contexts, np.minimum(contexts, 1024), 1)
    assert batch.line_in_window(1024) == pytest.approx((fixed, slope), rel=1e-3)
    assert batch.line_in_window(3200) == (0.0, 1.0)
    assert Batch((1.0,), 3, 1e5).line_in_window(1024) == (pytest.approx(1024), 0.0)  # of 1e5 tokens or one more


@pytest.mark.parametrize("window", [512, 1024, 4096])
@pytest.mark.parametrize("model", [GEMMA, MISTRAL])
def test_a_line_stands_for_what_windowed_layers_read(model: Transformer, window: int) -> None:
    """All requests together read exactly as much, and a single one within the bounds that `reads_of` names."""
    model = replace(model, window=window)
    fixed, share = reads_of(model, PAPER)
    assert fixed >= 0 and 0 <= share <= 1
    begin, lengths = PAPER.prompt_tokens, np.asarray(PAPER.lengths)
    of_line = fixed * lengths + share * ((begin + lengths) ** 2 - begin**2) / 2
    each = (model.pairs(begin + lengths) - model.pairs(begin)) / 2
    assert of_line.sum() == pytest.approx(each.sum())
    assert np.abs(of_line - each).sum() <= 0.13 * each.sum()
    assert (each / of_line).min() >= 0.4 and (each / of_line).max() <= 1.25


def test_windows_make_replicas_hold_more_and_decode_faster() -> None:
    gpu, full = device("H100"), replace(GEMMA, window=0, windowed=0)
    held = [slots_of(model, gpu, 1, replace(PAPER, samples=10**6)) for model in (GEMMA, full)]
    mean = (4 * PAPER.running_context + 24 * PAPER.in_window(1024)) / 26  # 22 layers take six groups of four
    assert held[0] == pytest.approx(held[1] * PAPER.running_context / mean, rel=0.02)
    kinds = [replica_kind(model, gpu, 1, PAPER, 32) for model in (GEMMA, full)]
    assert kinds[0] is not None and kinds[1] is not None
    assert kinds[0].share(1000.0, False) > kinds[1].share(1000.0, False) > 0
    assert kinds[1].curve == roofline(full.shape, gpu)


def test_tokens_in_flight_keep_more_than_the_window() -> None:
    h100, a100, cpu = device("H100"), device("A100-80"), replace(device(CPU), per_machine=1)
    each = MISTRAL.shape.kv_bytes_per_token
    assert tokens_in_flight("H100", 80e9) == 16_384 and tokens_in_flight("A100-80", 80e9) == 4096
    assert tokens_in_flight("B200", 180e9) == 32_768 and tokens_in_flight("L40S", 48e9, 3000) == 6000
    assert request_bytes(MISTRAL, h100, 1, 50_000.0) == each * (4095 + 16_384)
    assert request_bytes(MISTRAL, a100, 1, 50_000.0) == each * (4095 + 4096)
    assert request_bytes(MISTRAL, a100, 8, 50_000.0) == 2 * each * (4095 + 4096)  # 4 KV heads
    assert request_bytes(MISTRAL, cpu, 1, 50_000.0) == each * 50_000  # prompts are not prefilled in chunks
    assert request_bytes(MISTRAL, h100, 1, 5000.0) == each * 5000


def test_a_batch_of_windowed_samples_trains_on_fewer_pairs() -> None:
    tokens = PAPER.step_tokens(MISTRAL)
    whole = np.asarray(PAPER.lengths) + 512
    near = np.minimum(whole, 4096)
    assert tokens.squares == pytest.approx((near * (2 * whole - near)).mean() * 1024)
    assert tokens.squares < PAPER.step_tokens(MODELS["7b"]).squares
