"""Matrix products with a few rows on a CPU, which is what decoding of a small batch consists of.

They take as long as reading the weights takes, and the libraries' kernels read them at half the memory's speed or less
(oneDNN's, which vLLM uses, at 0.4 in fp32 and 0.6 in bf16; MKL's and OpenBLAS's likewise). A C function for each type
is compiled on first use; where there is no compiler, vLLM's own products remain.
"""

from __future__ import annotations

import ctypes
import functools
import json
import logging
import math
import mmap
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from streamrl.generation.instance.engine_variables import FEW_ROWS_SOURCES
from streamrl.generation.instance.native_calls import NativeCall, library, native_call
from streamrl.machine import compiled_c
from streamrl.machine.cpu import this_cpu
from streamrl.machine.engine_settings import MOST_ARRANGED_BYTES
from streamrl.machine.first_time import announce
from streamrl.machine.kept_results import keep_result, result_file

log = logging.getLogger(__name__)

SOURCES = {getattr(torch, name): Path(__file__).with_name(source) for name, source in FEW_ROWS_SOURCES.items()}
"""C file of each type."""
ARRANGED = "few_rows_weight"
"""Attribute of vLLM's linear layers: weights in the order that these products read."""
BIAS = "few_rows_bias"
"""Attribute of vLLM's linear layers: the bias in the weights' type, where vLLM keeps it in another."""
ALIGNMENT = 64
"""Bytes: a line of the CPU's caches."""
HUGE_PAGE = 1 << 21
READ_BYTES = 128 << 20
"""Bytes of weights that are read to find out whether prefetching helps: more than a core's caches hold."""
TRIES = 5
"""Reads with and as many without, of which the quickest count."""
SOME = 64 << 20
"""Bytes of memory that are allocated at a time."""


@dataclass(frozen=True)
class Products:
    """Compiled products of one type."""

    function: Callable[[int, int, int | None, int, int, int, int], None]
    """(address of x, of the weights, of the bias or None, of y; rows, outputs, inputs)."""
    most_rows: int
    """Largest number of rows; with more, vLLM's products are as fast, which read weights in blocks as well."""
    as_call: object
    """The function for a `NativeCall`."""
    arrangement: Callable[[int, int, int, int], None] | None
    """(address of weights, of a copy; outputs, inputs) copies weights in the order in which they are read; None: they
    are read as they are."""

    def fits(self, weight: torch.Tensor) -> bool:
        """Return whether there are products with such weights, [outputs, inputs]."""
        if weight.dim() != 2 or not weight.numel() or weight.is_meta:
            return False
        return self.arrangement is None or (weight.shape[0] % 16 == 0 and weight.shape[1] % 32 == 0)

    def arrange(self, weight: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        """Write weights to a contiguous tensor of the same shape, in the order that `multiply` expects; return it."""
        if self.arrangement is None:
            return copy.copy_(weight)
        weight = weight.contiguous()
        self.arrangement(weight.data_ptr(), copy.data_ptr(), *weight.shape)
        return copy


@functools.cache
def products(dtype: torch.dtype) -> Products | None:
    """Return the products of a type; None: the type or the CPU has none, there is no compiler, or it failed."""
    if dtype not in SOURCES:
        return None
    loaded = compiled_c.load(SOURCES[dtype], "small batches use vLLM's matrix products")
    if loaded is None:
        return None
    loaded.most_rows.restype = ctypes.c_long
    if not (most_rows := loaded.most_rows()):
        return None
    function = loaded.few_rows
    function.argtypes, function.restype = [ctypes.c_void_p] * 4 + [ctypes.c_long] * 3, None
    loaded.prefetch.argtypes, loaded.prefetch.restype = [ctypes.c_int], None
    loaded.prefetch(_gains_by_prefetching(loaded, dtype))
    arrangement = getattr(loaded, "arrange", None)
    if arrangement is not None:
        arrangement.argtypes, arrangement.restype = [ctypes.c_void_p] * 2 + [ctypes.c_long] * 2, None
    return Products(function, most_rows, loaded.few_rows_call, arrangement)


def _gains_by_prefetching(loaded: ctypes.CDLL, dtype: torch.dtype) -> bool:
    """Return whether a type's products are faster if they prefetch weights, measured now or on this machine before.

    CPUs whose own prefetchers are better lose by it: an AMD EPYC with AVX2 alone a fifth of its speed.
    """
    path = result_file("prefetching", this_cpu().fingerprint(Path(loaded._name).name, READ_BYTES, TRIES))
    with suppress(OSError, ValueError, TypeError, KeyError):
        return bool(json.loads(path.read_bytes())["gains"])
    announce("measuring whether prefetching makes this CPU read weights faster")
    inputs = 1024
    weight = Shelf(READ_BYTES).take(torch.Size((READ_BYTES // dtype.itemsize // inputs, inputs)), dtype)
    if weight is None:
        return True
    weight.fill_(1)
    x, y = torch.ones(1, inputs, dtype=dtype), torch.empty(1, len(weight), dtype=dtype)
    quickest = {False: math.inf, True: math.inf}
    for _ in range(TRIES):
        for is_on in quickest:
            loaded.prefetch(is_on)
            began = time.thread_time()  # not what a busy machine gives to others meanwhile
            loaded.few_rows(x.data_ptr(), weight.data_ptr(), None, y.data_ptr(), 1, *weight.shape)
            quickest[is_on] = min(quickest[is_on], time.thread_time() - began)
    gains = quickest[True] < quickest[False]
    keep_result(path, {"gains": gains, "with_s": quickest[True], "without_s": quickest[False], "cpu": str(this_cpu())})
    return gains


def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x weight' + bias, shape [rows, outputs].

    Args:
        x: [rows, inputs], at most `Products.most_rows` rows, of a type that has `products`.
        weight: [outputs, inputs], as `Products.arrange` wrote it.
        bias: [outputs], contiguous; of another type where vLLM keeps it in fp32 for its own products.
        out: where to write it, contiguous; None: new memory.
    """
    found = products(x.dtype)
    assert found is not None
    x = x.contiguous()
    y = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
    b = None if bias is None else bias.to(x.dtype)
    address = None if b is None else b.data_ptr()
    found.function(x.data_ptr(), weight.data_ptr(), address, y.data_ptr(), x.shape[0], *weight.shape)
    return y


def product_call(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> NativeCall | None:
    """Return the call of `multiply`, with its arguments; None: there is none, or they would have to be copied first."""
    found = products(x.dtype)
    is_copied = not x.is_contiguous() or (bias is not None and bias.dtype != x.dtype)
    if found is None or library() is None or is_copied:
        return None
    return native_call(found.as_call, (x, weight, bias, out), (x.shape[0], *weight.shape))


_LIBRARY = torch.library.Library("streamrl", "FRAGMENT")
_LIBRARY.define("few_rows(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_LIBRARY.impl("few_rows", multiply, "CPU")
OPERATION = torch.ops.streamrl.few_rows.default
"""`multiply` as an operation of torch, which can be recorded."""


class Shelf:
    """Huge pages for copies of weights: sequential reads are a third faster than from small pages."""

    def __init__(self, most: int = MOST_ARRANGED_BYTES) -> None:
        """Allow at most `most` bytes for all tensors together."""
        self._left = most
        self._memory: mmap.mmap | None = None
        self._start = self._end = 0
        """Free bytes of the memory."""

    def take(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a new tensor, with a storage of its own; None: it would exceed the limit, or there is no memory."""
        size = -(-shape.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if size > self._left:
            return None
        self._left -= size
        if self._memory is None or self._end - self._start < size:
            self._end = max(SOME, size) + HUGE_PAGE
            try:  # shared memory would have small pages
                self._memory = mmap.mmap(-1, self._end, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except OSError as error:
                log.warning("small batches use vLLM's matrix products for the rest of the weights: %s", error)
                self._memory, self._left = None, 0
                return None
            with suppress(OSError):  # a kernel without huge pages
                self._memory.madvise(mmap.MADV_HUGEPAGE)
            self._start = -torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr() % HUGE_PAGE
        taken = torch.frombuffer(self._memory, dtype=dtype, count=shape.numel(), offset=self._start)
        self._start += size
        return taken.view(shape)  # keeps the memory mapped
