"""Attention of packed rows as one operation, and layers that torch compiles around it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from transformers import AutoModelForCausalLM, Qwen2Config

from streamrl.config.run import RunConfig
from streamrl.training import attention
from streamrl.training.compiled_parts import compile_parts
from streamrl.training.learner import Division, _fully_shard, reshard
from streamrl.training.merged_attention import MergedAttention, pieces_of
from streamrl.training.packing import GroupLayout, layout_of, numbers_of, pack
from streamrl.training.policy_model import load_policy
from streamrl.training.row_attention import row_attention, seen_window
from streamrl.weights.finite import whole
from tests.training.conftest import random_groups
from tests.training.trained import CPU

LAYOUT = (GroupLayout(0, 6, (7, 2, 1)), GroupLayout(16, 5, ()), GroupLayout(21, 3, (0, 4)), GroupLayout(28, 2, (0,)))
TOKENS = LAYOUT[-1].stop


def test_numbers_say_what_the_layout_is() -> None:
    for layout in (LAYOUT, LAYOUT[:1], LAYOUT[1:2], ()):
        assert layout_of(tuple(numbers_of(layout).tolist())) == layout


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 4, 100])
def test_the_operation_is_the_attention_of_the_row(window: int | None, sinks: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    inputs = [leaf(TOKENS, 4, 8), leaf(TOKENS, 2, 8), leaf(TOKENS, 2, 8), *([leaf(4)] if sinks else [])]
    rest = () if sinks else (None,)
    pieces = pieces_of(LAYOUT, seen_window(window, LAYOUT), CPU)
    expected = MergedAttention.apply(*inputs, *rest, pieces, 0.3)
    about = *inputs, *rest, numbers_of(LAYOUT), window or 0, 0.3
    out, lse = row_attention(*about)
    assert torch.equal(out, expected) and lse.shape == (4, TOKENS)
    upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    theirs = torch.autograd.grad(expected, inputs, upstream)
    for one, other in zip(torch.autograd.grad(out, inputs, upstream), theirs, strict=True):
        assert torch.equal(one, other)
    torch.library.opcheck(
        row_attention, about, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )


@pytest.mark.parametrize(("recomputation", "is_shared"), [(True, False), (False, True)])
def test_layers_are_compiled_once_for_any_row(
    recomputation: bool, is_shared: bool, tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = torch.compile
    unknown: list[int] = []

    def backend(graph: Any, inputs: Sequence[Any]) -> Any:
        unknown.append(sum(isinstance(one, torch.SymInt) for one in inputs))
        return graph if is_shared else aot_eager(graph, inputs)  # a graph's derivative is the same in both

    def without_kernels(function: Any, **options: Any) -> Any:
        return plain(function, backend=backend, **options)

    monkeypatch.setattr(torch, "compile", without_kernels)
    monkeypatch.setattr(attention, "PLAIN_SCORES", -1)  # as rows are computed on GPUs
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    shape = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen2Config(**shape, num_hidden_layers=2, vocab_size=256, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    ours, theirs = (load_policy(str(tmp_path), recomputation) for _ in range(2))
    options = {"gradient_checkpointing": recomputation}
    run = RunConfig.model_validate({"model": {"path": "m", "dtype": "float32"}, "optimizer": options})
    if is_shared:  # by ranks, of which this is the only one
        _fully_shard(ours, run, CPU, Division())
    compile_parts(ours, run)
    graphs = []
    for count in (2, 3, 5, 1):
        batch = pack(random_groups(count, seed=count))
        found = []
        for policy in (ours, theirs):
            policy.zero_grad()
            logprobs = policy(batch, 0.8).logprobs
            logprobs.sum().backward()
            reshard(policy)
            found.append([logprobs, *(whole(weight.grad) for weight in policy.parameters())])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert 0 < graphs[0] <= graphs[1] == graphs[-1]
    assert not torch._dynamo.utils.counters["graph_break"]
    assert max(unknown) <= 2  # the tokens of a row, and the numbers of its layout
    torch._dynamo.reset()
