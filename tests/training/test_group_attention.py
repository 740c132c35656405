"""A CPU's own attention kernel: as the formula in fp64, for any sizes, layouts, types and numbers of threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from streamrl.machine import compiled_c
from streamrl.training import attention, group_attention
from streamrl.training.group_attention import GroupAttention, has_cpu_kernel
from streamrl.training.packing import GroupLayout, numbers_of
from streamrl.training.plain_attention import PlainAttention, ScoreRule
from tests.training.thread_bits import check_same_bits

LAYOUT = (GroupLayout(0, 50, (1, 47, 48, 49)), GroupLayout(195, 1, (130,)), GroupLayout(326, 97, ()))
ROW = 423
SIZES = {"small": (4, 2, 8, 6), "one key-value head": (3, 1, 64, 64), "no multiple of a vector": (2, 2, 80, 33)}
"""Heads, key-value heads, widths of keys and of values."""


def inputs(sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Queries, keys and values, laid out as layers give them: [T, H, D], seen as [H, T, D]."""
    heads, kv_heads, width, value_width = sizes
    torch.manual_seed(0)
    shapes = (ROW, heads, width), (ROW, kv_heads, width), (ROW, kv_heads, value_width)
    return [torch.randn(shape).to(dtype).transpose(0, 1).requires_grad_() for shape in shapes]


def seen_by(layout: tuple[GroupLayout, ...], window: int | None) -> torch.Tensor:
    """Which key each query sees, [T, T]."""
    seen = torch.zeros(layout[-1].stop, layout[-1].stop, dtype=torch.bool)
    for group in layout:
        prompt, begin = list(range(group.start, group.start + group.prompt_length)), group.start + group.prompt_length
        sequences = [prompt]
        for length in group.completion_lengths:
            sequences.append(prompt + list(range(begin, begin + length)))
            begin += length
        for places in sequences:
            for at, query in enumerate(places):
                seen[query, places[max(0, at + 1 - (window or at + 1)) : at + 1]] = True
    return seen


def formula(tensors: list[torch.Tensor], rule: ScoreRule) -> torch.Tensor:
    """Attention in the tensors' own type, [H, T, D_v]."""
    query, key, value = tensors
    key, value = (x.repeat_interleave(len(query) // len(key), 0) for x in (key, value))
    scores = (query @ key.transpose(1, 2) * rule.scale).masked_fill(~seen_by(LAYOUT, rule.window), -torch.inf)
    return torch.softmax(scores, -1) @ value


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.detach().double(), expected.detach()
    return float((found - expected).norm() / (expected.norm() + 1e-3))  # a query of one key has no gradient


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("window", [None, 1, 5, 48, 60, 120])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_outputs_and_gradients_are_the_formulas(
    sizes: tuple[int, ...], window: int | None, dtype: torch.dtype, bound: float
) -> None:
    tensors, rule = inputs(sizes, dtype), ScoreRule(0.3, window)
    assert has_cpu_kernel(*tensors, None, len(LAYOUT)), "no C compiler on this machine"
    exact = [one.detach().double().requires_grad_() for one in tensors]
    found, expected = GroupAttention.apply(*tensors, LAYOUT, rule), formula(exact, rule)
    assert relative_error(found, expected) < bound
    upstream = torch.randn(expected.shape).to(dtype)
    ours, theirs = (
        torch.autograd.grad(found, tensors, upstream),
        torch.autograd.grad(expected, exact, upstream.double()),
    )
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == dtype and relative_error(one, other) < bound
        for group in LAYOUT:  # each of its own, also where others have the larger share
            rows = slice(group.start, group.stop)
            assert relative_error(one[:, rows], other[:, rows]) < bound


def test_any_order_of_memory_and_any_number_of_threads_give_the_same_bits() -> None:
    def make(ordered_otherwise: bool) -> list[torch.Tensor]:
        query, key, value = inputs(SIZES["small"])
        if not ordered_otherwise:
            return [query, key, value]
        # first by rows, then by columns, which are copied
        return [query.contiguous(), key.transpose(1, 2).contiguous().transpose(1, 2), value]

    check_same_bits(lambda tensors: GroupAttention.apply(*tensors, LAYOUT, ScoreRule(1.0)), make)


@pytest.mark.parametrize("scale", [1e3, 1e-30])
def test_scores_of_any_size_have_finite_weights(scale: float) -> None:
    tensors, rule = inputs(SIZES["small"]), ScoreRule(scale)
    exact = [one.detach().double().requires_grad_() for one in tensors]
    found, expected = GroupAttention.apply(*tensors, LAYOUT, rule), formula(exact, rule)
    assert relative_error(found, expected) < 1e-3
    ours = torch.autograd.grad(found.sum(), tensors)
    assert all(torch.isfinite(one).all() for one in ours)


@pytest.mark.parametrize("offset", [100.0, 1000.0])
def test_what_all_keys_have_in_common_adds_no_error(offset: float) -> None:
    """A bias of the keys is such a part. Weights that do not add up to 1 would let it reach the queries' gradients."""
    tensors, rule = inputs(SIZES["small"]), ScoreRule(0.3)
    with torch.no_grad():
        tensors[0][..., 0], tensors[1][..., 0] = 1.0, offset / 0.3
    exact = [one.detach().double().requires_grad_() for one in tensors]
    found, expected = GroupAttention.apply(*tensors, LAYOUT, rule), formula(exact, rule)
    upstream = torch.randn(expected.shape)
    ours, theirs = (
        torch.autograd.grad(found, tensors, upstream),
        torch.autograd.grad(expected, exact, upstream.double()),
    )
    for one, other in zip(ours, theirs, strict=True):
        assert relative_error(one, other) < 4e-7 * offset


@pytest.mark.parametrize(
    "shapes",
    [
        [(4, 10, 8), (2, 10, 8), (2, 10, 8)],
        [(4, 423, 8), (2, 422, 8), (2, 423, 8)],
        [(4, 423, 8), (2, 423, 7), (2, 423, 8)],
        [(4, 423, 8), (2, 423, 8), (1, 423, 8)],
        [(3, 423, 8), (2, 423, 8), (2, 423, 8)],
    ],
    ids=["fewer rows than the layout", "fewer keys", "narrower keys", "fewer values", "odd query heads"],
)
def test_sizes_that_do_not_fit_together_are_refused(shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="do not fit together, or their layout"):
        GroupAttention.apply(*map(torch.zeros, shapes), LAYOUT, ScoreRule(1.0))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("number", [0, 1, 2], ids=["query", "key", "value"])
def test_what_is_not_finite_is_never_hidden_and_stays_in_its_group(number: int, value: float) -> None:
    tensors = inputs(SIZES["small"])
    with torch.no_grad():
        tensors[number][0, 200, 3] = value
    out = GroupAttention.apply(*tensors, LAYOUT, ScoreRule(0.3))
    assert not torch.isfinite(out[0, 200]).all()
    assert torch.isfinite(out[:, :195]).all() and torch.isfinite(out[:, 326:]).all()
    grads = torch.autograd.grad(out.sum(), tensors)
    assert not all(torch.isfinite(one).all() for one in grads)
    assert all(torch.isfinite(one[:, :195]).all() for one in grads)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_with_less_work_than_threads_is_left_to_other_ways(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert has_cpu_kernel(*inputs(SIZES["small"]), None, groups=1) == (
        threads <= 2
    )  # one thread for each key-value head


def test_other_tensors_are_left_to_other_ways() -> None:
    query, key, value = inputs(SIZES["small"])
    assert not has_cpu_kernel(query, key, value, torch.zeros(4), 3)
    assert not has_cpu_kernel(query.double(), key.double(), value.double(), None, 3)
    assert not has_cpu_kernel(query, key.bfloat16(), value, None, 3)
    assert not has_cpu_kernel(query.to("meta"), key, value, None, 3)
    with FakeTensorMode() as mode:
        assert not has_cpu_kernel(mode.from_tensor(query), key, value, None, 3)
        assert not has_cpu_kernel(query, key, mode.from_tensor(value), None, 3)


@pytest.mark.parametrize("has_compiler", [True, False])
def test_a_layer_takes_the_kernel_where_it_can_be_compiled(
    has_compiler: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []

    def noted(function: type[torch.autograd.Function]) -> Any:
        apply = function.apply

        def call(*args: Any) -> Any:
            taken.append(function.__name__)
            return apply(*args)

        return call

    for one in (GroupAttention, PlainAttention):
        monkeypatch.setattr(one, "apply", noted(one))
    if not has_compiler:
        monkeypatch.setattr(compiled_c, "cache_directory", lambda: tmp_path)
        monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(group_attention, "_library", group_attention._library.__wrapped__)
    rows = [one[None] for one in inputs(SIZES["small"])]
    module = torch.nn.Identity()
    out, _ = attention.shared_prefix_attention(module, *rows, None, scaling=0.3, layout=numbers_of(LAYOUT))
    assert taken == ["GroupAttention" if has_compiler else "PlainAttention"]
    expected = formula([one[0].double() for one in rows], ScoreRule(0.3))
    torch.testing.assert_close(out[0].double(), expected.transpose(0, 1), rtol=1e-5, atol=1e-5)
