"""Processes of one host: ends that follow each other, and whether they can see each other."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """From now on this process gets a signal when the thread that started it ends, however that ends (Linux only;
    elsewhere nothing happens). One that ended before this was called is not noticed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


@functools.cache
def this_host() -> str:
    """Tells hosts, and containers, apart: equal where a process can open what another one has open, through /proc. ""
    where that cannot be known."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
