"""Processes of one host: ends that follow each other, and whether they can see each other."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil

from streamrl.runtime import warden

PR_SET_PDEATHSIG = 1


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """From now on this process gets a signal when the thread that started it ends, however that ends (Linux only;
    elsewhere nothing happens). One that ended before this was called is not noticed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def start_warden(starters: Sequence[int]) -> None:
    """From now on this process, and all of its process group if that is its own, ends within `ENDS_WITHIN_S` of the
    death of one of its starters, whatever it is doing then; and what is left of the group ends after it.

    Raises:
        OSError: no process can be started.
    """
    command = [sys.executable, "-I", "-S", warden.__file__, str(os.getpid()), *map(str, starters)]
    null = subprocess.DEVNULL
    subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)


def is_alive(pid: int) -> bool:
    """Whether there is such a process that has not ended."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def kill_all_with(starter: int) -> None:
    """From now on, this process and all that it has started are killed when another one has ended: for processes that
    have threads and nothing to close."""
    threading.Thread(target=_kill_after, args=(starter,), name="starter", daemon=True).start()


def _kill_after(starter: int) -> None:
    warden.wait_for_an_end([starter])
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    os.kill(os.getpid(), signal.SIGKILL)


@functools.cache
def this_host() -> str:
    """Tells hosts, and containers, apart: equal where a process can open what another one has open, through /proc. ""
    where that cannot be known."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
