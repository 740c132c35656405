"""A process that does not outlive the one that started it."""

from __future__ import annotations

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """From now on this process gets a signal when the thread that started it ends, however that ends (Linux only;
    elsewhere nothing happens). One that ended before this was called is not noticed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
