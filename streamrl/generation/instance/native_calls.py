"""Calls of C functions on fixed memory, which C runs one after the other (`call.h`): without the 10 to 25 us that
Python takes for each where the weights of a step have pushed all else out of the CPU's caches."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from streamrl.machine import compiled_c

SOURCE = Path(__file__).with_name("layer_ops.c")


class NativeCall(ctypes.Structure):
    """`Call` of the C files."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("pointers", ctypes.c_void_p * 4),
        ("sizes", ctypes.c_long * 5),
        ("number", ctypes.c_float),
    )
    tensors: tuple[torch.Tensor | None, ...]
    """What it reads and writes, so that the memory stays."""


def native_call(
    function: object, tensors: Sequence[torch.Tensor | None], sizes: Sequence[int], number: float = 0.0
) -> NativeCall:
    """Return a call.

    Args:
        function: of a library; what it expects is said in its C file.
        tensors: those whose addresses it gets; None: no address.
        sizes: its sizes.
        number: its number.
    """
    addresses = [None if one is None else one.data_ptr() for one in tensors]
    made = NativeCall(
        ctypes.cast(function, ctypes.c_void_p),  # type: ignore[arg-type]
        (ctypes.c_void_p * 4)(*addresses),
        (ctypes.c_long * 5)(*sizes),
        number,
    )
    made.tensors = tuple(tensors)
    return made


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library of `layer_ops.c`; None: there is no compiler, or it failed."""
    found = compiled_c.load(SOURCE, "norms and gates are those of vLLM")
    if found is not None:
        pointer, size, flag = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
        found.run.argtypes, found.run.restype = [pointer, size], None
        found.norm.argtypes, found.norm.restype = [*[pointer] * 4, size, size, flag, size, size, ctypes.c_float], None
        found.gate.argtypes, found.gate.restype = [pointer, pointer, size, size, flag], None
    return found


class NativeCalls:
    """Calls that run one after the other."""

    def __init__(self, calls: Sequence[NativeCall]) -> None:
        found = library()
        assert found is not None
        self._calls = list(calls)
        self._array = (NativeCall * len(calls))(*calls)
        self._run = found.run

    def __call__(self) -> None:
        self._run(self._array, len(self._array))
