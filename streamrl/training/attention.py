"""Attention over packed groups: prompts are causal, and a completion sees its prompt and itself.

It is registered with transformers' attention interface, so any decoder model that uses it (Llama, Qwen, Mistral, ...)
runs packed without a patch. The cost is sum_i C_i (P + C_i) per group instead of the (P + sum C_i)^2 of one masked row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from streamrl.training.packing import GroupLayout
from streamrl.training.plain_attention import PlainAttention, visible

SHARED_PREFIX = "streamrl_shared_prefix"

PLAIN_SCORES = 2**23
"""Most attention scores of a group (32 MB in fp32, for a moment) for which a CPU uses `PlainAttention`."""

RowLengths = tuple[int, ...]


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
    """Compute the attention of a packed row, with the signature of transformers' attention functions.

    Args:
        module: the attention layer.
        query: [1, H, T, D].
        key: [1, H_kv, T, D]; H is a multiple of H_kv (grouped-query attention).
        value: [1, H_kv, T, D].
        attention_mask: unused; the layout replaces it.
        scaling: softmax scale (default 1 / sqrt(D)).
        dropout: must be 0; RL training evaluates the policy that generated.
        kwargs: must hold `layout`, the `GroupLayout`s of the row.

    Returns:
        ([1, T, H, D], None).
    """
    layout: tuple[GroupLayout, ...] = kwargs["layout"]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = query[0], key[0], value[0]
    if query.device.type == "cpu" and len(q) * max(map(_scores, layout)) <= PLAIN_SCORES:
        plain: torch.Tensor = PlainAttention.apply(q, k, v, layout, scale)
        return plain.transpose(0, 1)[None], None
    outputs: list[torch.Tensor] = []
    for group in layout:
        prompt = slice(group.start, group.start + group.prompt_length)
        answers = slice(prompt.stop, group.stop)
        # a prompt is treated as a completion without a prompt
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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, prefix: int, lengths: RowLengths, scale: float
) -> torch.Tensor:
    """Compute the attention of consecutive sequences that share a prefix.

    Args:
        query: [H, T, D], T = sum(lengths).
        key: [H_kv, prefix + T, D].
        value: [H_kv, prefix + T, D].
        prefix: number of tokens that every sequence sees.
        lengths: lengths of the sequences.
        scale: scale of the scores.

    Returns:
        [T, H, D].
    """
    out = F.scaled_dot_product_attention(
        Padded.apply(query, 0, lengths),
        Padded.apply(key, prefix, lengths),
        Padded.apply(value, prefix, lengths),
        attn_mask=visible(prefix, max(lengths), query.device),
        scale=scale,
        enable_gqa=True,
    )
    rows: torch.Tensor = Unpadded.apply(out, lengths)
    return rows.transpose(0, 1)


def _scores(group: GroupLayout) -> int:
    """Return the scores that one query head computes for the larger part of a group, padding included."""
    longest = max(group.completion_lengths, default=0)
    answers = len(group.completion_lengths) * longest * (group.prompt_length + longest)
    return max(group.prompt_length**2, answers)


def _pad(x: torch.Tensor, prefix: int, lengths: RowLengths) -> torch.Tensor:
    """Pad sequences with zeros, each with the prefix in front.

    [H, prefix + sum(lengths), D] -> [G, H, prefix + max(lengths), D].
    """
    heads, _, width = x.shape
    out = x.new_zeros(len(lengths), heads, prefix + max(lengths), width)
    out[:, :, :prefix] = x[:, :prefix]
    for row, part in zip(out, x[:, prefix:].split(lengths, dim=1), strict=True):
        row[:, prefix : prefix + part.shape[1]] = part
    return out


def _unpad(grad: torch.Tensor, prefix: int, lengths: RowLengths) -> torch.Tensor:
    """Apply the transpose of `_pad`: [G, H, prefix + max(lengths), D] -> [H, prefix + sum(lengths), D]."""
    parts = [row[:, prefix : prefix + length] for row, length in zip(grad, lengths, strict=True)]
    if prefix:
        parts.insert(0, grad[:, :, :prefix].sum(0))
    return torch.cat(parts, dim=1)


class Padded(torch.autograd.Function):
    """`_pad` with a gradient that is one copy; that of indexing would be a scatter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, prefix: int, lengths: RowLengths) -> torch.Tensor:
        """Pad: [H, prefix + T, D] -> [G, H, prefix + C, D]."""
        ctx.shape = prefix, lengths
        return _pad(x, prefix, lengths)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Sum the prefix's gradient over the sequences."""
        return _unpad(grads[0], *ctx.shape), None, None


class Unpadded(torch.autograd.Function):
    """`_unpad` of sequences without a prefix, with a gradient that is one copy."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, lengths: RowLengths) -> torch.Tensor:
        """Remove the padding: [G, H, C, D] -> [H, T, D]."""
        ctx.lengths = lengths
        return _unpad(x, 0, lengths)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Pad the gradient with zeros."""
        return _pad(grads[0], 0, ctx.lengths), None


AttentionInterface.register(SHARED_PREFIX, shared_prefix_attention)
