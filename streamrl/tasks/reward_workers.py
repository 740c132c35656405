"""Reward workers as processes: what the rewards in one have started ends with it, however it ends.

pebble, which starts the workers and kills them, ends nothing else. So each worker leads a process group, and a thread
of the pool's process waits for its end and then kills the rest of that group. What is in another group, such as a
process in a session of its own, is found by the variable `MARK`, unless it gets another environment.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import secrets
import sys
import threading
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from streamrl.runtime.processes import kill_group, kill_with_setting

if sys.platform == "linux":
    from multiprocessing.context import ForkServerProcess as StartedProcess
else:
    from multiprocessing.context import SpawnProcess as StartedProcess

METHOD = "forkserver" if sys.platform == "linux" else "spawn"
"""Way in which workers start. Some libraries of other systems do not survive a fork."""
MARK = "STREAMRL_REWARD_WORKER"
"""Variable with a random value, by which all that a worker's rewards have started is found."""

log = logging.getLogger(__name__)


class WorkerContext:
    """The context of `multiprocessing` with which a pool starts its workers."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context(METHOD)
        self._endings: list[threading.Thread] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def Process(self, **given: Any) -> BaseProcess:
        """Return a worker that has not been started."""
        return _WorkerProcess(self._endings, **given)

    def join(self, limit_s: float) -> None:
        """Wait until what ended workers have left has ended; all workers must have ended.

        Args:
            limit_s: most seconds to wait for each worker's.
        """
        for ending in list(self._endings):
            ending.join(limit_s)


class _WorkerProcess(StartedProcess):
    """A worker."""

    def __init__(self, endings: list[threading.Thread], **given: Any) -> None:
        super().__init__(**given)
        self._mark = secrets.token_hex(16)
        self._endings: list[threading.Thread] | None = endings

    def start(self) -> None:
        """Start it, and the thread that waits for its end."""
        endings, self._endings = self._endings, None  # threads cannot be sent to it
        super().start()
        assert endings is not None
        endings[:] = [one for one in endings if one.is_alive()]
        ending = threading.Thread(target=self._end_the_rest, name="rest-of-reward-worker", daemon=True)
        try:
            ending.start()
        except RuntimeError as error:  # there is no thread for it now
            log.warning("what the rewards of a worker start may outlive it: %s", error)
        else:
            endings.append(ending)

    def run(self) -> None:
        """Do the worker's work, in its own process."""
        os.setpgid(0, 0)  # not a session: should the pool's process be killed, its warden ends what is in its session
        os.environ[MARK] = self._mark
        super().run()

    def _end_the_rest(self) -> None:
        """Wait until the worker has ended, and kill what it has left."""
        wait([self.sentinel])
        assert self.pid is not None
        try:
            kill_group(self.pid)
            names = kill_with_setting(f"{MARK}={self._mark}")
        except OSError as error:  # there is no file number for it now
            log.warning("what the rewards of a worker have started may live on: %s", error)
            return
        if names:
            log.warning("ended with a reward worker, in sessions of their own: %s", ", ".join(names))
