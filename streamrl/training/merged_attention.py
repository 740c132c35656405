"""Attention over packed groups by flash kernels: no scores in memory, no padding, each prompt's keys read in place.

A completion's attention is two softmaxes over disjoint keys, its prompt's and its own. Each is one call of a kernel for
sequences of different lengths, and the results are merged by their log-sum-exp (arXiv 2205.14135, section 3):

    lse = log(exp(lse_1) + exp(lse_2))        out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2

The backward pass calls each kernel's own with the merged `out` and `lse`: with S = exp(s - lse) and D = rowsum(dO out),
dS = S (dP - D) holds for any subset of the keys. An attention sink is one more key with a value of 0.

    kernel      device                                         used where
    CPU         torch's flash attention, sequence by sequence  long rows with sinks, or without a C compiler
    CUDA        `flash_kernels.py`                             fp16 and bf16
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import torch

from streamrl.training.compiled_formulas import compiled_on_gpus
from streamrl.training.flash_kernels import Sequences, flash_backward, flash_forward
from streamrl.training.packing import GroupLayout
from streamrl.training.plain_attention import seen_prefix, visible

MOST_HEAD_WIDTH = 256
"""Largest D that flash attention on CUDA takes."""
HEAD_WIDTH_STEP = 8
"""D must be a multiple of this on CUDA."""
QUERIES_AT_ONCE = 2048
"""Most queries to whom a GPU's kernel gives a short prompt at once: its backward pass works on parts of the keys side
by side, so such a prompt with all its completions as queries would leave most of the GPU without work."""


@dataclass(frozen=True)
class Piece:
    """Sequences of queries, each with the keys that it attends to: one call of a kernel.

    Queries and keys are aligned at their ends: the last query of a causal sequence sees all its keys.
    """

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    query_rows: torch.Tensor | slice | None
    """Row of each query, int64, or a slice of rows; None: all rows in their order."""
    key_rows: torch.Tensor | None
    """Row of each key, likewise; a row may occur several times."""
    causal: bool
    device: torch.device
    """Where it is computed."""
    window: int | None = None
    """Positions that a query sees, its own included; None: all."""
    places: torch.Tensor | None = None
    """Place of each row among `query_rows`, [T] int64, -1 where it is none of them; None where these are."""

    @cached_property
    def sequences(self) -> Sequences:
        """The same, as the kernels of GPUs take it."""
        ends = self._ends(self.query_lengths), self._ends(self.key_lengths)
        return Sequences(*ends, max(self.query_lengths), max(self.key_lengths), self.causal, self.window)

    def _ends(self, lengths: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self.device)


@lru_cache(maxsize=16)
def pieces_of(
    layout: tuple[GroupLayout, ...], window: int | None, device: torch.device, at_once: int | None = None
) -> tuple[Piece, ...]:
    """Return the pieces that together are the attention of a packed row; the first one has all queries.

    With a window, the part of a prompt that a completion sees is short, and is given to each completion.

    Args:
        layout: layout of the row.
        window: see `ScoreRule`.
        device: where it is computed.
        at_once: most queries to whom a prompt is given at once; None: on GPUs `QUERIES_AT_ONCE`, or as many as a
            longer prompt has tokens; else no limit.
    """
    if window is not None:
        return (_windowed(layout, window, device),)
    lengths = tuple(length for group in layout for length in (group.prompt_length, *group.completion_lengths))
    own = Piece(lengths, lengths, None, None, True, device)
    with_answers = [group for group in layout if any(group.completion_lengths)]
    if not with_answers:
        return (own,)
    answers: list[range] = []
    prompts: list[range] = []
    for group in with_answers:
        first = group.start + group.prompt_length
        limit = max(QUERIES_AT_ONCE, group.prompt_length)  # so that copied keys are no more than queries
        step = at_once or (limit if device.type != "cpu" else group.stop - first)
        parts = [range(at, min(at + step, group.stop)) for at in range(first, group.stop, step)]
        answers += parts
        prompts += [range(group.start, first)] * len(parts)
    lone = len(with_answers) == 1  # nothing lies between its completions
    rows = slice(answers[0].start, answers[-1].stop) if lone else _rows(answers, device)
    places = torch.full((sum(lengths),), -1, device=device)
    places[rows] = torch.arange(sum(map(len, answers)), device=device)
    shared = Piece(
        *(tuple(map(len, answers)), tuple(map(len, prompts)), rows, _rows(prompts, device)),
        *(False, device, None, places),
    )
    return own, shared


def _windowed(layout: tuple[GroupLayout, ...], window: int, device: torch.device) -> Piece:
    queries: list[int] = []
    keys: list[range] = []
    key_lengths: list[int] = []
    for group in layout:
        end = group.start + group.prompt_length
        tail = range(end - seen_prefix(group.prompt_length, window), end)
        sequences = [(range(group.start, end), range(0))]
        starts = accumulate(group.completion_lengths, initial=end)
        sequences += [(range(at, at + n), tail) for at, n in zip(starts, group.completion_lengths, strict=False)]
        for own, prefix in sequences:
            queries.append(len(own))
            key_lengths.append(len(prefix) + len(own))
            keys += [prefix, own]
    return Piece(tuple(queries), tuple(key_lengths), None, _rows(keys, device), True, device, window)


def _rows(ranges: Sequence[range], device: torch.device) -> torch.Tensor:
    return torch.cat([torch.arange(one.start, one.stop, device=device) for one in ranges])


def on_gpu(x: torch.Tensor) -> bool:
    """Return whether a tensor goes to the kernels of GPUs; one without data (`meta`) is taken for one of a GPU."""
    return x.device.type != "cpu"


def has_kernel(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether a flash kernel takes these tensors, [..., D] and [..., D_v]."""
    width = query.shape[-1]
    if width != value.shape[-1] or query.device.type not in ("cpu", "cuda"):
        return False
    if not on_gpu(query):
        return True
    half = query.dtype in (torch.float16, torch.bfloat16)
    return half and width <= MOST_HEAD_WIDTH and width % HEAD_WIDTH_STEP == 0


class MergedAttention(torch.autograd.Function):
    """Attention of a packed row, merged from its pieces (formulas above)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        pieces: tuple[Piece, ...],
        scale: float,
    ) -> torch.Tensor:
        """Compute query [T, H, D]; key, value [T, H_kv, D]; sinks [H] -> [T, H, D]."""
        out, lse = merged_forward(query, key, value, sinks, pieces, scale)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.about = pieces, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of query, key, value and sinks."""
        return *merged_backward(grads[0], *ctx.saved_tensors, *ctx.about), None, None


def merged_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    pieces: tuple[Piece, ...],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the attention of a packed row.

    Args:
        query: [T, H, D].
        key: [T, H_kv, D].
        value: [T, H_kv, D].
        sinks: attention sinks, [H]; None: none.
        pieces: its pieces (`pieces_of`).
        scale: of the scores.

    Returns:
        Output [T, H, D]; log-sum-exps of all scores that a query sees, [H, T] (fp32, or fp64 as the inputs).
    """
    out, lse = _forward(query, key, value, pieces[0], scale)
    for piece in pieces[1:]:
        part, part_lse = _forward(query, key, value, piece, scale)
        assert piece.places is not None
        out, lse = merge(out, lse, part, part_lse, piece.places, query.dtype if sinks is None else lse.dtype)
    if sinks is not None:
        total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        out, lse = out * _share(lse, total), total
    return out.to(query.dtype), lse


def merged_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    pieces: tuple[Piece, ...],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the gradients of query, key, value and sinks; the arguments are those of `merged_forward`, its results and
    the gradient of its output."""
    grad = grad.contiguous()
    query_grad, *of_keys = _backward(grad, query, key, value, out, lse, pieces[0], scale)
    rows = pieces[0].key_rows
    key_grad, value_grad = of_keys
    if rows is not None:
        key_grad, value_grad = (
            _add_rows(torch.zeros(key.shape, dtype=lse.dtype, device=key.device), one, rows) for one in of_keys
        )
    for piece in pieces[1:]:
        of_query, *of_keys = _backward(grad, query, key, value, out, lse, piece, scale)
        assert piece.places is not None and piece.key_rows is not None
        query_grad = with_part(query_grad, of_query, piece.places, lse.dtype)
        key_grad, value_grad = (
            _add_rows(whole.to(lse.dtype), part, piece.key_rows)
            for whole, part in zip((key_grad, value_grad), of_keys, strict=True)
        )
    sinks_grad = None
    if sinks is not None:
        inner = (grad * out).sum(-1, dtype=lse.dtype).T  # [H, T]
        sinks_grad = -(torch.exp(sinks.to(lse.dtype)[:, None] - lse) * inner).sum(1).to(sinks.dtype)
    return query_grad, key_grad.to(key.dtype), value_grad.to(value.dtype), sinks_grad


@compiled_on_gpus((1, 2), (0,), (1, 2), (0,), ())
def merge(
    out: torch.Tensor,
    lse: torch.Tensor,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    places: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge a piece that some queries have into the attention of all.

    Args:
        out: output of all queries, [T, H, D].
        lse: its log-sum-exps, [H, T].
        part: the piece's output, [n, H, D].
        part_lse: its log-sum-exps, [H, n].
        places: see `Piece.places`, [T].
        dtype: type of the result.

    Returns:
        Output [T, H, D]; log-sum-exps [H, T].
    """
    has, at = places >= 0, places.clamp(min=0)
    other = torch.where(has, part_lse[:, at], -torch.inf)
    total = torch.logaddexp(lse, other)
    parts = torch.where(has[:, None, None], part[at].to(lse.dtype), 0.0)
    merged = out.to(lse.dtype) * _share(lse, total) + parts * _share(other, total)
    return merged.to(dtype), total


@compiled_on_gpus((1, 2), (1, 2), ())
def with_part(whole: torch.Tensor, part: torch.Tensor, places: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Add a part's rows, [n, H, D], to those of the whole, [T, H, D], in another type; see `Piece.places`."""
    parts = torch.where((places >= 0)[:, None, None], part[places.clamp(min=0)].to(dtype), 0.0)
    return (whole.to(dtype) + parts).to(whole.dtype)


def _add_rows(whole: torch.Tensor, part: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Add rows, [n, H, D], to those of the whole, [T, H, D], in place; a number may come several times in `rows`."""
    return whole.index_add_(0, rows, part.to(whole.dtype))


def _share(lse: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return the share of a part in the merged softmax: twice [H, n] -> [n, H, 1]."""
    return torch.exp(lse - total).T[..., None]


def _taken(x: torch.Tensor, rows: torch.Tensor | slice | None, dim: int = 0) -> torch.Tensor:
    if isinstance(rows, slice):
        return x.narrow(dim, rows.start, rows.stop - rows.start)
    return x if rows is None else x.index_select(dim, rows)


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, piece: Piece, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a piece's output, [n, H, D], and log-sum-exps, [H, n] (fp32, or fp64 as the inputs)."""
    q, k, v = _taken(query, piece.query_rows), _taken(key, piece.key_rows), _taken(value, piece.key_rows)
    if not on_gpu(query):
        return _cpu_forward(q, k, v, piece, scale)
    return flash_forward(q, k, v, piece.sequences, scale)


def _backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    piece: Piece,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of a piece's queries, keys and values from the merged `out` and `lse`."""
    q, k, v = _taken(query, piece.query_rows), _taken(key, piece.key_rows), _taken(value, piece.key_rows)
    g, o, total = _taken(grad, piece.query_rows), _taken(out, piece.query_rows), _taken(lse, piece.query_rows, 1)
    if not on_gpu(query):
        return _cpu_backward(g, q, k, v, o, total, piece, scale)
    return flash_backward(g, q, k, v, o, total, piece.sequences, scale)


# -- the CPU's kernel, sequence by sequence


def _cpu_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, piece: Piece, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, per_key = torch.empty_like(query), query.shape[1] // key.shape[1]
    lse_type = torch.promote_types(query.dtype, torch.float32)
    lse = torch.empty(query.shape[1], len(query), dtype=lse_type)
    for queries, keys, causal, mask in _sequences(piece, query):
        part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_by_heads(query[queries], key[keys], value[keys], per_key), 0.0, causal, attn_mask=mask, scale=scale
        )
        out[queries] = part.flatten(0, 1).transpose(0, 1)
        lse[:, queries] = part_lse.flatten(0, 1)
    return out, lse


def _cpu_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    piece: Piece,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kv_heads, per_key = key.shape[1], query.shape[1] // key.shape[1]
    grad_key, grad_value = (torch.zeros(x.shape, dtype=lse.dtype) for x in (key, value))
    grads = torch.empty_like(query), grad_key, grad_value
    for queries, keys, causal, mask in _sequences(piece, query):
        q, k, v = _by_heads(query[queries], key[keys], value[keys], per_key)
        g, o = (x[queries].transpose(0, 1).unflatten(0, (kv_heads, per_key)) for x in (grad, out))
        total = lse[:, queries].unflatten(0, (kv_heads, per_key)).contiguous()
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, k, v, o, total, 0.0, causal, attn_mask=mask, scale=scale
        )
        grads[0][queries] = parts[0].flatten(0, 1).transpose(0, 1)
        for target, part in zip(grads[1:], parts[1:], strict=True):
            target[keys] = part.sum(1, dtype=lse.dtype).transpose(0, 1)
    return grads


def _sequences(piece: Piece, like: torch.Tensor) -> list[tuple[slice, slice, bool, torch.Tensor | None]]:
    """Return each sequence's queries and keys, whether the kernel's causal mask serves, and the mask where it does not.

    The kernel aligns queries and keys at their beginnings. It divides by the number of queries, so sequences without
    any, such as empty completions, are left out.
    """
    found = []
    queries = keys = 0
    for many, seen in zip(piece.query_lengths, piece.key_lengths, strict=True):
        plain = many == seen and (piece.window is None or piece.window >= seen)
        mask = None
        if piece.causal and not plain:
            hidden = ~visible(seen - many, many, like.device, piece.window)
            mask = torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, -torch.inf)
        if many:
            found.append((slice(queries, queries + many), slice(keys, keys + seen), piece.causal and plain, mask))
        queries, keys = queries + many, keys + seen
    return found


def _by_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, per_key: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """View [C, H, D] and twice [K, H_kv, D] as [H_kv, g, C, D] and twice [H_kv, g, K, D], without a copy."""
    q = query.transpose(0, 1).unflatten(0, (key.shape[1], per_key))
    k, v = (x.transpose(0, 1)[:, None].expand(-1, per_key, -1, -1) for x in (key, value))
    return q, k, v
