"""The graph of a training step as a GPU gets it, counted with fake tensors: operations, shapes, memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from experiments.training_graph import RECOMPUTATIONS, GraphCount, count
from scheduler.cost.training_memory import LOGITS_AT_ONCE
from streamrl.training.token_logprobs import SLAB_BYTES
from streamrl.verify.hardware_stages import CPU

SMALL = replace(CPU, layers=2, hidden=256, heads=8, kv_heads=4, inner=1280, vocabulary=3001)
CONTEXT = 2800
"""So long that half of the memory is the layers', though there are two. Each operation of a fake tensor takes time,
whatever its size."""


@pytest.fixture(scope="module")
def counts() -> dict[str, GraphCount]:
    return {one.recomputation: one for one in (count(SMALL, CONTEXT, way)[0] for way in RECOMPUTATIONS)}


def test_the_formula_of_the_plan_is_within_a_tenth_of_what_exists_at_once(counts: dict[str, GraphCount]) -> None:
    assert {name: one.off for name, one in counts.items() if abs(one.off) > 0.1} == {}
    assert counts["false"].memory_bytes > counts["selective"].memory_bytes > counts["true"].memory_bytes


def test_no_score_matrix_and_no_padding_is_in_the_graph(counts: dict[str, GraphCount]) -> None:
    for one in counts.values():
        assert one.score_matrices == ()
        # a prompt of 280 tokens, completions of 2520 and three of 630; 14 tokens more make a multiple of 16
        assert one.tokens == 280 + 2520 + 3 * 630 + 14 and one.attention_rows == one.tokens


def test_only_whole_layers_are_computed_twice(counts: dict[str, GraphCount]) -> None:
    assert counts["false"].flops == counts["selective"].flops < counts["true"].flops
    # products: forward and twice that backward; the head's logits twice, as they are not kept
    products = counts["false"].products
    weights = 2 * (2 * 256 * 32 * (8 + 4) + 3 * 256 * 1280)
    head = 3001 * 256 * (2520 + 3 * 630)
    assert products == 6 * weights * counts["false"].tokens + 8 * head


def test_the_cost_model_knows_how_many_logits_exist_at_once() -> None:
    assert SLAB_BYTES["cuda"] // torch.float32.itemsize == LOGITS_AT_ONCE
