"""Sums of fp32 and bf16 gradients, in place, by a kernel of our own on CPUs (`gradient_sums.c`).

On a CPU torch converts all bf16 numbers to fp32 in new memory before it adds them, which takes four times as long.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from streamrl.machine import compiled_c
from streamrl.training.cpu_tensors import is_plain

SOURCE = Path(__file__).with_suffix(".c")


def add_all(totals: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Add each gradient to its total of the same shape; to the bits of `torch._foreach_add_`."""
    others: list[tuple[torch.Tensor, torch.Tensor]] = []
    for total, gradient in zip(totals, gradients, strict=True):
        if _fits(total, gradient) and (library := _library()) is not None:
            library.add_bf16(total.data_ptr(), gradient.data_ptr(), total.numel(), torch.get_num_threads())
        else:
            others.append((total, gradient))
    if others:
        torch._foreach_add_(*zip(*others, strict=True))


def _fits(total: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Return whether the kernel takes both: it reads one number after the other."""
    types = total.dtype, gradient.dtype
    return (
        types == (torch.float32, torch.bfloat16)
        and is_plain(total)
        and is_plain(gradient)
        and total.shape == gradient.shape
        and total.is_contiguous()
        and gradient.is_contiguous()
    )


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the compiled kernel; None: it could not be compiled."""
    library = compiled_c.load(SOURCE, "gradients are added by operations of torch")
    if library is not None:
        library.add_bf16.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_int]
        library.add_bf16.restype = None
    return library
