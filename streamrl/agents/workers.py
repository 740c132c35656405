"""The agent workers of a site: processes that play episodes, many at once in each, and whatever one of them does.

    an agent returns, raises, or exceeds a deadline   -> its outcome (see `worker.py`); others notice nothing
    it blocks the event loop of its worker            -> the worker names it: its episode is void, cause timeout; the
                                                         worker is replaced, and the others are to be run again
    its worker dies, or is silent                     -> one episode in it: void, cause crash. Several: nobody knows
                                                         whose fault it was, so all are to be run again, each in a
                                                         worker of its own, and only what dies there is void; as
                                                         many workers as there are cores play them
    a coroutine or a tool's thread does not end       -> the worker gets no more episodes, and is replaced

A worker that dies is restarted, after a pause that grows while it dies before it is ready. Workers are spawned: their
owner has threads and sockets. What they print goes to the log, up to a limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from streamrl.agents.agent_program import play_program
from streamrl.agents.environment_player import EnvironmentPlayer
from streamrl.agents.episode import EpisodeOrder, EpisodeOutcome
from streamrl.agents.worker_frames import (
    ALIVE_S,
    Begin,
    Play,
)
from streamrl.agents.worker_process import AgentWait, WorkerProcess, void_outcome
from streamrl.config.tasks import AgentTask
from streamrl.errors import RunFailed, UserError
from streamrl.machine.own_share import usable_cores
from streamrl.rollouts.void import VoidCause
from streamrl.runtime.output_pipe import OutputLog
from streamrl.tasks.void_reward import one_line

START_S = 120.0
"""Seconds that a worker may take to be ready, unless `start` is told otherwise."""
RESTART_S = 60.0
"""Seconds that an episode waits for a worker that is restarted, beyond those that it may take to be ready."""
FEWEST_ALONE = 2
"""Workers for one episode each that may run at once, on however few cores."""
LONGEST_PAUSE_S = 30.0
SILENT_S = 10.0
"""Seconds that a worker may be silent beyond the time that an agent may block it."""
PROGRAMS = 32
"""Programs that run at once; further ones wait."""

log = logging.getLogger(__name__)
Made = TypeVar("Made")


class EpisodeWorkers:
    """The agent workers of a site. Use it from one event loop; `start` first, `close` last."""

    def __init__(self, tasks: Sequence[AgentTask], count: int, log_file: Path | None = None) -> None:
        """Prepare the workers; none starts yet.

        Args:
            tasks: the run's agent tasks.
            count: number of worker processes.
            log_file: file to which everything that agents print is appended; None: discarded.
        """
        self.tasks = {task.key: task for task in tasks}
        self._count = count
        self._log = OutputLog(log_file)
        played = [task for task in tasks if task.environment is not None]
        self._environments = EnvironmentPlayer(played, self._log)
        self._workers: set[WorkerProcess] = set()
        """Those that live; each leaves it once all that it sent has been read."""
        self._some_ready = asyncio.Condition()
        self._suspects: set[str] = set()
        """Episodes one of which has killed a worker; each runs alone next time."""
        self._alone = asyncio.Semaphore(max(FEWEST_ALONE, usable_cores()))
        self._programs = asyncio.Semaphore(PROGRAMS)
        self._program_starts: dict[int, float] = {}
        """When the programs that run were started, in unix seconds, by the id of the order's object: after a restart of
        the service the same episode may be led again before its first program has ended."""
        self._background: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._start_s = START_S
        """Seconds that a worker may take to be ready."""

    async def start(self, timeout_s: float = START_S) -> None:
        """Start the workers, and wait until all are ready.

        Raises:
            UserError: an agent cannot be imported, or is no coroutine; an environment does not start.
            RunFailed: the workers are not ready within `timeout_s` seconds, or die at their start.
        """
        self._start_s = timeout_s
        await self._environments.start(timeout_s)
        if not self._coroutines():
            return
        started = await asyncio.gather(*(self._start_worker() for _ in range(self._count)))
        if problem := next((worker.problem for worker in started if worker.problem), ""):
            await self.close()
            raise UserError(problem)
        if dead := next((worker for worker in started if worker.ended), None):
            await self.close()
            raise RunFailed(f"the agent workers did not start: {dead.how} {self._log.where}")
        for worker in started:
            self._join(worker)
        self._do(self._watch())

    async def run(self, order: EpisodeOrder, base_url: str, api_key: str) -> EpisodeOutcome:
        """Run the agent of one episode to its end; a failure is a void outcome, never an exception.

        Args:
            order: the episode.
            base_url: what an OpenAI client takes as its base URL.
            api_key: what it takes as its key; of this episode alone.
        """
        task = self.tasks[order.task]
        if task.command is not None:
            async with self._programs:
                limits, take = task.deadlines, self._log.write
                self._program_starts[id(order)] = time.time()
                try:
                    return await self._until_closed(play_program(task.command, order, base_url, api_key, limits, take))
                finally:
                    del self._program_starts[id(order)]
        if task.environment is not None:
            return await self._until_closed(self._environments.play(order, base_url, api_key))
        play = Play(order=order, base_url=base_url, api_key=api_key)
        if order.sample_id in self._suspects:
            return await self._until_closed(self._run_alone(play))
        worker = await self._free_worker()
        if worker is None:
            return void_outcome(
                VoidCause.ENVIRONMENT, f"no agent worker was ready within {self._patience_s():g} s {self._log.where}"
            )
        return await worker.play(play)

    async def _until_closed(self, episode: Coroutine[Any, Any, EpisodeOutcome]) -> EpisodeOutcome:
        """Play an episode that is in none of the workers for all; `close` ends it, with a void outcome."""
        playing = self._do(episode)
        try:
            return await playing
        except asyncio.CancelledError:
            if not self._closed:
                playing.cancel()
                raise
            return void_outcome(VoidCause.CRASH, "the agent workers were closed")

    def waiting(self) -> dict[str, AgentWait]:
        """Return the tools that open episodes wait for, by sample id; agents that are programs do not say."""
        return {wait.sample_id: wait for worker in self._workers for wait in worker.doing.values()}

    def program_start(self, order: EpisodeOrder) -> float | None:
        """Return when the program of an open episode was started, in unix seconds; None: it is not running."""
        return self._program_starts.get(id(order))

    async def close(self) -> None:
        """End all workers at once, even those that hang; every waiting `run` returns a void outcome."""
        self._closed = True
        for worker in list(self._workers):
            worker.kill("the agent workers were closed")
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*(worker.reading for worker in self._workers), *self._background, return_exceptions=True)
        self._workers.clear()
        await self._environments.close()
        self._log.close()

    async def _run_alone(self, play: Play) -> EpisodeOutcome:
        async with self._alone:
            self._suspects.discard(play.order.sample_id)
            try:
                worker = await self._ready_worker(self._patience_s())
            except RunFailed as error:
                return void_outcome(VoidCause.ENVIRONMENT, str(error))
            try:
                outcome = await worker.play(play)
                await worker.idle.wait()  # the agent may have left behind what has to be ended in good order
                return outcome
            finally:
                worker.kill("it was for one episode")
                await worker.has_ended()

    async def _ready_worker(self, patience_s: float = math.inf) -> WorkerProcess:
        """Start a worker; one that does not become ready, or cannot be started, is tried again after a pause.

        Raises:
            RunFailed: none is ready, and `patience_s` seconds are over.
        """
        until, pause = time.monotonic() + patience_s, 1.0
        while True:
            try:
                worker = await self._start_worker()
                if not worker.ended and not worker.problem:
                    return worker
                why = worker.problem or worker.how
            except OSError as error:  # there is no memory, process number or file number for it now
                why = one_line(error)
            log.warning("an agent worker did not start: %s", why)
            if time.monotonic() + pause > until:
                raise RunFailed(f"the agent worker did not start: {why}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _start_worker(self) -> WorkerProcess:
        """Start a worker, and wait until it is ready or has ended; one that takes too long is killed.

        Raises:
            OSError: the process cannot be started.
        """
        worker = await WorkerProcess.start(self._log, self._suspects)
        self._workers.add(worker)
        worker.reading.add_done_callback(lambda _: self._workers.discard(worker))
        worker.send(Begin(tasks=[task.model_dump(mode="json") for task in self._coroutines()]))
        try:
            async with asyncio.timeout(self._start_s):
                await worker.ready.wait()
        except TimeoutError:
            worker.kill(f"it was not ready within {self._start_s:g} s", VoidCause.TIMEOUT)
            await worker.has_ended()
        except asyncio.CancelledError:
            worker.kill("nobody waits for it any more")
            raise
        return worker

    def _coroutines(self) -> list[AgentTask]:
        return [task for task in self.tasks.values() if task.run is not None]

    def _join(self, worker: WorkerProcess) -> None:
        """Let a ready worker have episodes, and replace it when it has ended or is spoiled."""
        worker.open = True
        self._do(self._replace(worker))

    async def _replace(self, worker: WorkerProcess) -> None:
        await worker.no_more.wait()
        worker.open = False
        log.warning("an agent worker is replaced: %s", worker.how)
        if not worker.ended:
            self._do(self._retire(worker))
        self._join(await self._ready_worker())
        async with self._some_ready:
            self._some_ready.notify_all()

    async def _retire(self, worker: WorkerProcess) -> None:
        """End a spoiled worker once its episodes have ended."""
        await worker.idle.wait()
        worker.kill(worker.how)
        await worker.has_ended()

    async def _free_worker(self) -> WorkerProcess | None:
        def ready() -> list[WorkerProcess]:
            return [worker for worker in self._workers if worker.open and not worker.no_more.is_set()]

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s()), self._some_ready:
                await self._some_ready.wait_for(ready)
        return min(ready(), key=lambda worker: len(worker.playing), default=None)

    def _patience_s(self) -> float:
        return self._start_s + RESTART_S

    async def _watch(self) -> None:
        """Kill workers that are silent: code of an agent holds Python's lock, or the process is stopped."""
        while True:
            await asyncio.sleep(ALIVE_S)
            for worker in list(self._workers):
                worker.silent_s += ALIVE_S  # counted here, so that a pause of this process is none of the worker's
                limit = self._silent_s(worker)
                if worker.ready.is_set() and worker.silent_s > limit and not worker.ended:
                    worker.kill(f"it was silent for {limit:g} s", VoidCause.TIMEOUT)

    def _silent_s(self, worker: WorkerProcess) -> float:
        """Return how many seconds a worker may be silent: any of its episodes may be the one that blocks it."""
        tasks = [self.tasks[play.order.task] for play, _ in worker.playing.values()] or self._coroutines()
        return max(task.deadlines.tool_s for task in tasks) + SILENT_S

    def _do(self, work: Coroutine[Any, Any, Made]) -> asyncio.Task[Made]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task
