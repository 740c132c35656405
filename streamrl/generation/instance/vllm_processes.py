"""The way in which vLLM starts its processes: the engine of an instance, and the workers of one that has several."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import psutil

from streamrl.runtime.processes import kill_with_children


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


def end_engine(llm: Any) -> None:
    """End the processes of an `AsyncLLM`, and close its sockets.

    vLLM kills those that have not ended within seconds, and raises an error if one of them ends at that moment, as it
    looks up their names. Then the others would go on, and the open sockets would block this process when it collects
    its garbage.
    """
    try:
        llm.shutdown()
    except psutil.NoSuchProcess:
        resources = llm.engine_core.resources
        for process in resources.engine_manager.processes:
            kill_with_children(process.pid)
        resources()
        llm.shutdown()  # what the error has kept it from


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
