"""Attention over packed groups by batched products, for short sequences on a CPU.

torch's flash attention for CPUs is made for long sequences: for 8 answers of 96 tokens its backward pass took three
times as long as the whole formula here. A row of groups is one operation: the sequences of a prompt are gathered into
blocks of equal length, by indices that are computed once per row for all layers and passes. Hundreds of small copies
would instead keep one core busy and the others waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from streamrl.training.packing import GroupLayout


@dataclass(frozen=True)
class Block:
    """G consecutive sequences of at most C tokens, n in total, which share a prefix of P tokens (or none).

    g query heads share one key-value head; they become rows of one product, so keys and values are not repeated.
    """

    prefix: slice
    """The prefix's positions in the row."""
    rows: slice
    """The sequences' positions in the row."""
    count: int
    """Number of sequences, G."""
    queries: torch.Tensor
    """Row of each query in [g T, D], [G g C]; a shorter sequence repeats its last token."""
    valid: torch.Tensor
    """Queries that are no such repetition, [G g C, 1] bool."""
    keys: torch.Tensor
    """Row of each key in [T, D], [G (P + C)]."""
    bias: torch.Tensor
    """Bias of the scores, [g C, P + C]: -inf where a query must not see a key (`visible`), else 0."""
    from_queries: torch.Tensor
    """Place of each query in `queries`, [g n], for scattering results back."""
    from_keys: torch.Tensor
    """Place in `keys` of each key of the sequences, [n]."""


@lru_cache(maxsize=4)
def blocks(layout: tuple[GroupLayout, ...], per_key: int) -> list[Block]:
    """Return a block for each group's prompt (a sequence without a prefix), followed by one for its completions.

    Args:
        layout: layout of the row.
        per_key: query heads per key-value head (g).
    """
    total = max(group.stop for group in layout)
    found: list[Block] = []
    for group in layout:
        answers = group.start + group.prompt_length
        found.append(_block(slice(0, 0), group.start, (group.prompt_length,), per_key, total))
        if group.completion_lengths:
            found.append(_block(slice(group.start, answers), answers, group.completion_lengths, per_key, total))
    return found


def visible(prefix: int, longest: int, device: torch.device) -> torch.Tensor:
    """Return the mask [C, prefix + C]: query t sees the prefix and positions <= t of its own sequence.

    Padding lies after every valid position, so the mask hides it; results of padded queries are discarded.
    """
    return torch.ones(longest, prefix + longest, dtype=torch.bool, device=device).tril(diagonal=prefix)


def _block(prefix: slice, start: int, lengths: Sequence[int], per_key: int, total: int) -> Block:
    count, longest, shared = len(lengths), max(lengths), prefix.stop - prefix.start
    place = torch.arange(longest)
    each = torch.tensor(lengths)[:, None]
    begin = start + each.cumsum(0) - each
    row = begin + place.minimum(each - 1)  # [G, C]
    valid = place < each
    heads = torch.arange(per_key)[None, :, None]
    in_queries = (torch.arange(count)[:, None, None] * per_key + heads) * longest + place  # [G, g, C]
    in_keys = torch.arange(count)[:, None] * (shared + longest) + shared + place
    of_prefix = torch.arange(prefix.start, prefix.stop).expand(count, -1)
    hidden = ~visible(shared, longest, place.device)
    return Block(
        prefix,
        slice(start, start + sum(lengths)),
        count,
        queries=(heads * total + row[:, None]).flatten(),
        valid=valid[:, None].expand(-1, per_key, -1).reshape(-1, 1),
        keys=torch.cat([of_prefix, row], dim=1).flatten(),
        bias=torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf).repeat(per_key, 1),
        from_queries=in_queries.transpose(0, 1)[:, valid].flatten(),
        from_keys=in_keys[valid],
    )


class PlainAttention(torch.autograd.Function):
    """Attention softmax(scale Q K^T) V of every block.

    Scores and softmax are fp32; the other products use the compute type. Only the inputs are kept for the backward
    pass, which recomputes the scores. With S = softmax, dP = dO V^T:

        dV = S^T dO    dZ = scale S (dP - rowsum(S dP))    dQ = dZ K    dK = dZ^T Q
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: tuple[GroupLayout, ...],
        scale: float,
    ) -> torch.Tensor:
        """Compute query [H, T, D]; key, value [H_kv, T, D] -> [H, T, D]; the layout covers all T rows."""
        ctx.save_for_backward(query, key, value)
        ctx.about = layout, scale
        kv_heads, per_key = len(key), len(query) // len(key)
        queries = query.reshape(kv_heads, -1, query.shape[-1])
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for block in blocks(layout, per_key):
            q, k, v = _gathered(queries, key, value, block)
            weights = _softmax(q, k, block, scale).to(value.dtype)
            out[:, block.rows] = _scattered(torch.bmm(weights, v), block, len(query))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        """Return the gradients of query, key and value, by the formula of the class."""
        query, key, value = ctx.saved_tensors
        layout, scale = ctx.about
        kv_heads, per_key = len(key), len(query) // len(key)
        queries = query.reshape(kv_heads, -1, query.shape[-1])
        grad_rows = grads[0].reshape(queries.shape)
        grad_query, grad_key, grad_value = (torch.empty(x.shape, dtype=x.dtype) for x in (query, key, value))
        for block in blocks(layout, per_key):
            q, k, v = _gathered(queries, key, value, block)
            grad_out = grad_rows.index_select(1, block.queries).masked_fill_(~block.valid, 0.0).view(q.shape)
            weights = _softmax(q, k, block, scale)
            grad_v = torch.bmm(weights.to(value.dtype).transpose(1, 2), grad_out)
            grad_scores = torch.bmm(grad_out, v.transpose(1, 2)).float()
            grad_scores = torch.ops.aten._softmax_backward_data(grad_scores, weights, -1, torch.float32)
            grad_scores = grad_scores.mul_(scale).to(value.dtype)
            grad_k = torch.bmm(grad_scores.transpose(1, 2), q)
            grad_query[:, block.rows] = _scattered(torch.bmm(grad_scores, k), block, len(query))
            for target, grad in ((grad_key, grad_k), (grad_value, grad_v)):
                target[:, block.rows] = grad.view(kv_heads, -1, grad.shape[-1]).index_select(1, block.from_keys)
                if shared := block.prefix.stop - block.prefix.start:  # the prompt's own block came before
                    of_prefix = grad.view(kv_heads, block.count, -1, grad.shape[-1])[:, :, :shared]
                    target[:, block.prefix] += of_prefix.sum(1)
        return grad_query, grad_key, grad_value, None, None


def _gathered(
    queries: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: Block
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gather a block: [H_kv, g T, D], twice [H_kv, T, D] -> [H_kv G, g C, D], twice [H_kv G, P + C, D]."""
    batch, width = len(key) * block.count, key.shape[-1]
    q = queries.index_select(1, block.queries).view(batch, -1, width)
    k, v = (x.index_select(1, block.keys).view(batch, -1, width) for x in (key, value))
    return q, k, v


def _scattered(out: torch.Tensor, block: Block, heads: int) -> torch.Tensor:
    """Scatter a block's results back: [H_kv G, g C, D] -> [H, n, D]."""
    width = out.shape[-1]
    return out.view(len(out) // block.count, -1, width).index_select(1, block.from_queries).view(heads, -1, width)


def _softmax(q: torch.Tensor, k: torch.Tensor, block: Block, scale: float) -> torch.Tensor:
    """Compute the softmax of the scores: [B, g C, D], [B, P + C, D] -> [B, g C, P + C] fp32."""
    return torch.softmax(torch.baddbmm(block.bias, q.float(), k.float().transpose(1, 2), alpha=scale), dim=-1)
