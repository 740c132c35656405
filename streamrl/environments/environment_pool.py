"""The processes of one environment: bounded in number and memory, health-checked, and restarted.

    an episode's reset or step raises, or is of a wrong type -> its episode fails; others notice nothing
    it takes longer than its deadline                        -> its episode fails (timeout); the process is killed, or
                                                                goes on if it answers others (see EnvironmentProcess)
    the process dies                                         -> the episode that it stepped fails; the others of the
                                                                process are to be played again
    it uses 80 % of its memory                               -> it gets no new episodes, and is replaced: a slow leak
                                                                costs no episode
    it uses more than its memory                             -> it is killed, as if it had died
    it starts a server for each episode (MCP)                -> it gets as many as have room in its memory; if they grow
                                                                beyond it, the largest are killed: these episodes fail

An episode stays with one process, the one with the fewest open episodes when it begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from streamrl.config.tasks import EnvironmentUse
from streamrl.environments.environment_process import (
    EnvironmentAnswer,
    EnvironmentEnded,
    EnvironmentProcess,
    memories_of,
)
from streamrl.environments.installed import InstalledEnvironment
from streamrl.environments.server_room import ServerRoom
from streamrl.errors import UserError
from streamrl.machine.own_share import usable_cores
from streamrl.rollouts.void import VoidCause
from streamrl.runtime.output_pipe import OutputLog
from streamrl.runtime.processes import kill_with_children

WATCH_S = 1.0
"""Seconds between two looks at the memory of the processes."""
FULL = 0.8
"""Share of its memory from which a process gets no new episodes."""
LONGEST_PAUSE_S = 30.0
RESTART_S = 60.0
"""Seconds that an episode waits while no process lives, beyond those that one may take to start."""
RESETS_PER_CORE = 2
"""Resets that run at once, of environments that answer at once: each may start a program, which takes about a second of
CPU time, and has to end within its deadline."""
GIB = 2**30

log = logging.getLogger(__name__)


class EnvironmentPlace:
    """An episode's place in a process."""

    def __init__(self, process: EnvironmentProcess, episode: str, step_s: float, servers: ServerRoom) -> None:
        self._process, self._episode, self._step_s, self._servers = process, episode, step_s, servers
        self.plays = process.plays

    async def reset(self, item: dict[str, Any], begins: Callable[[], object] | None = None) -> EnvironmentAnswer:
        """Begin the episode; the result has `messages`, perhaps `tools`. Raises as `EnvironmentProcess.ask`.

        `begins` is called once the reset need not wait for other episodes.
        """
        answer = await self._process.ask("reset", self._episode, self._step_s, begins, item=item)
        if self._process.starts_servers and not self._servers.known:
            self._process.look()
            self._servers.learn(self._process)
        return answer

    async def step(self, message: dict[str, Any]) -> EnvironmentAnswer:
        """Act; the result has `messages`, `reward`, `done` and `metrics`."""
        return await self._process.ask("step", self._episode, self._step_s, message=message)

    async def sample(self, seed: int) -> str:
        """Return an answer at random."""
        return str((await self._process.ask("sample", self._episode, self._step_s, seed=seed)).result["text"])

    async def play(self, item: dict[str, Any], base_url: str, api_key: str, seconds: float) -> EnvironmentAnswer:
        """Have the environment play the episode; the result has `reward` and `metrics`."""
        return await self._process.ask("play", self._episode, seconds, item=item, base_url=base_url, api_key=api_key)


class EnvironmentPool:
    """Use it from one event loop: `start` first, `close` last."""

    def __init__(
        self, use: EnvironmentUse, installed: InstalledEnvironment, output: OutputLog, step_s: float, start_s: float
    ) -> None:
        """Prepare the processes; none starts yet.

        Args:
            use: how many, how much memory, and the config.
            installed: the environment.
            output: takes what it prints.
            step_s: seconds that a reset or step may take.
            start_s: seconds that a process may take to start.
        """
        self.use, self.installed = use, installed
        self.restarts = 0
        """Processes that have been replaced."""
        self.most_memory = 0
        """Most resident bytes that a process was seen with."""
        self._output, self._step_s, self._start_s = output, step_s, start_s
        self._processes: set[EnvironmentProcess] = set()
        self._room = asyncio.Condition()
        self._resets = asyncio.Semaphore(RESETS_PER_CORE * usable_cores())
        self._servers = ServerRoom(FULL * use.memory_gb * GIB)
        self._background: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def start(self) -> None:
        """Start all processes.

        Raises:
            UserError: the environment does not start.
        """
        started = await asyncio.gather(*(self._start_one() for _ in range(self.use.processes)), return_exceptions=True)
        if error := next((one for one in started if isinstance(one, BaseException)), None):
            await self.close()
            raise error
        for one in started:
            assert isinstance(one, EnvironmentProcess)
            self._do(self._keep(one))
        self._do(self._watch())

    @contextlib.asynccontextmanager
    async def place(self, episode: str) -> AsyncIterator[EnvironmentPlace]:
        """Wait for room in a process, and hold it while the block runs.

        Raises:
            EnvironmentEnded: no process lived for as long as one may take to start, and `RESTART_S` more.
        """
        process = await self._with_room()
        process.enter(episode)
        try:
            yield EnvironmentPlace(process, episode, self._step_s, self._servers)
        finally:
            process.leave(episode)
            if not self._closed:
                self._do(self._tell())

    def memory(self) -> int:
        """Return the resident bytes of all processes."""
        return sum(one.look().total for one in self._processes)

    @property
    def plays(self) -> bool:
        """Whether its episodes call the model themselves."""
        return any(one.plays for one in self._processes)

    async def close(self) -> None:
        """End all processes at once."""
        self._closed = True
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await asyncio.gather(*(one.end("the environment was closed") for one in self._processes))
        self._processes.clear()

    async def _with_room(self) -> EnvironmentProcess:
        patience_s = self._start_s + RESTART_S
        lived = time.monotonic()
        """When a process was last seen that gets episodes, with or without room for one."""

        def found() -> list[EnvironmentProcess]:
            nonlocal lived
            if any(one.accepts for one in self._processes):
                lived = time.monotonic()
            return self._rooms()

        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(lived + patience_s - time.monotonic()), self._room:
                    await self._room.wait_for(found)
            if rooms := found():
                return min(rooms, key=lambda one: len(one.episodes))
            if time.monotonic() >= lived + patience_s:
                text = f"no process of environment {self.installed.name!r} was ready within {patience_s:g} s"
                raise EnvironmentEnded(f"{text} {self._output.where}", VoidCause.ENVIRONMENT, again=False)

    def _rooms(self) -> list[EnvironmentProcess]:
        return [
            one
            for one in self._processes
            if one.accepts
            and len(one.episodes) < self.use.episodes
            and (not one.starts_servers or self._servers.fits(one))
        ]

    async def _start_one(self) -> EnvironmentProcess:
        one = await EnvironmentProcess.start(self.installed, self.use.config, self._output, self._start_s, self._resets)
        one.look()
        self._processes.add(one)
        return one

    async def _keep(self, process: EnvironmentProcess) -> None:
        """Replace a process whenever it has ended or is too full."""
        while True:
            await process.no_more.wait()
            process.accepts = False
            log.warning("a process of environment %r is replaced: %s", self.installed.name, process.how)
            self.restarts += 1
            self._do(self._retire(process))
            process = await self._replacement()
            await self._tell()

    async def _retire(self, process: EnvironmentProcess) -> None:
        """End a process once its episodes have ended."""
        if process.episodes and not process.ended.is_set():
            await process.idle.wait()
        await process.end(process.how)
        self._processes.discard(process)

    async def _replacement(self) -> EnvironmentProcess:
        pause = 1.0
        while True:
            try:
                return await self._start_one()
            except UserError as error:
                log.warning("%s", error)
            except OSError as error:  # there is no memory, process number or file number for it now
                log.warning("environment %r does not start: %s", self.installed.name, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _watch(self) -> None:
        """Look at the memory of the processes, in a thread: the machine may have many others."""
        while True:
            await asyncio.sleep(WATCH_S)
            looked_at = list(self._processes)
            try:
                found = await asyncio.to_thread(memories_of, [one.process.pid for one in looked_at])
            except OSError as error:
                log.warning("the memory of environment %r is not known: %s", self.installed.name, error)
                continue
            for one, used in zip(looked_at, found, strict=True):
                one.used = used
                self.most_memory = max(self.most_memory, used.total)
                if one.starts_servers:
                    self._servers.learn(one)
                self._keep_in_memory(one)
            await self._tell()

    def _keep_in_memory(self, one: EnvironmentProcess) -> None:
        """Kill a process that uses more than its memory, or the servers that do, and let a full one be replaced."""
        most, used = self.use.memory_gb * GIB, one.used.total
        told = f"it uses {used / GIB:.2f} of {self.use.memory_gb:g} GiB after {one.played} episodes"
        if not one.starts_servers:
            over, full = used > most, used > FULL * most
        else:  # what its servers use it does not keep
            over, full = one.used.own > most, one.used.own > FULL * most or (used > FULL * most and not one.episodes)
        if over:
            one.kill(told)
        elif full and one.played and one.accepts:  # a new one would be as full as one that has played nothing
            one.how = told
            one.no_more.set()
        elif used > most:
            for pid, size in sorted(one.used.started.items(), key=lambda server: -server[1]):
                log.warning(
                    "environment %r: a server with %.2f GiB is killed, the largest of %d of a process; its episode "
                    "fails: %s",
                    *(self.installed.name, size / GIB, len(one.used.started), told),
                )
                kill_with_children(pid)
                used -= size
                if used <= most:
                    break

    async def _tell(self) -> None:
        async with self._room:
            self._room.notify_all()

    def _do(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
