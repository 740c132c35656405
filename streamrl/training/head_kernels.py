"""Log-probabilities of target tokens on a CPU, by kernels of our own that are compiled on first use.

They compute what `fused_logprobs.py` computes on GPUs, by the same formulas: `log_sums` reads the head's product twice,
once from memory and once from the caches, and `slopes_` turns it into its gradient in place. Operations of torch read
and write fp32 numbers of that size eight times.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from streamrl.machine import compiled_c
from streamrl.training.cpu_tensors import kernels_take

SOURCE = Path(__file__).with_suffix(".c")


@dataclass(frozen=True)
class Changes:
    """What becomes of the output projection before a token is drawn: softcap tanh(scale z / softcap) / temperature."""

    scale: float
    softcap: float | None
    temperature: float


class _Head(ctypes.Structure):
    """`Head` of the C file."""

    _fields_ = (
        ("rows", ctypes.c_long),
        ("width", ctypes.c_long),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("temperature", ctypes.c_float),
        ("bf16", ctypes.c_int),
    )


def has_kernels(weight: torch.Tensor) -> bool:
    """Return whether there are kernels for a head's weight on this machine."""
    return kernels_take(weight) and _library() is not None


def log_sums(
    products: torch.Tensor, targets: torch.Tensor, changes: Changes
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do the work of `fused_logprobs.log_sums`; rows of `products` beyond those of the targets are not read."""
    results = torch.empty(4, len(targets), dtype=torch.float32)
    _call("log_sums", products, targets, changes, *results)
    logprobs, totals, largest, entropy = results.unbind()
    return logprobs, totals, largest, entropy


def slopes_(
    products: torch.Tensor,
    targets: torch.Tensor,
    largest: torch.Tensor,
    of_others: torch.Tensor,
    of_targets: torch.Tensor,
    changes: Changes,
) -> torch.Tensor:
    """Do the work of `fused_logprobs.slopes` in place, and return the products; rows beyond the targets' become 0."""
    _call("slopes", products, targets, changes, largest, of_others, of_targets)
    products[len(targets) :] = 0.0
    return products


def _call(name: str, products: torch.Tensor, targets: torch.Tensor, changes: Changes, *numbers: torch.Tensor) -> None:
    """Call a function of the C file: products [m, V], targets [n] and numbers [n], n <= m."""
    assert products.is_contiguous() and len(targets) <= len(products)
    half = products.dtype == torch.bfloat16
    cap = 0.0 if changes.softcap is None else changes.softcap
    about = _Head(len(targets), products.shape[-1], changes.scale, cap, changes.temperature, half)
    kept = [targets.long().contiguous(), *(one.float().contiguous() for one in numbers)]
    pointers = (one.data_ptr() for one in (products, *kept))
    getattr(_library(), name)(about, *pointers, torch.get_num_threads())


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the compiled kernels; None: they could not be compiled."""
    library = compiled_c.load(SOURCE, "log-probabilities take operations of torch")
    if library is not None:
        for name, tensors in (("log_sums", 6), ("slopes", 5)):
            function = getattr(library, name)
            function.argtypes = [ctypes.POINTER(_Head), *[ctypes.c_void_p] * tensors, ctypes.c_int]
            function.restype = None
    return library
