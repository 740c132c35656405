"""One process of an environment, as its owner sees it: requests and answers over its pipes, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from streamrl.environments.in_venv import environment_main
from streamrl.environments.in_venv.mcp_connection import MARK
from streamrl.environments.installed import InstalledEnvironment
from streamrl.errors import UserError
from streamrl.rollouts.void import VoidCause
from streamrl.runtime.output_pipe import OutputLog
from streamrl.runtime.piped_process import PipedProcess, end_the_rest
from streamrl.runtime.processes import exit_text, kill_with_children
from streamrl.runtime.proxies import beside_proxies

MOST_LINE = 64 * 2**20
"""Most bytes of an answer."""
CLOSE_S = 30.0
"""Seconds in which an episode must be closed, and in which a process that answers `at_once` must answer anything."""
QUIET = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "SDL_VIDEODRIVER": "dummy", "MPLBACKEND": "Agg"}
"""Variables of every process: one core each, and no window."""
NOBODY = ""
"""The episode of a request that only looks whether there is an answer."""


class EnvironmentFailed(Exception):
    """The environment raised, or returned something wrong; its process goes on."""

    def __init__(self, text: str, traceback: str) -> None:
        super().__init__(text)
        self.traceback = traceback


class EnvironmentEnded(Exception):
    """The episode has taken too long, or the process of the environment has ended, and all its episodes with it."""

    def __init__(self, text: str, cause: VoidCause, again: bool) -> None:
        """
        Args:
            text: how it ended.
            cause: cause of the void of the episode that was late or has ended the process.
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


@dataclass(frozen=True)
class MemoryUse:
    """Resident bytes of a process, and of what it has started."""

    own: int = 0
    started: dict[int, int] = field(default_factory=dict)
    """Bytes of each child with all that it has started, by its pid; the oldest first."""

    @property
    def total(self) -> int:
        """Bytes of all together."""
        return self.own + sum(self.started.values())


class EnvironmentProcess:
    """One process. Requests are sent one at a time, so that each is timed by itself, or `at_once`.

    What takes too long ends a process that answers one at a time. In one that answers at once it ends its own episode,
    unless the process does not answer at all.

    What it has started ends with it, however it ends. What is no child of it any more, such as a daemon or a browser
    whose starter has ended, is found by the variable `MARK`, which a process that gets another environment lacks.
    """

    def __init__(self, process: PipedProcess, name: str, resets: asyncio.Semaphore, mark: str) -> None:
        self.process, self.name, self._resets, self._mark = process, name, resets, mark
        self.plays = False
        """Whether its episodes call the model themselves."""
        self.at_once = False
        """Whether it takes a request while it answers others."""
        self.episodes: set[str] = set()
        """Open episodes."""
        self.reset: set[str] = set()
        """Those of them that have been reset."""
        self.used = MemoryUse()
        """Memory, when it was looked at."""
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
        self.reading = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls,
        installed: InstalledEnvironment,
        config: dict[str, Any],
        log: OutputLog,
        seconds: float,
        resets: asyncio.Semaphore,
    ) -> EnvironmentProcess:
        """Start a process and wait until its environment is loaded.

        Args:
            installed: the environment.
            config: keys that replace those of its own config.
            log: takes what it prints.
            seconds: that it may take.
            resets: held during a reset of an environment that answers `at_once`, as each may start a program.

        Raises:
            UserError: the environment cannot be loaded, or not within `seconds`; the message is its own.
        """
        left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        mark = secrets.token_hex(16)
        variables = {name: value for name, value in os.environ.items() if name not in left_out} | QUIET | {MARK: mark}
        command = [str(installed.python), "-I", str(environment_main.__file__), str(os.getpid())]
        process = await PipedProcess.start(command, beside_proxies(variables), log, MOST_LINE)
        one = cls(process, installed.name, resets, mark)
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

    async def ask(
        self, do: str, episode: str, seconds: float, begins: Callable[[], object] | None = None, **more: Any
    ) -> EnvironmentAnswer:
        """Have an episode do something.

        Args:
            do: 'reset', 'step', 'sample', 'play' or 'close'.
            episode: id of the episode.
            seconds: that it may take, without the wait for other episodes.
            begins: called when that wait is over, unless the episode has been left.
            more: what the request holds beside.

        Raises:
            EnvironmentFailed: the environment raised, or returned something wrong.
            EnvironmentEnded: it took too long, or its process has ended.
        """
        asked = time.time()
        work = asyncio.create_task(self._exchange(do, episode, seconds, asked, more, begins))  # outlives a caller
        self._work.add(work)
        work.add_done_callback(self._forget)
        return await asyncio.shield(work)

    @property
    def starts_servers(self) -> bool:
        """Whether what it starts belongs to one episode each, as MCP servers do."""
        return self.at_once and not self.plays

    def look(self) -> MemoryUse:
        """Look at its memory, keep that as `used`, and return it; nothing once it has ended."""
        (self.used,) = memories_of([self.process.pid])
        return self.used

    def kill(self, how: str, cause: VoidCause = VoidCause.ENVIRONMENT) -> None:
        """Kill the process and all that it has started."""
        if not self.ended.is_set() and self.process.returncode is None:
            self.how, self._cause = how, cause
            kill_with_children(self.process.pid)

    async def end(self, how: str) -> None:
        """End the process, and wait until it has ended."""
        self.kill(how)
        await asyncio.wait({self.reading})  # which goes on even if this wait is cancelled

    def leave(self, episode: str) -> None:
        """Close an episode, without waiting for it."""
        if episode not in self.episodes:
            return
        self.episodes.discard(episode)
        self.reset.discard(episode)
        if not self.episodes:
            self.idle.set()
        if not self.ended.is_set():
            work = asyncio.create_task(self._exchange("close", episode, CLOSE_S, time.time(), {}))
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
        self,
        do: str,
        episode: str,
        seconds: float,
        asked: float,
        more: dict[str, Any],
        begins: Callable[[], object] | None = None,
    ) -> EnvironmentAnswer:
        async with contextlib.AsyncExitStack() as held:
            await held.enter_async_context(self._turn_of(do))
            if self.ended.is_set():
                raise EnvironmentEnded(self._ended_text(), self._cause, again=True)
            if self.at_once and do == "reset" and episode not in self.episodes:  # its close has overtaken it
                raise EnvironmentEnded(f"episode {episode} was given up", VoidCause.ENVIRONMENT, again=False)
            if begins is not None and episode in self.episodes:
                begins()
            started, clock = time.time(), time.monotonic()
            number, future = self._request({"do": do, "episode": episode, **more})
            try:
                async with asyncio.timeout(seconds):
                    found = await asyncio.shield(future)
            except TimeoutError:
                late = f"{do} took more than {seconds:g} s"
                if self.at_once:
                    await held.aclose()  # other resets go on meanwhile
                    if await self._answers():
                        text = f"environment {self.name!r}: {late}"
                        raise EnvironmentEnded(text, VoidCause.TIMEOUT, again=False) from None
                self._late = self._late or number
                self.kill(late, VoidCause.TIMEOUT)
                found = await future
            finally:
                self._owed.pop(number, None)
        if (problem := found.get("error")) is not None:
            raise EnvironmentFailed(str(problem), str(found.get("traceback", "")))
        if do == "reset" and episode in self.episodes:
            self.reset.add(episode)
        return EnvironmentAnswer(dict(found["result"]), started, started - asked, time.monotonic() - clock)

    def _turn_of(self, do: str) -> contextlib.AbstractAsyncContextManager[Any]:
        """Return what a request holds while it is answered."""
        if not self.at_once:
            return self._turn
        return self._resets if do == "reset" else contextlib.nullcontext()

    async def _answers(self) -> bool:
        """Whether it answers within `CLOSE_S`, whatever its episodes do: it has to close one that there is not."""
        number, future = self._request({"do": "close", "episode": NOBODY})
        try:
            async with asyncio.timeout(CLOSE_S):
                await asyncio.shield(future)
        except (TimeoutError, EnvironmentEnded):
            return False
        finally:
            self._owed.pop(number, None)
        return True

    def _request(self, request: dict[str, Any]) -> tuple[int, asyncio.Future[dict[str, Any]]]:
        """Send a request; return its number, and what becomes the answer."""
        number = next(self._numbers)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._owed[number] = request["episode"], future
        self._send({"id": number, **request})
        return number, future

    def _send(self, request: dict[str, Any]) -> None:
        self.process.send(json.dumps(request).encode() + b"\n")

    async def _read(self) -> None:
        """Give every request its answer, until the process has ended."""
        taking = asyncio.create_task(self._take_all())
        code = await self.process.ended(taking)
        self.how = self.how or exit_text(code)
        self.accepts = False
        for event in (self.ended, self.no_more, self.idle):
            event.set()
        await end_the_rest(f"{MARK}={self._mark}", f"a process of environment {self.name!r}")
        await self.process.last_words(taking)
        several = sum(episode != NOBODY for episode, _ in self._owed.values()) > 1
        for number, (_, future) in list(self._owed.items()):
            again = several and number != self._late  # of several, nobody knows whose fault it was, but of the late one
            if not future.done():
                future.set_exception(EnvironmentEnded(self._ended_text(), self._cause, again))
        if not self._began.done():
            self._began.set_exception(EnvironmentEnded(self._ended_text(), self._cause, again=False))
            self._began.exception()

    async def _take_all(self) -> None:
        try:
            while line := await self.process.answers.readline():
                self._take(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self.kill(f"it sent something else than an answer: {type(error).__name__}: {error}")

    def _take(self, answer: dict[str, Any]) -> None:
        if not self._began.done():
            self._began.set_result(answer)
            return
        _, future = self._owed.get(answer["id"], ("", None))
        if future is not None and not future.done():
            future.set_result(answer)

    def _ended_text(self) -> str:
        return f"a process of environment {self.name!r} ended: {self.how}"


def memories_of(roots: Sequence[int]) -> list[MemoryUse]:
    """Look at the memory of processes, and of what each has started, with one look at all processes of the machine."""
    children: dict[int, list[psutil.Process]] = {}
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error):
            one = psutil.Process(pid)
            children.setdefault(one.ppid(), []).append(one)
    return [_memory_of(root, children) for root in roots]


def _memory_of(root: int, children: Mapping[int, Sequence[psutil.Process]]) -> MemoryUse:
    """Return the memory of a process and of what it has started; what has ended meanwhile has none."""
    try:
        own = int(psutil.Process(root).memory_info().rss)
    except psutil.Error:
        return MemoryUse()
    found: list[tuple[float, int, int]] = []
    parents: dict[int, int] = {}
    left = [root]
    while left:
        parent = left.pop()
        for one in children.get(parent, ()):
            with contextlib.suppress(psutil.Error):
                found.append((one.create_time(), one.pid, one.memory_info().rss))
                parents[one.pid] = parent
                left.append(one.pid)
    started: dict[int, int] = {}
    for _, pid, size in sorted(found):
        top = pid
        while parents[top] in parents:
            top = parents[top]
        started[top] = started.get(top, 0) + size
    return MemoryUse(own, started)
