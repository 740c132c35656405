"""The way in which vLLM starts its processes: the engine of an instance, and the workers of one that has several."""

from __future__ import annotations

import gc
import os
import signal


def fork_where_safe(cuda: bool) -> None:
    """Let vLLM fork its processes, if this one has nothing that a fork would lose; call it just before vLLM starts.

    vLLM's CPU platform has just set "spawn", because a fork loses OpenMP's threads. There are none yet, and a fork
    spares each process a second import of everything (10 s of a core, 250 MB). An engine forks its workers in turn:
    its own threads by then wait for messages, and compute nothing.
    """
    if not cuda and _has_one_thread():
        os.register_at_fork(after_in_child=_forget_signals)
        os.register_at_fork(after_in_child=_leave_frozen)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


def _has_one_thread() -> bool:
    """Return whether this process has a single thread, counting those of C libraries (Linux; elsewhere: False)."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


def _leave_frozen() -> None:
    """Keep what is frozen from the garbage collector for good.

    When an engine ends, vLLM thaws its whole heap and looks through it, twice, so that memory comes back where the
    process goes on. This one ends; looking took seconds of a core, since what it writes to has to be copied in a fork.
    """
    gc.unfreeze = lambda: None


def _forget_signals() -> None:
    """Keep a forked process from passing its own signals to its parent's event loop."""
    signal.set_wakeup_fd(-1)
