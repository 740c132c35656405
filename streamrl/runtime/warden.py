"""The warden: a small process beside another one that makes sure nothing of that one outlives its starters.

    python -I -S warden.py WATCHED STARTER...

It sleeps until the watched process or one of the starters has ended, for whatever reason. If a starter ended, it sends
the watched process SIGTERM, and SIGKILL if that does not help. Once the watched process has ended, it kills what is
left in its process group and its session, such as vLLM's engine and what agents' programs have started. A thread of the
watched process could not do this: it would stand still when the process is stopped or holds Python's lock, and vLLM's
engine can only be forked from a single-threaded process. The kernel's signal at a parent's death
(`processes.end_with_parent`) comes sooner, but a process may ignore it or be in a call that does not return.

This file is run as a script and uses only the standard library.
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
"""Seconds after a starter's death within which everything it started has ended."""
STOP_S = 6.0
"""Seconds of these that the watched process has to end by itself."""
AFTER_S = 2.0
"""Seconds of these for its leftovers: multiprocessing's resource tracker frees shared memory."""
LOOK_S = 0.1
SELDOM_S = 1.0
"""Seconds between polls where the kernel does not report the end of a process (not Linux, Linux before 5.3, gVisor, a
seccomp profile that refuses pidfd_open)."""


def wait_for_an_end(pids: Sequence[int], limit_s: float | None = None) -> int | None:
    """Wait until one of these processes has ended; return its PID, or None once the limit is over.

    A process that its parent has not waited for yet has ended as well; it is left to the parent.

    Args:
        pids: at least one.
        limit_s: seconds; None: wait for ever.
    """
    if not hasattr(os, "pidfd_open"):
        return _look_for_an_end(pids, limit_s)
    with contextlib.ExitStack() as held:
        poll, by_file = select.poll(), {}
        for pid in pids:
            try:
                file = os.pidfd_open(pid)
            except ProcessLookupError:
                return pid
            except OSError:  # refused by this kernel or sandbox
                return _look_for_an_end(pids, limit_s)
            held.callback(os.close, file)
            by_file[file] = pid
            poll.register(file, select.POLLIN)
        found = poll.poll(None if limit_s is None else limit_s * 1000)
        return by_file[found[0][0]] if found else None


def _look_for_an_end(pids: Iterable[int], limit_s: float | None) -> int | None:
    end = None if limit_s is None else time.monotonic() + limit_s
    while True:
        for pid in pids:
            if _has_ended(pid):
                return pid
        if end is not None and time.monotonic() > end:
            return None
        time.sleep(LOOK_S if limit_s is not None else SELDOM_S)


def _has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it is another user's
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            _, _, state = file.read().rpartition(b") ")  # its name before may have brackets, too
    except OSError:  # there is no /proc here, or it has just ended
        return False
    return state[:1] in (b"Z", b"X")


def watch(watched: int, starters: Sequence[int]) -> None:
    """Watch a process and its starters; return when nothing is left of the watched process."""
    gone = wait_for_an_end([watched, *starters])
    if gone != watched:
        with contextlib.suppress(ProcessLookupError):
            os.kill(watched, signal.SIGTERM)
            os.kill(watched, signal.SIGCONT)  # a stopped process handles SIGTERM only after SIGCONT
            if wait_for_an_end([watched], STOP_S) is None:
                os.kill(watched, signal.SIGKILL)
                wait_for_an_end([watched], AFTER_S)
    end = time.monotonic() + AFTER_S
    while (groups := _groups(watched)) and time.monotonic() < end:
        time.sleep(LOOK_S)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def _groups(leader: int) -> set[int]:
    """Return the process groups in which something is left of a process's group or session; empty: it leads none."""
    found = set()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, 0)
        found.add(leader)
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(ValueError, OSError):  # no process, or it has just ended
            if os.getsid(pid := int(name)) == leader:
                found.add(os.getpgid(pid))
    return found


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    first, *others = map(int, sys.argv[1:])
    watch(first, others)
