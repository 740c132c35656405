"""Flash attention over sequences of different lengths on GPUs, by the kernels of torch or of flash-attn-4.

torch's kernels are those of FlashAttention 2. On Hopper and Blackwell the package flash-attn-4 has kernels that are
faster for long sequences. These are taken where it is installed and where, on a small row of tensors of the same kind,
their output and gradients are those of torch's kernels. This is tried once per process and kind. The package compiles
its kernels then; what it cannot compile, torch computes.
"""

from __future__ import annotations

import importlib
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

logger = logging.getLogger(__name__)

NEWER_MODULE = "flash_attn.cute.interface"
NEWER_CAPABILITIES = (9, 10)
"""Major compute capabilities for which flash-attn-4 has kernels of its own."""
LEAST_LENGTH, MOST_SEQUENCES = 512, 256
"""Queries and keys that the longest sequence must have, and most sequences, for flash-attn-4: otherwise it is no faster
(204 keys on an H200: 0.30 ms instead of 0.28), and would compile variants of its kernels that the trial has not."""
TRIED_QUERIES, TRIED_KEYS = (70, 600, 131), (160, 600, 701)
"""Queries and keys of the sequences of the row on which both are compared; a causal row has keys for queries alone."""
TOLERANCE = 0.02
"""Largest relative difference of outputs and gradients in 16 bits: both round scores to them before the products."""

T = TypeVar("T")
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The gradients of queries, keys and values."""

failed: set[str] = set()
"""Calls of flash-attn-4 that have failed after their trial; torch's kernels take their place from then on."""


@dataclass(frozen=True)
class Sequences:
    """Sequences that lie one behind the other, and which of its keys each query sees."""

    query_ends: torch.Tensor
    """Ends of the sequences of queries, with a 0 in front, [n + 1] int32."""
    key_ends: torch.Tensor
    """Ends of the sequences of keys, likewise."""
    most_queries: int
    """Queries of the longest sequence."""
    most_keys: int
    causal: bool
    """Whether the last query of a sequence sees all its keys, and each one before it one key less."""
    window: int | None
    """Positions that a query sees, its own included; None: all."""

    @property
    def sides(self) -> dict[str, int | None]:
        """Keys that a query sees at its left and right, as both libraries call them."""
        left, right = (None, None) if self.window is None else (self.window - 1, 0)
        return {"window_size_left": left, "window_size_right": right}


def flash_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: Sequences, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of sequences that lie one behind the other.

    Args:
        query: [n, H, D] in 16 bits.
        key: [k, H_kv, D].
        value: [k, H_kv, D].
        sequences: where each begins and ends, and what its queries see.
        scale: of the scores.

    Returns:
        Output [n, H, D]; log-sum-exps of the scores [H, n] fp32.
    """
    if not _uses_newer(query, key, sequences):
        return _torch_forward(query, key, value, sequences, scale)
    if _get_current_dispatch_mode() is None:  # nothing looks at operations
        about = query, key, value, sequences, scale
        return _newer_or_torch(_newer_forward, _torch_forward, about, query, key, sequences)
    ends = sequences.query_ends, sequences.key_ends, sequences.most_queries, sequences.most_keys
    window = -1 if sequences.window is None else sequences.window
    out, lse = newer_forward(query, key, value, *ends, sequences.causal, window, scale)
    return out, lse


def flash_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sequences: Sequences,
    scale: float,
) -> Gradients:
    """Return the gradients of query, key and value; the arguments are those of `flash_forward` and its results.

    `out` and `lse` may be those of more keys than these (`merged_attention.py`).
    """
    about = grad, query, key, value, out, lse.contiguous(), sequences, scale
    if not _uses_newer(query, key, sequences):
        return _torch_backward(*about)
    return _newer_or_torch(_newer_backward, _torch_backward, about, query, key, sequences)


def _newer_or_torch(
    newer: Callable[..., T],
    torchs: Callable[..., T],
    about: tuple[Any, ...],
    query: torch.Tensor,
    key: torch.Tensor,
    sequences: Sequences,
) -> T:
    """Call flash-attn-4 and, where that fails, torch: also for all later calls of this kind."""
    mask = "causal" if sequences.causal else "full"
    window = "no window" if sequences.window is None else "window"
    call = f"{newer.__name__}, {mask}, {window}, {_kind(query.dtype, query.shape[1], key.shape[1], query.shape[2])}"
    if call not in failed:
        try:
            return newer(*about)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            failed.add(call)
            logger.warning("attention by torch's kernels from now on: flash-attn-4 failed (%s): %r", call, error)
    return torchs(*about)


def _uses_newer(query: torch.Tensor, key: torch.Tensor, sequences: Sequences) -> bool:
    if query.device.type != "cuda" or isinstance(query, FakeTensor):
        return False
    short = min(sequences.most_queries, sequences.most_keys) < LEAST_LENGTH
    if short or len(sequences.query_ends) - 1 > MOST_SEQUENCES:
        return False
    kind = query.dtype, query.shape[1], key.shape[1], query.shape[2]
    return newer_agrees(query.device, *kind, sequences.window is not None)


def _kind(dtype: torch.dtype, heads: int, kv_heads: int, width: int) -> str:
    return f"{heads} heads over {kv_heads} of width {width} in {str(dtype).removeprefix('torch.')}"


@cache
def newer_agrees(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, width: int, windowed: bool
) -> bool:
    """Return whether flash-attn-4 is there and computes what torch's kernels do, for tensors of this kind."""
    if torch.cuda.get_device_capability(device)[0] not in NEWER_CAPABILITIES:
        return False
    kind = _kind(dtype, heads, kv_heads, width)
    try:
        with _disable_current_modes():  # the layer may be one whose results a `selective` checkpoint keeps, in order
            difference = _difference(device, dtype, heads, kv_heads, width, windowed)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a broken installation, a kind that it does not support, another interface
        if isinstance(error, ModuleNotFoundError) and f"{NEWER_MODULE}.".startswith(f"{error.name}."):
            return False  # it is not installed
        logger.warning("attention by torch's kernels: flash-attn-4 failed for %s: %r", kind, error)
        return False
    if not difference <= TOLERANCE:
        logger.warning("attention by torch's kernels: flash-attn-4 differs by %.3g for %s", difference, kind)
        return False
    logger.info("attention by the kernels of flash-attn-4 for %s", kind)
    return True


def _difference(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, width: int, windowed: bool
) -> float:
    """Return the largest relative difference between both, over outputs, log-sum-exps and gradients."""
    generator = torch.Generator(device).manual_seed(0)
    scale, worst = width**-0.5, 0.0
    for causal, window in [(True, 50)] if windowed else [(True, None), (False, None)]:
        rows = TRIED_QUERIES, TRIED_QUERIES if causal and window is None else TRIED_KEYS
        query, key, value, grad = (
            torch.randn(sum(row), count, width, dtype=dtype, device=device, generator=generator)
            for row, count in zip((*rows, rows[1], rows[0]), (heads, kv_heads, kv_heads, heads), strict=True)
        )
        query_ends, key_ends = (
            torch.tensor([0, *itertools.accumulate(row)], dtype=torch.int32, device=device) for row in rows
        )
        about = Sequences(query_ends, key_ends, max(rows[0]), max(rows[1]), causal, window), scale
        out, lse = _torch_forward(query, key, value, *about)
        newer = _newer_forward(query, key, value, *about)
        theirs = _torch_backward(grad, query, key, value, out, lse, *about)
        ours = _newer_backward(grad, query, key, value, out, lse, *about)
        for one, other in zip((*newer, *ours), (out, lse, *theirs), strict=True):
            found = float((one.float() - other.float()).norm() / other.float().norm())
            worst = max(worst, found if found == found else float("inf"))
    return worst


# -- torch's kernels


def _torch_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: Sequences, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(query, key, value, sequences.query_ends, sequences.key_ends),
        *(sequences.most_queries, sequences.most_keys, 0.0, sequences.causal, False),
        scale=scale,
        **sequences.sides,
    )
    return out, lse


def _torch_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sequences: Sequences,
    scale: float,
) -> Gradients:
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout, which is 0
    found: Gradients = torch.ops.aten._flash_attention_backward(
        *(grad, query, key, value, out, lse, sequences.query_ends, sequences.key_ends),
        *(sequences.most_queries, sequences.most_keys, 0.0, sequences.causal, state, state.new_empty(0)),
        scale=scale,
        **sequences.sides,
    )
    return found


# -- the kernels of flash-attn-4


@cache
def _newer() -> Any:
    return importlib.import_module(NEWER_MODULE)


@torch.library.custom_op("streamrl::flash_forward", mutates_args=())
def newer_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    most_queries: int,
    most_keys: int,
    causal: bool,
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `flash_forward` by flash-attn-4, as one operation, whose results `selective` checkpoints can keep.

    It is this operation too where the package fails and torch computes, so that a layer that is computed again finds as
    many results as it had. `window` is -1 where there is none.
    """
    seen = window if window >= 0 else None
    sequences = Sequences(query_ends, key_ends, most_queries, most_keys, causal, seen)
    about = query, key, value, sequences, scale
    return _newer_or_torch(_newer_forward, _torch_forward, about, query, key, sequences)


@newer_forward.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_about: torch.Tensor | int | float
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[1], len(query), dtype=torch.float32)


NEWER_FORWARD = torch.ops.streamrl.flash_forward.default


def _newer_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: Sequences, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _newer()._flash_attn_fwd(*(query, key, value), return_lse=True, **_as_newer_calls(sequences, scale))[:2]
    return out, lse


def _newer_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sequences: Sequences,
    scale: float,
) -> Gradients:
    about = query, key, value, out, grad, lse
    found: Gradients = _newer()._flash_attn_bwd(*about, **_as_newer_calls(sequences, scale))[:3]
    return found


def _as_newer_calls(sequences: Sequences, scale: float) -> dict[str, Any]:
    return {
        "softmax_scale": scale,
        "causal": sequences.causal,
        "cu_seqlens_q": sequences.query_ends,
        "cu_seqlens_k": sequences.key_ends,
        "max_seqlen_q": sequences.most_queries,
        "max_seqlen_k": sequences.most_keys,
        **sequences.sides,
    }
