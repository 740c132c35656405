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

from streamrl.training.packing import ROW_MULTIPLE, GroupLayout


@dataclass(frozen=True)
class Block:
    """G consecutive sequences of at most C tokens, n in total, which share a prefix of P tokens (or none).

    C and P are multiples of `ROW_MULTIPLE`, so that products come in few shapes: shorter sequences are padded at their
    ends, and a shorter prefix at its beginning, where no query sees it.

    g query heads share one key-value head; they become rows of one product, so keys and values are not repeated.
    """

    prefix: slice
    """The prefix's positions in the row."""
    padding: int
    """Keys in front of the prefix that only pad it."""
    rows: slice
    """The sequences' positions in the row."""
    count: int
    """Number of sequences, G."""
    queries: torch.Tensor
    """Row of each query in [g T, D], [G g C]; padding repeats a sequence's last token."""
    valid: torch.Tensor
    """Queries that are no such repetition, [G g C, 1] bool."""
    keys: torch.Tensor
    """Row of each key in [T, D], [G (P + C)]; a prefix's padding repeats its first token."""
    bias: torch.Tensor
    """Bias of the scores, [g C, P + C]: -inf where a query must not see a key (`visible`), else 0."""
    from_queries: torch.Tensor
    """Place of each query in `queries`, [g n], for scattering results back."""
    from_keys: torch.Tensor
    """Place in `keys` of each key of the sequences, [n]."""


@dataclass(frozen=True)
class ScoreRule:
    """How an attention layer turns products of queries and keys into scores: s = cap tanh(scale q k / cap)."""

    scale: float
    """Scale of the products."""
    window: int | None = None
    """Positions that a query sees, its own included (sliding-window attention); None: all before it."""
    softcap: float | None = None
    """Bound of the scores (cap); None: none, s = scale q k."""


@lru_cache(maxsize=8)
def blocks(layout: tuple[GroupLayout, ...], per_key: int, window: int | None = None) -> list[Block]:
    """Return a block for each group's prompt (a sequence without a prefix), followed by one for its completions.

    Args:
        layout: layout of the row.
        per_key: query heads per key-value head (g).
        window: see `ScoreRule`.
    """
    total = max(group.stop for group in layout)
    found: list[Block] = []
    for group in layout:
        answers = group.start + group.prompt_length
        found.append(_block(slice(0, 0), group.start, (group.prompt_length,), per_key, total, window))
        if group.completion_lengths:
            prefix = slice(answers - seen_prefix(group.prompt_length, window), answers)
            found.append(_block(prefix, answers, group.completion_lengths, per_key, total, window))
    return found


def seen_prefix(length: int, window: int | None) -> int:
    """Return how many of a prompt's last tokens any completion token sees; the first one sees the most."""
    return length if window is None else min(length, window - 1)


def visible(prefix: int, longest: int, device: torch.device, window: int | None) -> torch.Tensor:
    """Return the mask [C, prefix + C]: query t sees the prefix and positions <= t of its own sequence.

    With a window it sees only the last `window` of them, itself included: key > query - window, as in transformers.
    Padding lies after every valid position, so the mask hides it; results of padded queries are discarded.
    """
    seen = torch.ones(longest, prefix + longest, dtype=torch.bool, device=device).tril(diagonal=prefix)
    return seen if window is None else seen.triu(diagonal=prefix - window + 1)


def _block(prefix: slice, start: int, lengths: Sequence[int], per_key: int, total: int, window: int | None) -> Block:
    count, longest = len(lengths), max(lengths) + -max(lengths) % ROW_MULTIPLE
    padding = (prefix.start - prefix.stop) % ROW_MULTIPLE
    shared = prefix.stop - prefix.start + padding
    place = torch.arange(longest)
    each = torch.tensor(lengths)[:, None]
    begin = start + each.cumsum(0) - each
    row = begin + place.minimum(each - 1)  # [G, C]
    valid = place < each
    heads = torch.arange(per_key)[None, :, None]
    in_queries = (torch.arange(count)[:, None, None] * per_key + heads) * longest + place  # [G, g, C]
    in_keys = torch.arange(count)[:, None] * (shared + longest) + shared + place
    of_prefix = torch.arange(prefix.start - padding, prefix.stop).clamp(min=prefix.start).expand(count, -1)
    hidden = ~visible(shared, longest, place.device, window)
    hidden[:, :padding] = True
    return Block(
        prefix,
        padding,
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
    """Attention softmax(s) V of every block, with the scores s of a `ScoreRule`.

    Scores and softmax are fp32; the other products use the compute type. Only the inputs are kept for the backward
    pass, which recomputes the scores. With S = softmax, dP = dO V^T, and s' = 1 - (s / cap)^2 (without a cap: 1):

        dV = S^T dO    ds = S (dP - rowsum(S dP))    dZ = scale s' ds    dQ = dZ K    dK = dZ^T Q

    An attention sink is one more score per query head, equal for all its queries, whose value is 0 (arXiv 2309.17453,
    gpt-oss): its column of S takes part in the softmax and is left out of the product with V, and its gradient is the
    sum of its column of ds.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        layout: tuple[GroupLayout, ...],
        rule: ScoreRule,
    ) -> torch.Tensor:
        """Compute query [H, T, D]; key [H_kv, T, D]; value [H_kv, T, D_v]; sinks [H] -> [H, T, D_v].

        The layout covers all T rows.
        """
        key, value = key.contiguous(), value.contiguous()  # each `index_select` would copy all of a view first
        ctx.save_for_backward(query, key, value, sinks)
        ctx.about = layout, rule
        kv_heads, per_key = len(key), len(query) // len(key)
        queries = query.reshape(kv_heads, -1, query.shape[-1])
        out = value.new_empty(*query.shape[:2], value.shape[-1])
        for block in blocks(layout, per_key, rule.window):
            q, k, v = _gathered(queries, key, value, block)
            weights = _softmax(_scores(q, k, block, rule), block, sinks)[..., : k.shape[1]].to(value.dtype)
            out[:, block.rows] = _scattered(torch.bmm(weights, v), block, len(query))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of query, key, value and sinks, by the formula of the class."""
        query, key, value, sinks = ctx.saved_tensors
        layout, rule = ctx.about
        kv_heads, per_key = len(key), len(query) // len(key)
        queries = query.reshape(kv_heads, -1, query.shape[-1])
        grad_rows = grads[0].reshape(kv_heads, -1, value.shape[-1])
        grad_query, grad_key, grad_value = (torch.empty(x.shape, dtype=x.dtype) for x in (query, key, value))
        grad_sinks = None if sinks is None else torch.zeros_like(sinks)
        for block in blocks(layout, per_key, rule.window):
            q, k, v = _gathered(queries, key, value, block)
            grad_out = grad_rows.index_select(1, block.queries).masked_fill_(~block.valid, 0.0)
            grad_out = grad_out.view(len(q), -1, value.shape[-1])
            scores = _scores(q, k, block, rule)
            weights = _softmax(scores, block, sinks)
            grad_v = torch.bmm(weights[..., : k.shape[1]].to(value.dtype).transpose(1, 2), grad_out)
            grad_scores = torch.bmm(grad_out, v.transpose(1, 2)).float()
            if grad_sinks is not None:  # the sink's value is 0, so its column of dP is, too
                grad_scores = torch.nn.functional.pad(grad_scores, (0, 1))
            grad_scores = torch.ops.aten._softmax_backward_data(grad_scores, weights, -1, torch.float32)
            if grad_sinks is not None:
                of_sinks = grad_scores[..., -1].view(kv_heads, block.count, per_key, -1)
                grad_sinks += of_sinks.sum((1, 3)).flatten().to(grad_sinks.dtype)
                grad_scores = grad_scores[..., :-1]
            if rule.softcap is not None:
                bounded = scores.clamp_min(-rule.softcap)  # -inf where nothing is seen, and no gradient either
                grad_scores = grad_scores * (1.0 - (bounded / rule.softcap).square())
            grad_scores = grad_scores.mul_(rule.scale).to(value.dtype)
            grad_k = torch.bmm(grad_scores.transpose(1, 2), q)
            grad_query[:, block.rows] = _scattered(torch.bmm(grad_scores, k), block, len(query))
            for target, grad in ((grad_key, grad_k), (grad_value, grad_v)):
                target[:, block.rows] = grad.view(kv_heads, -1, grad.shape[-1]).index_select(1, block.from_keys)
                if shared := block.prefix.stop - block.prefix.start:  # the prompt's own block came before
                    of_prefix = grad.view(kv_heads, block.count, -1, grad.shape[-1])
                    of_prefix = of_prefix[:, :, block.padding : block.padding + shared]
                    target[:, block.prefix] += of_prefix.sum(1)
        return grad_query, grad_key, grad_value, grad_sinks, None, None


def _gathered(
    queries: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: Block
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gather a block: [H_kv, g T, D], twice [H_kv, T, D] -> [H_kv G, g C, D], twice [H_kv G, P + C, D]."""
    batch = len(key) * block.count
    q = queries.index_select(1, block.queries).view(batch, -1, queries.shape[-1])
    k, v = (x.index_select(1, block.keys).view(batch, -1, x.shape[-1]) for x in (key, value))
    return q, k, v


def _scattered(out: torch.Tensor, block: Block, heads: int) -> torch.Tensor:
    """Scatter a block's results back: [H_kv G, g C, D] -> [H, n, D]."""
    width = out.shape[-1]
    return out.view(len(out) // block.count, -1, width).index_select(1, block.from_queries).view(heads, -1, width)


def _scores(q: torch.Tensor, k: torch.Tensor, block: Block, rule: ScoreRule) -> torch.Tensor:
    """Compute the scores, -inf for keys that are not seen: [B, g C, D], [B, P + C, D] -> [B, g C, P + C] fp32."""
    if rule.softcap is None:
        return torch.baddbmm(block.bias, q.float(), k.float().transpose(1, 2), alpha=rule.scale)
    products = torch.bmm(q.float(), k.float().transpose(1, 2)).mul_(rule.scale / rule.softcap)
    return products.tanh_().mul_(rule.softcap).add_(block.bias)


def _softmax(scores: torch.Tensor, block: Block, sinks: torch.Tensor | None) -> torch.Tensor:
    """Compute the softmax over the keys, [B, g C, P + C], and over the sinks, if any, as one more column."""
    if sinks is not None:
        kv_heads = len(scores) // block.count
        per_key = len(sinks) // kv_heads
        column = sinks.float().view(kv_heads, 1, per_key, 1).expand(-1, block.count, -1, scores.shape[1] // per_key)
        scores = torch.cat([scores, column.reshape(len(scores), -1, 1)], dim=-1)
    return torch.softmax(scores, dim=-1)
