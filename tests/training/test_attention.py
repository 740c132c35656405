"""The shared-prefix attention, by each of its formulas, is that of sequences that run alone, written out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from streamrl.training import attention
from streamrl.training.attention import shared_prefix_attention
from streamrl.training.merged_attention import MergedAttention, has_kernel, pieces_of
from streamrl.training.packing import GroupLayout, numbers_of

LAYOUT = (GroupLayout(0, 9, (6, 1, 11)), GroupLayout(27, 1, (4,)), GroupLayout(32, 5, ()))
ROW = 37
HEADS, GROUPS, WIDTH = 4, 2, 8
CPU = torch.device("cpu")
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scaling": 0.7},
    "window": {"sliding_window": 4},
    "window of one": {"sliding_window": 1},
    "window longer than all": {"sliding_window": 100},
    "cap": {"softcap": 0.6},
    "sinks": {"sinks": True},
    "all": {"scaling": 0.7, "sliding_window": 5, "softcap": 0.6, "sinks": True},
}


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Any, rule: dict[str, Any]) -> torch.Tensor:
    """Attention of one sequence: [H, n, D], [H_kv, n, D], [H_kv, n, D_v] -> [n, H, D_v]."""
    k, v = (x.repeat_interleave(HEADS // GROUPS, 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * rule.get("scaling", WIDTH**-0.5)
    if cap := rule.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    at = torch.arange(q.shape[1])
    distance = at[:, None] - at[None]
    seen = (distance >= 0) & (distance < rule.get("sliding_window", 10**6))
    weights = torch.where(seen, scores.exp(), 0.0)
    total = weights.sum(-1, keepdim=True) + (0.0 if sinks is None else sinks.exp()[:, None, None])
    return (weights / total @ v).transpose(0, 1)


@pytest.mark.parametrize(
    ("plain_scores", "value_width", "compiles"),
    [(attention.PLAIN_SCORES, 6, True), (attention.PLAIN_SCORES, 6, False), (0, WIDTH, True), (0, 6, True)],
    ids=["own kernel", "plain", "kernels", "formula"],
)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_shared_prefixes_windows_caps_and_sinks_give_what_lone_sequences_give(
    rule: dict[str, Any], plain_scores: int, value_width: int, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiles:
        monkeypatch.setattr(attention, "has_cpu_kernel", lambda *_: False)
    monkeypatch.setattr(attention, "CHUNK_SCORES", 300)  # several chunks even here
    torch.manual_seed(0)
    shapes = (HEADS, ROW, WIDTH), (GROUPS, ROW, WIDTH), (GROUPS, ROW, value_width), (HEADS,)
    q, k, v, s_aux = leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    sinks = s_aux if rule.get("sinks") else None
    options = {key: value for key, value in rule.items() if key != "sinks"}
    module = torch.nn.Identity()
    packed = shared_prefix_attention(
        module,
        q[None],
        k[None],
        v[None],
        None,
        s_aux=sinks,
        plain_scores=plain_scores,
        layout=numbers_of(LAYOUT),
        **options,
    )[0][0]
    expected = torch.zeros_like(packed)
    for group in LAYOUT:
        prompt = list(range(group.start, group.start + group.prompt_length))
        begin = group.start + group.prompt_length
        rows = [(prompt, prompt)]
        for length in group.completion_lengths:
            rows.append((prompt + list(range(begin, begin + length)), list(range(begin, begin + length))))
            begin += length
        for places, own in rows:
            alone = written_out(q[:, places], k[:, places], v[:, places], sinks, rule)
            expected = expected.index_copy(0, torch.tensor(own), alone[-len(own) :])
    torch.testing.assert_close(packed, expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn_like(packed)
    used = leaves if sinks is not None else leaves[:3]
    ours, theirs = (torch.autograd.grad((out * weights).sum(), used) for out in (packed, expected))
    for name, one, other in zip(("query", "key", "value", "sinks"), ours, theirs, strict=False):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


class Sizes(TorchDispatchMode):
    """Records the size of the largest tensor that an operation makes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for made in found if isinstance(found, tuple) else (found,):
            if isinstance(made, torch.Tensor):
                self.largest = max(self.largest, made.numel())
        return found


@pytest.mark.parametrize("window", [None, 512])
def test_a_gpu_keeps_no_scores_and_pads_nothing(window: int | None) -> None:
    layout = (GroupLayout(0, 2048, (16_000, 10, 10, 10)), GroupLayout(18_078, 100, ()), GroupLayout(18_178, 9, (5,)))
    row, device = layout[-1].stop, torch.device("meta")
    q, k, v = (
        torch.empty(row, heads, 128, dtype=torch.bfloat16, device=device, requires_grad=True) for heads in (28, 4, 4)
    )
    with Sizes() as sizes:
        MergedAttention.apply(q, k, v, None, pieces_of(layout, window, device), 1.0).sum().backward()
    assert q.grad is not None and q.grad.shape == q.shape and sizes.largest == q.numel()


def test_the_pieces_have_just_the_pairs_that_attention_needs() -> None:
    pairs = 0
    for piece in pieces_of(LAYOUT, None, torch.device("cpu")):
        products = sum(q * k for q, k in zip(piece.query_lengths, piece.key_lengths, strict=True))
        pairs += products if piece.causal else 2 * products
    groups = [(one.prompt_length, one.completion_lengths) for one in LAYOUT]
    assert pairs == sum(p * p + sum(c * c + 2 * p * c for c in many) for p, many in groups)


@pytest.mark.parametrize("at_once", [1, 4, 18, 1000])
def test_a_prompt_given_to_its_completions_in_parts_is_the_same_attention(at_once: int) -> None:
    torch.manual_seed(2)
    leaves = [torch.randn(ROW, n, WIDTH, dtype=torch.float64, requires_grad=True) for n in (HEADS, GROUPS, GROUPS)]
    weights = torch.randn(ROW, HEADS, WIDTH, dtype=torch.float64)
    found = []
    for pieces in (pieces_of(LAYOUT, None, CPU), pieces_of(LAYOUT, None, CPU, at_once)):
        out = MergedAttention.apply(*leaves, None, pieces, 0.3)
        found.append([out, *torch.autograd.grad(out, leaves, weights)])
    assert max(pieces[1].query_lengths) == min(at_once, 18)
    assert sum(pieces[1].query_lengths) == 18 + 4
    for parts, whole in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


def test_a_gpu_gets_queries_in_parts_that_copy_no_more_keys_than_there_are_queries() -> None:
    short, long = (GroupLayout(0, 10, (5000,)),), (GroupLayout(0, 3000, (5000, 1500)),)
    gpu = torch.device("meta")
    assert pieces_of(short, None, gpu)[1].query_lengths == (2048, 2048, 904)
    assert pieces_of(short, None, CPU)[1].query_lengths == (5000,)
    piece = pieces_of(long, None, gpu)[1]
    assert piece.query_lengths == (3000, 3000, 500) and piece.key_lengths == (3000, 3000, 3000)


@pytest.mark.parametrize("rule", [{}, {"window": 5}, {"sinks": True}], ids=str)
def test_merging_in_half_precision_costs_no_more_than_the_kernel(rule: dict[str, Any]) -> None:
    torch.manual_seed(1)
    exact = [torch.randn(ROW, heads, WIDTH, dtype=torch.float64) for heads in (HEADS, GROUPS, GROUPS)]
    sinks = torch.randn(HEADS, dtype=torch.float64) if rule.get("sinks") else None
    pieces = pieces_of(LAYOUT, rule.get("window"), torch.device("cpu"))
    weights = torch.randn(ROW, HEADS, WIDTH, dtype=torch.float64)

    def outputs(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in exact]
        out = MergedAttention.apply(*leaves, None if sinks is None else sinks.to(dtype), pieces, 0.3)
        return [out.double(), *(x.double() for x in torch.autograd.grad(out, leaves, weights.to(dtype)))]

    for half, whole in zip(outputs(torch.bfloat16), outputs(torch.float64), strict=True):
        assert (half - whole).norm() / whole.norm() < 0.01


@pytest.mark.parametrize(
    ("device", "dtype", "width", "value_width", "taken"),
    [
        ("cpu", torch.float32, 7, 7, True),
        ("cpu", torch.float32, 8, 6, False),
        ("meta", torch.bfloat16, 64, 64, False),
    ],
)
def test_a_kernel_takes_only_what_it_can_compute(
    device: str, dtype: torch.dtype, width: int, value_width: int, taken: bool
) -> None:
    query, value = (torch.empty(3, 2, n, dtype=dtype, device=device) for n in (width, value_width))
    assert has_kernel(query, value) == taken


def test_an_attention_that_the_layout_cannot_express_is_refused() -> None:
    q, k, v = (torch.zeros(1, 1, ROW, 4) for _ in range(3))
    module: Any = torch.nn.Identity()
    with pytest.raises(ValueError, match="Identity brings a mask or a bias of its own"):
        shared_prefix_attention(module, q, k, v, torch.zeros(1, 1, ROW, ROW), layout=numbers_of(LAYOUT))
    with pytest.raises(ValueError, match="is not causal"):
        shared_prefix_attention(module, q, k, v, None, is_causal=False, layout=numbers_of(LAYOUT))
    both_ways: Any = SimpleNamespace(is_causal=False)
    with pytest.raises(ValueError, match="is not causal"):
        shared_prefix_attention(both_ways, q, k, v, None, layout=numbers_of(LAYOUT))
