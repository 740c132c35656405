"""The reward pool: scores completions in worker processes, so that a hang or crash costs one reward only.

Each worker builds the `Scorer` once, then takes one completion at a time. A try ends in one of these ways:

    it returns a number      -> its reward
    it returns another thing -> void, cause verifier; not tried again
    it raises                -> void, with the cause that the exception stands for
    it exceeds the limit     -> the worker is killed and replaced; void, 'timed out after 20 s'
    its worker dies          -> the worker is replaced; void, how it died ('SIGSEGV', 'exit code 3')
    the pool itself breaks   -> a new pool scores the completion again, at most `POOL_ATTEMPTS` times (pebble gives up
                                when an idle worker dies, as at its start)

Where it returns or raises in a process that it has forked, that process ends; what happens in the worker counts. Other
processes that it has started end with the worker (see `reward_workers`).

A void try is repeated after a pause, in which it holds no worker, until there were `attempts` of them.

The limit covers scoring alone: a worker takes a completion only after it has started, and a completion waits here, not
in the pool, until a worker is free. Workers are forked from a server (`multiprocessing`'s), not from the parent, which
has threads and sockets. The server has one thread and has imported the libraries of the verifiers, so a replaced worker
is ready at once; what belongs to a user is imported in each worker. Workers die with the parent, for whatever reason,
and once started write to a log file, never to the terminal.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, ProcessPool

from streamrl.config.recovery import pause_after
from streamrl.config.tasks import Task
from streamrl.errors import RunFailed, UserError
from streamrl.rollouts.void import Void, VoidCause
from streamrl.runtime.output_pipe import shorten
from streamrl.runtime.processes import end_copy, end_with_parent, exit_text, forget_main
from streamrl.tasks.reward_workers import WorkerContext
from streamrl.tasks.void_reward import VoidReward, cause_of, failures_of, may_retry, one_line, traceback_of, void_text

POOL_ATTEMPTS = 3
RESTART_S = 60.0
"""Seconds that a replaced worker may take to start (importing a user's verifier may take several)."""
LONGEST_END_S = 10.0
"""Seconds for which `close` waits: pebble gives each worker that ignores SIGTERM 3 s before SIGKILL."""

OWN_FOLDER = Path(__file__).parent
"""Whose frames a traceback is shown without."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RewardResult:
    """Outcome of scoring one completion."""

    reward: float | None
    """Finite reward; None: void."""
    void: Void | None
    """Why there is no reward; None: there is one."""
    seconds: float
    """Seconds of the last try in the verifier; if its worker died, seconds until that was noticed."""
    traceback: str = ""
    """End of the traceback from the reward function on; '': it did not raise."""
    attempts: int = 1
    """Number of tries."""


@dataclass(frozen=True)
class _Try:
    """Outcome of one try."""

    result: RewardResult
    retry: bool = True
    """Whether another try may end differently."""


def _void(cause: VoidCause, text: str, seconds: float, retry: bool = True, trace: str = "") -> _Try:
    return _Try(RewardResult(None, Void(cause, text), seconds, trace), retry)


class RewardPool:
    """The reward workers of a site. Use it from one event loop; `start` first, `close` last."""

    def __init__(
        self,
        tasks: Sequence[Task],
        seed: int,
        workers: int,
        timeout_s: float = 20.0,
        log_file: Path | None = None,
        attempts: int = 1,
        pause_s: float = 0.0,
        longest_pause_s: float = 600.0,
    ) -> None:
        """Prepare the pool; no worker starts yet.

        Args:
            tasks: the run's tasks.
            seed: the run's seed.
            workers: number of worker processes.
            timeout_s: time limit of one try in seconds.
            log_file: file to which the workers' output is appended; None: discarded.
            attempts: most tries of one reward.
            pause_s: seconds before the second try; doubled before each further one.
            longest_pause_s: most seconds before a try.
        """
        self._log_file = str(log_file.absolute()) if log_file is not None else os.devnull
        self._initargs = (list(tasks), seed, self._log_file)
        self._imports = _imports_of(tasks)
        self._workers = workers
        self._timeout_s = timeout_s
        self._attempts, self._pause_s, self._longest_pause_s = attempts, pause_s, longest_pause_s
        self._slots = asyncio.Semaphore(workers)
        self._pool: ProcessPool | None = None
        self._context = WorkerContext()
        self._waiting: set[asyncio.Future[Any]] = set()
        self._ending: list[threading.Thread] = []
        self._closed = False

    async def start(self, timeout_s: float = 120.0) -> None:
        """Start the workers and wait until one is ready to score (the others follow on their own).

        Raises:
            UserError: a reward function or a task is wrong.
            RunFailed: no worker is ready within `timeout_s` seconds, or the workers die at their start.
        """
        try:
            problem = await self._run(_startup_problem, limit_s=timeout_s, restart_s=0.0)
        except (TimeoutError, ProcessExpired, BrokenProcessPool) as error:
            self.close()
            raise RunFailed(f"the reward workers did not start: {error} (their log: {self._log_file})") from error
        if problem is not None:
            self.close()
            raise UserError(problem)

    async def score(self, task: str, completion: str, reward_input: dict[str, Any]) -> RewardResult:
        """Score a completion; whatever fails makes the reward void.

        Each try waits for a free worker, then at most the time limit (and a worker's restart).

        Raises:
            RuntimeError: the pool is closed.
        """
        for number in range(1, self._attempts + 1):
            found = await self._try(task, completion, reward_input)
            if found.result.void is None or not found.retry or number == self._attempts:
                break
            await asyncio.sleep(pause_after(number, self._pause_s, self._longest_pause_s))
        return replace(found.result, attempts=number)

    async def _try(self, task: str, completion: str, reward_input: dict[str, Any]) -> _Try:
        """Score a completion once.

        Raises:
            RuntimeError: the pool is closed.
        """
        async with self._slots:
            began = time.monotonic()
            cause = ""
            for _ in range(POOL_ATTEMPTS):
                try:
                    outcome: _Try = await self._run(
                        _score, task, completion, reward_input, limit_s=self._timeout_s, restart_s=RESTART_S
                    )
                    return outcome
                except TimeoutError:
                    return _void(VoidCause.TIMEOUT, f"timed out after {self._timeout_s:g} s", self._timeout_s)
                except ProcessExpired as death:
                    text = f"the reward's process died: {exit_text(death.exitcode)}"
                    return _void(VoidCause.CRASH, text, time.monotonic() - began)
                except BrokenProcessPool as broken:
                    cause = str(broken) or "a worker died"
                    log.warning("reward workers are restarted: %s", cause)
                except Exception as error:
                    if self._closed:
                        raise
                    log.warning("a reward's worker failed outside of the reward: %s", one_line(error))
                    return _void(cause_of(error), one_line(error), time.monotonic() - began)
            text = f"no reward after {POOL_ATTEMPTS} restarts of the workers: {cause}"
            return _void(VoidCause.CRASH, text, time.monotonic() - began)

    def close(self) -> None:
        """End all workers at once, even those that hang, with what their rewards have started.

        Every waiting `score` raises RuntimeError.
        """
        self._closed = True
        for future in list(self._waiting):
            future.cancel()
        if self._pool is not None:
            self._discard(self._pool)
        for thread in self._ending:
            thread.join(LONGEST_END_S)
        self._ending.clear()

    async def _run(self, function: Callable[..., Any], *args: Any, limit_s: float, restart_s: float) -> Any:
        """Run a function in a worker.

        Raises:
            TimeoutError: it ran for more than `limit_s`.
            ProcessExpired: its worker died.
            BrokenProcessPool: the pool gave up, or did not answer within both limits; the next call makes a new pool.
        """
        pool = self._live_pool()
        try:
            future = asyncio.wrap_future(pool.schedule(function, args=args, timeout=limit_s))
        except RuntimeError as error:  # it broke since the check
            raise BrokenProcessPool(str(error)) from error
        self._waiting.add(future)
        try:
            # pebble enforces the limit; this deadline is for a worker that never becomes ready
            done, _ = await asyncio.wait({future}, timeout=limit_s + restart_s)
        finally:
            self._waiting.discard(future)
            if not future.done():
                future.cancel()  # kills the worker if it has begun
        shorten(Path(self._log_file))
        if self._closed:
            raise RuntimeError("the reward pool is closed")
        if not done:
            self._discard(pool)
            raise BrokenProcessPool(f"no worker was ready within {limit_s + restart_s:g} s")
        if future.cancelled():  # a sibling discarded the pool
            raise BrokenProcessPool("the workers were restarted")
        return future.result()

    def _live_pool(self) -> ProcessPool:
        if self._closed:
            raise RuntimeError("the reward pool is closed")
        if self._pool is not None and not self._pool.active:
            self._discard(self._pool)
        if self._pool is None:
            # with the same hash seed as the prompt source, workers make the same items (see `procedural`)
            os.environ.setdefault("PYTHONHASHSEED", "0")
            multiprocessing.set_forkserver_preload(self._imports)
            self._pool = ProcessPool(
                max_workers=self._workers,
                initializer=_start_worker,
                initargs=self._initargs,
                context=self._context,
            )
        return self._pool

    def _discard(self, pool: ProcessPool) -> None:
        """End a pool's workers, and what their rewards have started, in the background."""
        if pool is not self._pool:
            return
        self._pool = None
        for future in list(self._waiting):
            future.cancel()
        pool.stop()
        context, self._context = self._context, WorkerContext()
        thread = threading.Thread(target=_join, args=(pool, context), name="end-reward-workers", daemon=True)
        thread.start()
        self._ending.append(thread)


def _join(pool: ProcessPool, context: WorkerContext) -> None:
    """Wait until a stopped pool's workers have ended, and what their rewards have started."""
    pool.join()
    context.join(LONGEST_END_S)


def _imports_of(tasks: Sequence[Task]) -> list[str]:
    """Return the modules that every worker needs, user's excepted: those may keep state, start threads, or hang."""
    return ["streamrl.tasks.rewards", *sorted({task.library for task in tasks if task.library})]


# --- inside a worker ---


@dataclass
class _Worker:
    """State of a worker process between completions: pebble passes a task nothing but its arguments."""

    scorer: Any = None
    problem: str | None = "the worker was not started"
    given: tuple[list[Task], int] = field(default_factory=lambda: ([], 0))
    """What the scorer is made of: the tasks and the seed."""
    pid: int = 0
    """Its process id, which a process that a reward forks has not."""


_worker = _Worker()


def _start_worker(tasks: list[Task], seed: int, log_file: str) -> None:
    """Initialise a worker; keep a failure for `_startup_problem`, because an exception here would be lost."""
    _die_with_pool()
    _write_to(log_file)
    # pebble's own handler runs Python code, which would never run while a verifier hangs in C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _make_every_exit_visible()
    forget_main()
    _worker.pid, _worker.given = os.getpid(), (tasks, seed)
    _make_scorer()


def _make_scorer() -> None:
    """Make the worker's scorer, which imports what belongs to a user, or keep why it cannot be made."""
    try:
        from streamrl.tasks.rewards import Scorer

        _worker.scorer, _worker.problem = Scorer(*_worker.given), None
    except UserError as error:
        _worker.problem = str(error)
    except BaseException as error:
        _log_exception()
        _worker.problem = f"a reward worker failed to start: {type(error).__name__}: {error}"


def _startup_problem() -> str | None:
    return _worker.problem


def _score(task: str, completion: str, reward_input: dict[str, Any]) -> _Try:
    """Score in the worker; exceptions become text, as some cannot be sent to another process."""
    began = time.perf_counter()
    try:
        if _worker.problem is not None:  # it has replaced another while the user's module was edited, say
            importlib.invalidate_caches()
            _make_scorer()
        if _worker.problem is not None:
            raise UserError(_worker.problem)
        reward = _worker.scorer.score(task, completion, reward_input)
        end_copy(_worker.pid)
    except BaseException as raised:  # SystemExit too: sys.exit() in a reward is an error like any other
        if os.getpid() != _worker.pid and not isinstance(raised, SystemExit):
            _log_exception()
        end_copy(_worker.pid, raised)
        seconds, failed, trace = time.perf_counter() - began, failures_of(raised)[0], traceback_of(raised, OWN_FOLDER)
        if not isinstance(failed, VoidReward):
            _log_exception()
        return _void(cause_of(failed), void_text(failed), seconds, may_retry(failed), trace)
    return _Try(RewardResult(reward, None, time.perf_counter() - began))


def _log_exception() -> None:
    """Write the traceback of the current exception to the log, if that can be written to."""
    with contextlib.suppress(OSError, ValueError):  # a full disk, or a reward has closed it
        traceback.print_exc()


def _die_with_pool() -> None:
    """Let the kernel kill this process when the server that forked it ends, which ends with the pool's process (Linux).

    Elsewhere an idle worker ends when it finds its pipe closed.
    """
    end_with_parent(signal.SIGKILL)
    # the server ends once all have closed this pipe, and every worker has a copy of it, so that it could fork as well
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():  # it died before the signal was set up
        os._exit(1)


def _write_to(log_file: str) -> None:
    """Redirect standard output and error to the log, also for C code and for processes that a reward starts."""
    descriptor = os.open(log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=True, errors="replace")  # type: ignore[union-attr]


def _make_every_exit_visible() -> None:
    """Turn exit code 0 into an error: pebble takes it for a finished worker, and waits out the limit."""
    worker, leave = os.getpid(), os._exit

    def visible_exit(status: int) -> None:
        leave(status or 70 if os.getpid() == worker else status)

    os._exit = visible_exit  # type: ignore[assignment]
