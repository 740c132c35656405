"""Attention over packed groups: causal inside a prompt, and completion -> (its prompt, itself).

Registered with transformers' attention interface, so any decoder model that uses it (Llama, Qwen, Mistral, ...)
runs packed without a patch. Cost is sum_i C_i (P + C_i) per group instead of the (P + sum C_i)^2 of one masked
row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from streamrl.training.packing import GroupLayout

SHARED_PREFIX = "streamrl_shared_prefix"

PLAIN_SCORES = 2**23
"""A CPU computes groups of up to so many attention scores (32 MB in fp32, for a moment) with `PlainAttention`."""

Lengths = tuple[int, ...]


def shared_prefix_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a packed row (signature of transformers' attention functions).

    Args:
        module: the attention layer.
        query: [1, H, T, D].
        key: [1, H_kv, T, D]; H is a multiple of H_kv (grouped-query attention).
        value: [1, H_kv, T, D].
        attention_mask: unused, the layout says it all.
        scaling: softmax scale (default 1 / sqrt(D)).
        dropout: must be 0; RL training evaluates the policy that generated.
        kwargs: must hold `layout`, the `GroupLayout`s of the row.

    Returns:
        ([1, T, H, D], None).
    """
    layout: tuple[GroupLayout, ...] = kwargs["layout"]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = query[0], key[0], value[0]
    outputs: list[torch.Tensor] = []
    for group in layout:
        prompt = slice(group.start, group.start + group.prompt_length)
        answers = slice(prompt.stop, prompt.stop + sum(group.completion_lengths))
        # a prompt is a completion without a prompt
        outputs.append(_prefix_attention(q[:, prompt], k[:, prompt], v[:, prompt], 0, (group.prompt_length,), scale))
        if group.completion_lengths:
            whole = slice(prompt.start, answers.stop)
            outputs.append(
                _prefix_attention(
                    q[:, answers], k[:, whole], v[:, whole], group.prompt_length, group.completion_lengths, scale
                )
            )
    return torch.cat(outputs)[None], None


def _prefix_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, prefix: int, lengths: Lengths, scale: float
) -> torch.Tensor:
    """Attention of sequences that lie one behind the other and share a prefix.

    Args:
        query: [H, T, D], T = sum(lengths).
        key: [H_kv, prefix + T, D].
        value: [H_kv, prefix + T, D].
        prefix: tokens that every sequence sees.
        lengths: of the sequences.
        scale: of the scores.

    Returns:
        [T, H, D].
    """
    scores = query.shape[0] * len(lengths) * max(lengths) * (prefix + max(lengths))
    if query.device.type == "cpu" and scores <= PLAIN_SCORES:
        plain: torch.Tensor = PlainAttention.apply(query, key, value, prefix, lengths, scale)
        return plain
    out = F.scaled_dot_product_attention(
        Padded.apply(query, 0, lengths),
        Padded.apply(key, prefix, lengths),
        Padded.apply(value, prefix, lengths),
        attn_mask=_visible(prefix, max(lengths), query.device),
        scale=scale,
        enable_gqa=True,
    )
    rows: torch.Tensor = Unpadded.apply(out, lengths)
    return rows.transpose(0, 1)


def _visible(prefix: int, longest: int, device: torch.device) -> torch.Tensor:
    """[C, prefix + C]: query t sees the prefix and positions <= t of its own sequence. Padding lies behind every
    valid position, so this hides it; what padded queries compute is thrown away."""
    return torch.ones(longest, prefix + longest, dtype=torch.bool, device=device).tril(diagonal=prefix)


def _pad(x: torch.Tensor, prefix: int, lengths: Lengths) -> torch.Tensor:
    """[H, prefix + sum(lengths), D] -> [G, H, prefix + max(lengths), D], the prefix in every row, zeros behind."""
    heads, _, width = x.shape
    out = x.new_zeros(len(lengths), heads, prefix + max(lengths), width)
    out[:, :, :prefix] = x[:, :prefix]
    for row, part in zip(out, x[:, prefix:].split(lengths, dim=1), strict=True):
        row[:, prefix : prefix + part.shape[1]] = part
    return out


def _unpad(grad: torch.Tensor, prefix: int, lengths: Lengths) -> torch.Tensor:
    """The transpose of `_pad`: [G, H, prefix + max(lengths), D] -> [H, prefix + sum(lengths), D]."""
    parts = [row[:, prefix : prefix + length] for row, length in zip(grad, lengths, strict=True)]
    if prefix:
        parts.insert(0, grad[:, :, :prefix].sum(0))
    return torch.cat(parts, dim=1)


class Padded(torch.autograd.Function):
    """`_pad` with a gradient that is one copy (indexing's would be a scatter)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, prefix: int, lengths: Lengths) -> torch.Tensor:
        """[H, prefix + T, D] -> [G, H, prefix + C, D]."""
        ctx.shape = prefix, lengths
        return _pad(x, prefix, lengths)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Sums the prefix's gradient over the sequences."""
        return _unpad(grads[0], *ctx.shape), None, None


class Unpadded(torch.autograd.Function):
    """`_unpad` of sequences without a prefix, with a gradient that is one copy."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, lengths: Lengths) -> torch.Tensor:
        """[G, H, C, D] -> [H, T, D]."""
        ctx.lengths = lengths
        return _unpad(x, 0, lengths)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Zero where there was padding."""
        return _pad(grads[0], 0, ctx.lengths), None


class PlainAttention(torch.autograd.Function):
    """softmax(scale Q K^T) V by batched products, for short sequences on a CPU.

    torch's flash attention for CPUs is made for long sequences: for 8 answers of 96 tokens its backward pass took three
    times as long as this whole formula. Scores and softmax are fp32; the other products take the compute type. Kept for
    the backward pass are the inputs only: the scores are computed again. With S = softmax, dP = dO V^T:

        dV = S^T dO    dZ = scale S (dP - rowsum(S dP))    dQ = dZ K    dK = dZ^T Q
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        prefix: int,
        lengths: Lengths,
        scale: float,
    ) -> torch.Tensor:
        """query [H, T, D]; key, value [H_kv, prefix + T, D] -> [T, H, D]."""
        ctx.save_for_backward(query, key, value)
        ctx.shape = prefix, lengths, scale
        kv_heads = key.shape[0]
        q, k = _rows_by_kv_head(query, kv_heads, lengths), _pad(key, prefix, lengths).flatten(0, 1)
        weights = PlainAttention.softmax(q, k, prefix, max(lengths), scale).to(value.dtype)
        out = torch.bmm(weights, _pad(value, prefix, lengths).flatten(0, 1))
        return _by_query_head(out, query, kv_heads, lengths).transpose(0, 1)

    @staticmethod
    def softmax(q: torch.Tensor, k: torch.Tensor, prefix: int, longest: int, scale: float) -> torch.Tensor:
        """[B, g C, D], [B, prefix + C, D] -> [B, g C, prefix + C] fp32."""
        hidden = torch.zeros(longest, prefix + longest).masked_fill_(~_visible(prefix, longest, q.device), -torch.inf)
        bias = hidden.repeat(q.shape[1] // longest, 1)
        scores = torch.baddbmm(bias, q.float(), k.float().transpose(1, 2), alpha=scale)
        return torch.softmax(scores, dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None, None]:
        """See the class."""
        query, key, value = ctx.saved_tensors
        prefix, lengths, scale = ctx.shape
        kv_heads = key.shape[0]
        q, k = _rows_by_kv_head(query, kv_heads, lengths), _pad(key, prefix, lengths).flatten(0, 1)
        v = _pad(value, prefix, lengths).flatten(0, 1)
        grad_out = _rows_by_kv_head(grads[0].transpose(0, 1), kv_heads, lengths)
        weights = PlainAttention.softmax(q, k, prefix, max(lengths), scale)
        grad_v = torch.bmm(weights.to(value.dtype).transpose(1, 2), grad_out)
        grad_scores = torch.bmm(grad_out, v.transpose(1, 2)).float()
        grad_scores = torch.ops.aten._softmax_backward_data(grad_scores, weights, -1, torch.float32)
        grad_scores = grad_scores.mul_(scale).to(value.dtype)
        grad_q = torch.bmm(grad_scores, k)
        grad_k = torch.bmm(grad_scores.transpose(1, 2), q)
        count = len(lengths)
        return (
            _by_query_head(grad_q, query, kv_heads, lengths),
            _unpad(grad_k.unflatten(0, (count, kv_heads)), prefix, lengths),
            _unpad(grad_v.unflatten(0, (count, kv_heads)), prefix, lengths),
            None,
            None,
            None,
        )


def _rows_by_kv_head(x: torch.Tensor, kv_heads: int, lengths: Lengths) -> torch.Tensor:
    """[H, T, D] -> [G H_kv, (H / H_kv) C, D]: the query heads of one key-value head become rows of one product, so that
    keys and values are not repeated."""
    return _pad(x, 0, lengths).view(len(lengths) * kv_heads, -1, x.shape[-1])


def _by_query_head(rows: torch.Tensor, query: torch.Tensor, kv_heads: int, lengths: Lengths) -> torch.Tensor:
    """The way back: [G H_kv, (H / H_kv) C, D] -> [H, T, D]."""
    return _unpad(rows.view(len(lengths), query.shape[0], max(lengths), query.shape[-1]), 0, lengths)


AttentionInterface.register(SHARED_PREFIX, shared_prefix_attention)
