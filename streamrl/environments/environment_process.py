"""One process of an environment, as its owner sees it: requests and answers over its pipes, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import time
from dataclasses import dataclass
from typing import Any

import psutil

from streamrl.environments.in_venv import environment_main
from streamrl.environments.installed import InstalledEnvironment
from streamrl.errors import UserError
from streamrl.rollouts.void import VoidCause
from streamrl.runtime.output_pipe import OutputLog, OutputPipe
from streamrl.runtime.processes import exit_text, kill_with_children

MOST_LINE = 64 * 2**20
"""Most bytes of an answer."""
LAST_WORDS_S = 1.0
QUIET = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "SDL_VIDEODRIVER": "dummy", "MPLBACKEND": "Agg"}
"""Variables of every process: one core each, and no window."""


class EnvironmentFailed(Exception):
    """The environment raised, or returned something wrong; its process goes on."""

    def __init__(self, text: str, traceback: str) -> None:
        super().__init__(text)
        self.traceback = traceback


class EnvironmentEnded(Exception):
    """The process of the environment has ended, and all its episodes with it."""

    def __init__(self, text: str, cause: VoidCause, again: bool) -> None:
        """
        Args:
            text: how it ended.
            cause: cause of the void of the episode that has ended it.
            again: whether another episode, or nobody, has caused it, so that this one can be played again.
        """
        super().__init__(text)
        self.cause, self.again = cause, again


@dataclass(frozen=True)
class EnvironmentAnswer:
    """What an environment answered, and when."""

    result: dict[str, Any]
    started: float
    """Unix seconds at which its process began with it; before that, it waited for other episodes there."""
    waited_s: float
    took_s: float


class EnvironmentProcess:
    """One process. Requests are sent one at a time, so that each is timed by itself, or `at_once`."""

    def __init__(self, process: asyncio.subprocess.Process, output: OutputPipe, log: OutputLog, name: str) -> None:
        self.process, self.name = process, name
        self.plays = False
        """Whether its episodes call the model themselves."""
        self.at_once = False
        """Whether it takes a request while it answers others."""
        self.episodes: set[str] = set()
        """Open episodes."""
        self.played = 0
        """Episodes that it has begun."""
        self.accepts = False
        """Whether it gets new episodes."""
        self.how = ""
        """How it ended, or why it gets no new episodes."""
        self.ended, self.no_more = asyncio.Event(), asyncio.Event()
        """Set when it has ended; when it should be replaced."""
        self.idle = asyncio.Event()
        self._cause = VoidCause.ENVIRONMENT
        self._late = 0
        """Number of the request that took too long; 0: none did."""
        self._numbers = itertools.count(1)
        self._turn = asyncio.Lock()
        self._owed: dict[int, tuple[str, asyncio.Future[dict[str, Any]]]] = {}
        self._began: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._work: set[asyncio.Task[Any]] = set()
        self._output = output
        self._printing = asyncio.create_task(log.take(output, f"environment {name}"))
        self.reading = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls, installed: InstalledEnvironment, config: dict[str, Any], log: OutputLog, seconds: float
    ) -> EnvironmentProcess:
        """Start a process and wait until its environment is loaded.

        Raises:
            UserError: the environment cannot be loaded, or not within `seconds`; the message is its own.
        """
        output = await OutputPipe.open()
        left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        process = await asyncio.create_subprocess_exec(
            *(str(installed.python), "-I", environment_main.__file__, str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=output.write_end,
            env={name: value for name, value in os.environ.items() if name not in left_out} | QUIET,
            limit=MOST_LINE,
        )
        output.started()
        one = cls(process, output, log, installed.name)
        one._send({"make": installed.make, "paths": installed.paths, "config": installed.config | config})
        try:
            async with asyncio.timeout(seconds):
                told = await asyncio.shield(one._began)
            if problem := told.get("problem"):
                raise UserError(f"environment {installed.name!r} does not start: {problem}")
            one.plays, one.at_once = bool(told["ready"]["plays"]), bool(told["ready"]["at_once"])
            one.accepts = True
        except TimeoutError:
            raise UserError(f"environment {installed.name!r} does not start within {seconds:g} s {log.where}") from None
        except EnvironmentEnded as error:
            raise UserError(f"environment {installed.name!r} does not start: {error} {log.where}") from None
        finally:
            if not one.accepts:
                await one.end("it did not start")
        return one

    async def ask(self, do: str, episode: str, seconds: float, **more: Any) -> EnvironmentAnswer:
        """Have an episode do something.

        Args:
            do: 'reset', 'step', 'sample', 'play' or 'close'.
            episode: id of the episode.
            seconds: that it may take, without the wait for other episodes; then the process is ended.
            more: what the request holds beside.

        Raises:
            EnvironmentFailed: the environment raised, or returned something wrong.
            EnvironmentEnded: its process has ended.
        """
        asked = time.time()
        work = asyncio.create_task(self._exchange(do, episode, seconds, asked, more))  # outlives a caller that gives up
        self._work.add(work)
        work.add_done_callback(self._forget)
        return await asyncio.shield(work)

    def memory(self) -> int:
        """Return the resident bytes of the process and of what it has started; 0 once it has ended."""
        try:
            process = psutil.Process(self.process.pid)
            return sum(one.memory_info().rss for one in [process, *process.children(recursive=True)])
        except psutil.Error:
            return 0

    def kill(self, how: str, cause: VoidCause = VoidCause.ENVIRONMENT) -> None:
        """Kill the process and all that it has started."""
        if not self.ended.is_set() and self.process.returncode is None:
            self.how, self._cause = how, cause
            kill_with_children(self.process.pid)

    async def end(self, how: str) -> None:
        """End the process, and wait until it has ended."""
        self.kill(how)
        await self.reading

    def leave(self, episode: str) -> None:
        """Close an episode, without waiting for it."""
        if episode not in self.episodes:
            return
        self.episodes.discard(episode)
        if not self.episodes:
            self.idle.set()
        if not self.ended.is_set():
            work = asyncio.create_task(self._exchange("close", episode, LAST_WORDS_S * 30, time.time(), {}))
            self._work.add(work)
            work.add_done_callback(self._forget)

    def enter(self, episode: str) -> None:
        """Count an episode as open."""
        self.episodes.add(episode)
        self.played += 1
        self.idle.clear()

    def _forget(self, work: asyncio.Task[Any]) -> None:
        self._work.discard(work)
        if not work.cancelled():
            work.exception()  # of a caller that has given up

    async def _exchange(
        self, do: str, episode: str, seconds: float, asked: float, more: dict[str, Any]
    ) -> EnvironmentAnswer:
        async with contextlib.nullcontext() if self.at_once else self._turn:
            if self.ended.is_set():
                raise EnvironmentEnded(self._ended_text(), self._cause, again=True)
            started, clock = time.time(), time.monotonic()
            number = next(self._numbers)
            future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
            self._owed[number] = episode, future
            self._send({"id": number, "do": do, "episode": episode, **more})
            try:
                async with asyncio.timeout(seconds):
                    found = await asyncio.shield(future)
            except TimeoutError:
                self._late = self._late or number
                self.kill(f"{do} took more than {seconds:g} s", VoidCause.TIMEOUT)
                found = await future
            finally:
                self._owed.pop(number, None)
        if (text := found.get("error")) is not None:
            raise EnvironmentFailed(str(text), str(found.get("traceback", "")))
        return EnvironmentAnswer(dict(found["result"]), started, started - asked, time.monotonic() - clock)

    def _send(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        if not self.process.stdin.is_closing():
            self.process.stdin.write(json.dumps(request).encode() + b"\n")

    async def _read(self) -> None:
        """Give every request its answer, until the process has ended."""
        assert self.process.stdout is not None
        try:
            while line := await self.process.stdout.readline():
                self._take(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.kill(f"it sent something else than an answer: {type(error).__name__}: {error}")
        if self.process.returncode is None:  # it closed its output
            kill_with_children(self.process.pid)
        code = await self.process.wait()
        self.how = self.how or exit_text(code)
        self.accepts = False
        for event in (self.ended, self.no_more, self.idle):
            event.set()
        await asyncio.wait({self._printing}, timeout=LAST_WORDS_S)
        self._printing.cancel()
        self._output.close()
        if self.process.stdin is not None:
            self.process.stdin.close()
        several = len(self._owed) > 1
        for number, (_, future) in list(self._owed.items()):
            again = several and number != self._late  # of several, nobody knows whose fault it was, but of the late one
            if not future.done():
                future.set_exception(EnvironmentEnded(self._ended_text(), self._cause, again))
        if not self._began.done():
            self._began.set_exception(EnvironmentEnded(self._ended_text(), self._cause, again=False))
            self._began.exception()

    def _take(self, answer: dict[str, Any]) -> None:
        if not self._began.done():
            self._began.set_result(answer)
            return
        _, future = self._owed.get(answer["id"], ("", None))
        if future is not None and not future.done():
            future.set_result(answer)

    def _ended_text(self) -> str:
        return f"a process of environment {self.name!r} ended: {self.how}"
