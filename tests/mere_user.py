"""What a user meets who may not open a file, also where tests run as root."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

VERSION_3 = 0x20080522
"""Form of the two calls' arguments: two sets of 32 capabilities each."""
OVERRIDE = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, with which root opens whatever it likes."""


def _set_override(held: bool) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(VERSION_3, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0, os.strerror(ctypes.get_errno())
    sets[0] = sets[0] | (OVERRIDE & sets[1]) if held else sets[0] & ~OVERRIDE
    assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())


@contextlib.contextmanager
def without_right_to(*paths: Path) -> Iterator[None]:
    """Let nobody open these files and folders, nor this thread, although it may be root's."""
    modes = {path: path.stat().st_mode for path in paths}
    for path in paths:
        path.chmod(0)
    if root := os.geteuid() == 0:
        _set_override(False)
    try:
        yield
    finally:
        if root:
            _set_override(True)
        for path, mode in modes.items():
            path.chmod(mode)
