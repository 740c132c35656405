"""Matrix products with a few rows in fp32 on a CPU, which is what decoding of a small batch consists of.

They take as long as reading the weights takes, and the libraries' kernels read them at half the memory's speed or less
(oneDNN's, which vLLM uses, at 0.4; MKL's and OpenBLAS's likewise). `few_rows.c` is compiled on first use; where there
is no compiler, vLLM's own products remain.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from streamrl.machine import compiled_c

MOST_ROWS = 4
"""Largest number of rows: from five on, vLLM's products, whose weights are in packed blocks, are as fast."""
MOST_BYTES = 1 << 30
"""Limit on the bytes of weights that are kept a second time, in the order that these products read."""
SOURCE = Path(__file__).with_suffix(".c")
HUGE_PAGE = 1 << 21
SOME = 64 << 20
"""Bytes of memory that are allocated at a time."""

Product = Callable[[int, int, int, int, int, int], None]
"""Compiled product: (address of x, of the weights, of y; rows, outputs, inputs)."""


@functools.cache
def product() -> Product | None:
    """Return the compiled function; None: there is no compiler, or it failed."""
    library = compiled_c.load(SOURCE, "small batches use vLLM's matrix products")
    if library is None:
        return None
    function = library.few_rows
    function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_long] * 3
    function.restype = None
    return function


def multiply(function: Product, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x weight', shape [rows, outputs].

    Args:
        function: `product()`.
        x: [rows, inputs], at most `MOST_ROWS` rows.
        weight: [outputs, inputs], contiguous.
    """
    x = x.contiguous()
    y = x.new_empty(x.shape[0], weight.shape[0])
    function(x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.shape[0], *weight.shape)
    return y


class Shelf:
    """Huge pages for copies of weights: sequential reads are a third faster than from small pages."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        """Allow at most `most` bytes for all tensors together."""
        self._left = most
        self._free = torch.empty(0)

    def take(self, shape: torch.Size) -> torch.Tensor | None:
        """Return a new fp32 tensor; None: it would exceed the limit."""
        count = shape.numel()
        self._left -= 4 * count
        if self._left < 0:
            return None
        if self._free.numel() < count:
            size = max(SOME, 4 * count) + HUGE_PAGE
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones get no huge pages
            with suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
            values = torch.frombuffer(memory, dtype=torch.float32)  # keeps the memory mapped
            self._free = values[(-values.data_ptr() % HUGE_PAGE) // 4 :]
        taken, self._free = self._free[:count], self._free[count:]
        return taken.view(shape)
