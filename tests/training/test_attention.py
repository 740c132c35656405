"""The shared-prefix attention, by each of its formulas, is that of sequences that run alone, written out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from streamrl.training import attention
from streamrl.training.attention import shared_prefix_attention
from streamrl.training.packing import GroupLayout

LAYOUT = (GroupLayout(0, 9, (6, 1, 11)), GroupLayout(27, 1, (4,)), GroupLayout(32, 5, ()))
ROW = 37
HEADS, GROUPS, WIDTH, VALUE_WIDTH = 4, 2, 8, 6
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


@pytest.mark.parametrize("plain_scores", [attention.PLAIN_SCORES, 0], ids=["plain", "general"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_shared_prefixes_windows_caps_and_sinks_give_what_lone_sequences_give(
    rule: dict[str, Any], plain_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "CHUNK_SCORES", 300)  # several chunks even here
    torch.manual_seed(0)
    shapes = (HEADS, ROW, WIDTH), (GROUPS, ROW, WIDTH), (GROUPS, ROW, VALUE_WIDTH), (HEADS,)
    q, k, v, s_aux = leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    sinks = s_aux if rule.get("sinks") else None
    options = {key: value for key, value in rule.items() if key != "sinks"}
    module = torch.nn.Identity()
    packed = shared_prefix_attention(
        module, q[None], k[None], v[None], None, s_aux=sinks, plain_scores=plain_scores, layout=LAYOUT, **options
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


def test_an_attention_that_the_layout_cannot_express_is_refused() -> None:
    q, k, v = (torch.zeros(1, 1, ROW, 4) for _ in range(3))
    module: Any = torch.nn.Identity()
    with pytest.raises(ValueError, match="Identity brings a mask or a bias of its own"):
        shared_prefix_attention(module, q, k, v, torch.zeros(1, 1, ROW, ROW), layout=LAYOUT)
    with pytest.raises(ValueError, match="is not causal"):
        shared_prefix_attention(module, q, k, v, None, is_causal=False, layout=LAYOUT)
    both_ways: Any = SimpleNamespace(is_causal=False)
    with pytest.raises(ValueError, match="is not causal"):
        shared_prefix_attention(both_ways, q, k, v, None, layout=LAYOUT)
