"""The attention of a packed row as one operation, for layers that torch compiles as a whole, for any row."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from streamrl.training.merged_attention import Piece, merged_backward, merged_forward, pieces_of
from streamrl.training.packing import GroupLayout, layout_of


def seen_window(sliding_window: int | None, layout: tuple[GroupLayout, ...]) -> int | None:
    """Return the positions that a query sees, its own included; None: all, as no sequence is longer."""
    longest = max(group.prompt_length + max(group.completion_lengths, default=0) for group in layout)
    return sliding_window if sliding_window and sliding_window < longest else None


def _pieces(numbers: torch.Tensor, sliding_window: int, device: torch.device) -> tuple[Piece, ...]:
    return _pieces_of(tuple(numbers.tolist()), sliding_window, device)


@lru_cache(maxsize=16)  # each layer asks, forward and backward
def _pieces_of(numbers: tuple[int, ...], sliding_window: int, device: torch.device) -> tuple[Piece, ...]:
    layout = layout_of(numbers)
    return pieces_of(layout, seen_window(sliding_window, layout), device)


@torch.library.custom_op("streamrl::row_attention", mutates_args=())
def row_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    numbers: torch.Tensor,
    sliding_window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `merged_forward` of a row with this layout; `sliding_window` is 0 where there is none."""
    pieces = _pieces(numbers, sliding_window, query.device)
    out, lse = merged_forward(query, key, value, sinks, pieces, scale)
    return out.contiguous(), lse.contiguous()


@row_attention.register_fake
def _(
    query: torch.Tensor, _key: torch.Tensor, _value: torch.Tensor, *_about: Any, **_more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    kind = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(query.shape), query.new_empty(query.shape[1], query.shape[0], dtype=kind)


@torch.library.custom_op("streamrl::row_attention_backward", mutates_args=())
def row_attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    numbers: torch.Tensor,
    sliding_window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `merged_backward`; the gradient of the sinks is empty where there are none."""
    pieces = _pieces(numbers, sliding_window, query.device)
    *grads, of_sinks = merged_backward(grad, query, key, value, sinks, out, lse, pieces, scale)
    of_query, of_key, of_value = (one.contiguous() for one in grads)
    return of_query, of_key, of_value, query.new_empty(0) if of_sinks is None else of_sinks


@row_attention_backward.register_fake
def _(
    _grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    *_about: Any,
    **_more: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    of_sinks = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape), of_sinks


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, numbers, ctx.sliding_window, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output, numbers)


def _backward(ctx: Any, grad: torch.Tensor, _of_lse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    *tensors, numbers = ctx.saved_tensors
    grads = row_attention_backward(grad, *tensors, numbers, ctx.sliding_window, ctx.scale)
    of_query, of_key, of_value, of_sinks = grads
    return of_query, of_key, of_value, None if tensors[3] is None else of_sinks, None, None, None


row_attention.register_autograd(_backward, setup_context=_keep)
