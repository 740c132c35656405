"""Matrix products with a few rows in fp32 on a CPU, which is what decoding of a small batch consists of.

They take as long as reading the weights takes, and the libraries' kernels read them at half the memory's speed or less
(oneDNN's, which vLLM uses, at 0.4; MKL's and OpenBLAS's likewise). `few_rows.c` is compiled on first use and kept in
the cache; where there is no compiler, vLLM's own products remain.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import mmap
import os
import platform
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from streamrl.errors import UserError
from streamrl.machine.cpu import this_cpu
from streamrl.machine.model_files import cache_directory
from streamrl.machine.user_folders import is_own
from streamrl.scratch_folders import ScratchFolder

log = logging.getLogger(__name__)

MOST_ROWS = 4
"""Largest number of rows: from five on, vLLM's products, whose weights are in packed blocks, are as fast."""
MOST_BYTES = 1 << 30
"""Limit on the bytes of weights that are kept a second time, in the order that these products read."""
SOURCE = Path(__file__).with_suffix(".c")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
COMPILE_S = 60
HUGE_PAGE = 1 << 21
SOME = 64 << 20
"""Bytes of memory that are allocated at a time."""

Product = Callable[[int, int, int, int, int, int], None]
"""Compiled product: (address of x, of the weights, of y; rows, outputs, inputs)."""


@functools.cache
def product() -> Product | None:
    """Return the compiled function; None: there is no compiler, or it failed."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        return None
    cpu = this_cpu()
    facts = [SOURCE.read_text(), *FLAGS, compiler, platform.machine(), cpu.name, *sorted(cpu.flags)]
    digest = hashlib.blake2b("\n".join(facts).encode(), digest_size=8).hexdigest()
    name = f"few-rows-{digest}.so"
    try:
        with _own_folder(cache_directory() / "compiled", name) as folder:
            library = folder / name
            if not is_own(library):
                part = library.with_suffix(f".{secrets.token_hex(8)}")
                command = [compiler, *FLAGS, str(SOURCE), "-o", str(part)]
                subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S)
                part.chmod(0o700)
                part.replace(library)
            function = ctypes.CDLL(str(library)).few_rows
    except (OSError, subprocess.SubprocessError, AttributeError, UserError) as error:
        log.warning("small batches use vLLM's matrix products, because few_rows.c could not be compiled: %s", error)
        return None
    function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_long] * 3
    function.restype = None
    return function


@contextmanager
def _own_folder(folder: Path, name: str) -> Iterator[Path]:
    """Give a folder that can have a file and to which nobody else can write: this one, or a temporary one if others can
    write to it (a shared cache) or this process cannot (a home folder that is only read)."""
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if is_own(folder) and (os.access(folder, os.W_OK) or is_own(folder / name)):
        yield folder
        return
    with ScratchFolder() as private:
        yield private


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
