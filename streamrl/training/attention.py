"""Attention over packed groups: prompts are causal, and a completion sees its prompt and itself.

It is registered with transformers' attention interface, so any decoder model that uses it (Llama, Qwen, Mistral, ...)
runs packed without a patch. The cost is sum_i C_i (P + C_i) per group instead of the (P + sum C_i)^2 of one masked row.
A CPU takes the kernel of `group_attention.py`. Where that cannot be compiled, or has less work than threads, or there
is a soft cap or a sink, short rows take `plain_attention.py`. All others take the kernels of `merged_attention.py`.
What these cannot do (soft caps, values of another width than keys, fp32 on CUDA) goes by the formula, in chunks.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from streamrl.training.group_attention import GroupAttention, has_cpu_kernel
from streamrl.training.merged_attention import MergedAttention, has_kernel, pieces_of
from streamrl.training.packing import GroupLayout, layout_of
from streamrl.training.plain_attention import PlainAttention, ScoreRule, seen_prefix, visible
from streamrl.training.row_attention import row_attention, seen_window

SHARED_PREFIX = "streamrl_shared_prefix"
SHARED_PREFIX_LONG = "streamrl_shared_prefix_long"
"""The same attention as GPUs compute it, on any device: to compare the formulas."""

OWN_ROWS = "streamrl_own_rows"
"""The same attention for completions that repeat their prompts: each is a sequence of its own in a row without padding
(`hidden_states.py`)."""

PLAIN_SCORES = 2**22
"""Most attention scores of a group (16 MB in fp32, for a moment) for which a CPU uses `PlainAttention`.

Measured on two cores with AVX2, in fp32, forward and backward: with 3.0 M scores it takes .85 of the kernels' time,
with 4.5 M 1.5 times as long, with 7 M 1.9 times."""

CHUNK_SCORES = 2**25
"""Most scores (128 MB in fp32) that the formula keeps at once for a long sequence."""

RowLengths = tuple[int, ...]


def shared_prefix_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    plain_scores: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of a packed row, with the signature of transformers' attention functions.

    Args:
        module: the attention layer.
        query: [1, H, T, D].
        key: [1, H_kv, T, D]; H is a multiple of H_kv (grouped-query attention).
        value: [1, H_kv, T, D_v].
        attention_mask: must be None; the layout replaces it.
        scaling: softmax scale (default 1 / sqrt(D)).
        dropout: must be 0; RL training evaluates the policy that generated.
        sliding_window: positions that a query sees, its own included; None: all before it.
        softcap: bound of the scores, cap tanh(s / cap); None: none.
        s_aux: attention sinks, one score per query head, [H]; None: none.
        plain_scores: replaces `PLAIN_SCORES`; 0: a CPU computes as GPUs do.
        kwargs: must hold `layout`, the numbers of the row's layout (`packing.numbers_of`).

    Returns:
        ([1, T, H, D_v], None).

    Raises:
        ValueError: the layer asks for a mask of its own, or for attention that is not causal, or is not told of the
            layout.
    """
    if attention_mask is not None or kwargs.get("position_bias") is not None:
        raise ValueError(f"{type(module).__name__} brings a mask or a bias of its own, which a packed row cannot use")
    if not (getattr(module, "is_causal", True) and kwargs.get("is_causal") in (None, True)):
        raise ValueError(f"{type(module).__name__} is not causal: its queries see later tokens")
    if "layout" not in kwargs:
        raise ValueError(f"{type(module).__name__} is not told of the packed row's layout by its model")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if torch.compiler.is_compiling() and softcap is None and has_kernel(query, value):
        rows = (x[0].transpose(0, 1) for x in (query, key, value))
        out, _ = row_attention(*rows, s_aux, kwargs["layout"], sliding_window or 0, scale)
        return out[None], None
    limit = PLAIN_SCORES if plain_scores is None else plain_scores
    about = kwargs["layout"], scale, sliding_window, softcap, limit
    return _of_layout(query[0], key[0], value[0], s_aux, *about), None


@torch.compiler.disable  # else torch would compile for each layout anew
def _of_layout(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    s_aux: torch.Tensor | None,
    numbers: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    plain_scores: int,
) -> torch.Tensor:
    """Compute `shared_prefix_attention` of [H, T, D], twice [H_kv, T, ...]; returns [1, T, H, D_v]."""
    layout = layout_of(tuple(numbers.tolist()))
    rule = ScoreRule(scale, seen_window(sliding_window, layout), softcap)
    if plain_scores > 0 and softcap is None and has_cpu_kernel(q, k, v, s_aux, len(layout)):
        own: torch.Tensor = GroupAttention.apply(q, k, v, layout, rule)
        return own.transpose(0, 1)[None].contiguous()
    if q.device.type == "cpu" and len(q) * max(map(_scores, layout)) <= plain_scores:
        plain: torch.Tensor = PlainAttention.apply(q, k, v, s_aux, layout, rule)
        return plain.transpose(0, 1)[None].contiguous()  # some families take a view of it
    if softcap is None and has_kernel(q, v):
        pieces = pieces_of(layout, rule.window, q.device)
        merged: torch.Tensor = MergedAttention.apply(*(x.transpose(0, 1) for x in (q, k, v)), s_aux, pieces, rule.scale)
        return merged[None].contiguous()
    outputs: list[torch.Tensor] = []
    for group in layout:
        prompt = slice(group.start, group.start + group.prompt_length)
        answers = slice(prompt.stop, group.stop)
        # a prompt is treated as a completion without a prompt
        alone = q[:, prompt], k[:, prompt], v[:, prompt]
        outputs.append(_by_chunks(*alone, s_aux, 0, (group.prompt_length,), rule))
        if group.completion_lengths:
            prefix = seen_prefix(group.prompt_length, rule.window)
            whole = slice(answers.start - prefix, answers.stop)
            parts = q[:, answers], k[:, whole], v[:, whole]
            outputs.append(_by_chunks(*parts, s_aux, prefix, group.completion_lengths, rule))
    return torch.cat(outputs)[None]


def _by_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    prefix: int,
    lengths: RowLengths,
    rule: ScoreRule,
) -> torch.Tensor:
    """Compute the attention of consecutive sequences that share a prefix by its formula (`_in_chunks`).

    Args:
        query: [H, T, D], T = sum(lengths).
        key: [H_kv, prefix + T, D].
        value: [H_kv, prefix + T, D_v].
        sinks: [H], or None.
        prefix: number of tokens that every sequence sees, if its window allows.
        lengths: lengths of the sequences.
        rule: rule of the scores.

    Returns:
        [T, H, D_v].
    """
    padded = Padded.apply(query, 0, lengths), Padded.apply(key, prefix, lengths), Padded.apply(value, prefix, lengths)
    seen = visible(prefix, max(lengths), query.device, rule.window)
    out = _in_chunks(*padded, sinks, seen, rule)
    rows: torch.Tensor = Unpadded.apply(out, lengths)
    return rows.transpose(0, 1)


def _in_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    seen: torch.Tensor,
    rule: ScoreRule,
) -> torch.Tensor:
    """Compute attention by its formula, a chunk of queries at a time: for soft caps, and tensors that no kernel takes.

    The backward pass computes each chunk's scores again, so no more than one chunk's are ever kept.

    Args:
        query: [G, H, C, D].
        key: [G, H_kv, K, D].
        value: [G, H_kv, K, D_v].
        sinks: [H], or None.
        seen: [C, K], the keys that a query sees.
        rule: rule of the scores.

    Returns:
        [G, H, C, D_v].
    """
    count, heads, queries, _ = query.shape
    rows = max(1, CHUNK_SCORES // (count * heads * key.shape[2]))
    chunks = [
        checkpoint(_by_formula, query[:, :, at : at + rows], key, value, sinks, seen[at : at + rows], rule,
                   use_reentrant=False)
        for at in range(0, queries, rows)
    ]  # fmt: skip
    return torch.cat(chunks, dim=2)


def _by_formula(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    seen: torch.Tensor,
    rule: ScoreRule,
) -> torch.Tensor:
    """Compute softmax(s) V with all its scores in fp32; the arguments and the result are those of `_in_chunks`."""
    kv_heads = key.shape[1]
    grouped = query.unflatten(1, (kv_heads, -1)).float()  # [G, H_kv, g, C, D]
    scores = torch.einsum("bhgcd,bhkd->bhgck", grouped, key.float()) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.float().view(1, kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]].to(value.dtype)
    return torch.einsum("bhgck,bhkd->bhgcd", weights, value).flatten(1, 2)


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
AttentionInterface.register(OWN_ROWS, shared_prefix_attention)
AttentionInterface.register(SHARED_PREFIX_LONG, functools.partial(shared_prefix_attention, plain_scores=0))
