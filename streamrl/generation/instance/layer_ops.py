"""Norms and gates of decoder layers on a CPU, in C (`layer_ops.c`), as operations of torch.

They compute what the trainer's kernels do (`training/layer_kernels.py`), to the bit. vLLM composes them of torch's
operations, of which a step of SmolLM2-135M has 240.
"""

from __future__ import annotations

from typing import Any

import torch

from streamrl.generation.instance.native_calls import NativeCall, library, native_call

TYPES = (torch.float32, torch.bfloat16)
"""Types that the C functions take."""


def norm(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """Return x / rms(x) * weight with rms(x)^2 = mean(x^2) + epsilon, of the last dimension.

    Args:
        x: [..., width], of one of `TYPES`, with `rows_of(x)`.
        weight: [width], of the same type; None: ones.
        epsilon: what is added to the mean square.
    """
    out = x.new_empty(x.shape)
    _library().norm(x.data_ptr(), None, _address(weight), out.data_ptr(), *_sizes(x), *_rows(x), epsilon)
    return out


def add_and_norm_(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> None:
    """Add x to the residual, and write the sum's `norm` to x; arguments as there, but contiguous."""
    _library().norm(x.data_ptr(), residual.data_ptr(), _address(weight), x.data_ptr(), *_sizes(x), *_rows(x), epsilon)


def gate(x: torch.Tensor) -> torch.Tensor:
    """Return silu(a) * b for x = [a, b] along its last dimension: [..., width] of [..., 2 width], contiguous."""
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    _library().gate(x.data_ptr(), out.data_ptr(), *_sizes(out))
    return out


def norm_call(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, epsilon: float, out: torch.Tensor
) -> NativeCall:
    """Return the call of `norm`, or with a residual of `add_and_norm_`, whose result goes to `out`, as large as x."""
    return native_call(_library().norm_call, (x, residual, weight, out), (*_sizes(x), *_rows(x)), epsilon)


def gate_call(x: torch.Tensor, out: torch.Tensor) -> NativeCall:
    """Return the call of `gate`, whose result goes to `out`, [..., width]."""
    return native_call(_library().gate_call, (x, out), _sizes(out))


def rows_of(x: torch.Tensor) -> tuple[int, int] | None:
    """Return how the rows of x lie in memory: (rows that follow one another, elements from one such group to the next).

    None: `norm` does not take them. It takes a contiguous tensor, and the heads of each token as a part of a wider one,
    [tokens, heads, width].
    """
    if x.is_contiguous():
        return 1, x.shape[-1]
    if x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == x.shape[2]:
        return x.shape[1], x.stride(0)
    return None


def _rows(x: torch.Tensor) -> tuple[int, int]:
    found = rows_of(x)
    assert found is not None
    return found


def _library() -> Any:
    found = library()
    assert found is not None
    return found


def _address(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _sizes(x: torch.Tensor) -> tuple[int, int, bool]:
    """Return rows, width, and whether the type is bf16."""
    width = x.shape[-1]
    return x.numel() // width, width, x.dtype == torch.bfloat16


_LIBRARY = torch.library.Library("streamrl", "FRAGMENT")
_LIBRARY.define("norm(Tensor x, Tensor? weight, float epsilon) -> Tensor")
_LIBRARY.define("add_and_norm_(Tensor(a!) x, Tensor(b!) residual, Tensor? weight, float epsilon) -> ()")
_LIBRARY.define("gate(Tensor x) -> Tensor")
for _function in (norm, add_and_norm_, gate):
    _LIBRARY.impl(_function.__name__, _function, "CPU")
NORM = torch.ops.streamrl.norm.default
ADD_AND_NORM = torch.ops.streamrl.add_and_norm_.default
GATE = torch.ops.streamrl.gate.default
