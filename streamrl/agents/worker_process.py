"""One agent worker, as its owner sees it: a process, the episodes that it plays, and how it ended."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from dataclasses import dataclass

import msgspec

from streamrl.agents.episode import EpisodeOutcome
from streamrl.agents.worker_frames import (
    MARK,
    Blocked,
    CleanedUp,
    Doing,
    FromWorker,
    GiveUp,
    Play,
    Played,
    Ready,
    Spoiled,
    ToWorker,
    next_frame,
    packed,
)
from streamrl.rollouts.void import Void, VoidCause
from streamrl.runtime.output_pipe import OutputLog
from streamrl.runtime.piped_process import PipedProcess, end_the_rest
from streamrl.runtime.processes import exit_text, kill_with_children
from streamrl.runtime.proxies import beside_proxies


@dataclass(frozen=True)
class AgentWait:
    """The tools that an episode waits for, as its worker knows them."""

    sample_id: str
    name: str
    since: float
    """Unix seconds."""


class WorkerProcess:
    """One worker process.

    What its agents have started ends with it, however it ends. What is no child of it any more, such as a daemon, is
    found by the variable `MARK`, which a process that gets another environment lacks.
    """

    def __init__(self, process: PipedProcess, suspects: set[str], mark: str) -> None:
        self.process, self._mark = process, mark
        self.open = self.ended = False
        self.ready, self.no_more, self.idle = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.problem = self.how = ""
        self.silent_s = 0.0
        self.playing: dict[str, tuple[Play, asyncio.Future[EpisodeOutcome]]] = {}
        """Episodes that it plays, or whose agents have left behind what it still ends, by the key of their session."""
        self.doing: dict[str, AgentWait] = {}
        """Tools that some of them wait for, likewise."""
        self._suspects = suspects
        self.cause = VoidCause.CRASH
        self._blocked: Blocked | None = None
        self.reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, log: OutputLog, suspects: set[str]) -> WorkerProcess:
        """Start a process; it imports the agents once it has got `Begin`."""
        command = [sys.executable, "-m", "streamrl.agents.worker", str(os.getpid())]
        variables = beside_proxies(os.environ) | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        mark = secrets.token_hex(16)
        return cls(await PipedProcess.start(command, variables | {MARK: mark}, log), suspects, mark)

    def send(self, frame: ToWorker) -> None:
        """Send a frame; one to a worker that has ended is lost, as the worker is."""
        self.process.send(packed(frame))

    async def play(self, play: Play) -> EpisodeOutcome:
        """Play an episode to its end, which may be that of the worker."""
        future: asyncio.Future[EpisodeOutcome] = asyncio.get_running_loop().create_future()
        self.playing[play.api_key] = play, future
        self.idle.clear()
        self.send(play)
        try:
            return await future
        except asyncio.CancelledError:
            self.send(GiveUp(api_key=play.api_key))
            self._forget(play.api_key)
            raise

    def kill(self, how: str, cause: VoidCause = VoidCause.CRASH) -> None:
        """Kill the process and all that it has started."""
        if not self.ended and self.process.returncode is None:
            self.how, self.cause = how, cause
            kill_with_children(self.process.pid)

    async def has_ended(self) -> None:
        """Wait until the process has ended and its episodes have their outcomes."""
        await asyncio.wait({self.reading})  # which goes on even if this wait is cancelled

    async def _read(self) -> None:
        """Take frames until the process has ended, and give its episodes their outcomes."""
        taking = asyncio.create_task(self._take_all())
        code = await self.process.ended(taking)
        self.how = self.how or exit_text(code)
        self.ended, self.open = True, False
        await end_the_rest(f"{MARK}={self._mark}", "an agent worker")
        await self.process.last_words(taking)
        for play, future in self.playing.values():
            if not future.done():
                future.set_result(self._outcome_of_death(play))
        self.playing.clear()
        self.doing.clear()
        for event in (self.ready, self.no_more, self.idle):
            event.set()

    def _forget(self, api_key: str) -> None:
        """Forget an episode of which nothing is left in the process, or nobody cares."""
        self.playing.pop(api_key, None)
        self.doing.pop(api_key, None)
        if not self.playing:
            self.idle.set()

    async def _take_all(self) -> None:
        try:
            while (frame := await next_frame(self.process.answers)) is not None:
                self.silent_s = 0.0
                self._take(frame)
        except (ValueError, msgspec.DecodeError) as error:
            self.kill(f"it sent something else than frames: {error}")

    def _take(self, frame: FromWorker) -> None:
        match frame:
            case Ready():
                self.problem = frame.problem
                self.ready.set()
            case Doing():
                played = self.playing.get(frame.api_key)
                if frame.tools and played is not None and not played[1].done():
                    self.doing[frame.api_key] = AgentWait(played[0].order.sample_id, frame.tools, frame.since)
                else:
                    self.doing.pop(frame.api_key, None)
            case Played():
                self.doing.pop(frame.api_key, None)
                if frame.api_key in self.playing and not (future := self.playing[frame.api_key][1]).done():
                    future.set_result(frame.outcome)
            case Spoiled():
                self.how = frame.why
                self.no_more.set()
            case CleanedUp():
                self._forget(frame.api_key)
            case Blocked():
                self._blocked = frame
                self.kill(f"blocked for {frame.seconds:.0f} s at {frame.where}", VoidCause.TIMEOUT)

    def _outcome_of_death(self, play: Play) -> EpisodeOutcome:
        """Return the outcome of an episode whose worker has ended: final only if it is known to be the cause."""
        blocked = self._blocked
        if blocked is not None and blocked.api_key:
            if blocked.api_key == play.api_key:
                text = f"the agent awaited nothing for {blocked.seconds:.0f} s, at {blocked.where}"
                return void_outcome(VoidCause.TIMEOUT, text)
            return void_outcome(
                VoidCause.CRASH, f"another episode blocked the agent worker, at {blocked.where}", again=True
            )
        if len(self.playing) == 1:
            return void_outcome(self.cause, f"the agent's process ended: {self.how}")
        self._suspects.add(play.order.sample_id)
        text = f"the agent worker, with {len(self.playing)} episodes, ended: {self.how}"
        return void_outcome(self.cause, text, again=True)


def void_outcome(cause: VoidCause, text: str, again: bool = False, traceback: str = "") -> EpisodeOutcome:
    """Return the outcome of an episode that could not be played to its end."""
    return EpisodeOutcome(None, Void(cause, text), again=again, traceback=traceback)
