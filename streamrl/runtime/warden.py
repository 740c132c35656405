"""A small process beside another one, which sees to it that nothing is left of that one when it has to end.

    python -I -S warden.py WATCHED STARTER...

It waits, without using any time, until one of the processes that it is told has ended, however that ended. If that is
one of the starters, it tells the watched process to stop, and kills it if it does not; when the watched process has
ended, it kills what is left in its process group, such as vLLM's engine. A thread of the watched process could not do
that: it would stand still where that is stopped or holds Python's lock, and vLLM's engine can only be forked from a
process that has no other thread. Signals of the system at a parent's death (`processes.end_with_parent`) come sooner,
but a process may be deaf to them, or be in a call that does not return.

This file is run as it is, with nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Sequence

ENDS_WITHIN_S = 10.0
"""Seconds after a starter's death, however it died, by which nothing that it started is left."""
STOP_S = 6.0
"""The part of them that the watched process has to end by itself."""
AFTER_S = 2.0
"""The part of them for what it leaves behind: multiprocessing's resource tracker gives shared memory back."""
LOOK_S = 0.1
SELDOM_S = 1.0
"""Between looks where the system cannot tell that a process has ended (it is not Linux)."""


def wait_for_an_end(pids: Sequence[int], limit_s: float | None = None) -> int | None:
    """Waits until one of some processes has ended; returns its id, or None once the limit is over."""
    if not hasattr(os, "pidfd_open"):
        return _look_for_an_end(pids, limit_s)
    with contextlib.ExitStack() as held:
        poll, by_file = select.poll(), {}
        for pid in pids:
            try:
                file = os.pidfd_open(pid)
            except ProcessLookupError:
                return pid
            held.callback(os.close, file)
            by_file[file] = pid
            poll.register(file, select.POLLIN)
        found = poll.poll(None if limit_s is None else limit_s * 1000)
        return by_file[found[0][0]] if found else None


def _look_for_an_end(pids: Iterable[int], limit_s: float | None) -> int | None:
    end = None if limit_s is None else time.monotonic() + limit_s
    while True:
        for pid in pids:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return pid
            except PermissionError:
                pass
        if end is not None and time.monotonic() > end:
            return None
        time.sleep(LOOK_S if limit_s is not None else SELDOM_S)


def watch(watched: int, starters: Sequence[int]) -> None:
    """Returns when nothing is left of the watched process."""
    gone = wait_for_an_end([watched, *starters])
    if gone != watched:
        with contextlib.suppress(ProcessLookupError):
            os.kill(watched, signal.SIGTERM)
            os.kill(watched, signal.SIGCONT)  # one that is stopped would not hear of it
            if wait_for_an_end([watched], STOP_S) is None:
                os.kill(watched, signal.SIGKILL)
                wait_for_an_end([watched], AFTER_S)
    end = time.monotonic() + AFTER_S
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has no group of its own, or that is empty
        while time.monotonic() < end:
            os.killpg(watched, 0)
            time.sleep(LOOK_S)
        os.killpg(watched, signal.SIGKILL)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    first, *others = map(int, sys.argv[1:])
    watch(first, others)
