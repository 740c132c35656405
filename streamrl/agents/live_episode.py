"""An episode that an agent worker plays: its deadlines, its steps, and what it waits for.

A deadline that expires ends the episode, whatever the agent does about it: the episode is void from then on, and the
agent is cancelled. So an agent that catches every exception ends as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, ParamSpec, TypeVar

from streamrl.agents.episode import EpisodeOrder
from streamrl.config.tasks import EpisodeDeadlines
from streamrl.rollouts.plain_text import plain_text
from streamrl.rollouts.trajectory import MOST_STEPS, EpisodeStep
from streamrl.rollouts.void import Void, VoidCause
from streamrl.runtime.processes import end_copy

CURRENT: ContextVar[LiveEpisode | None] = ContextVar("episode", default=None)
"""The episode whose agent is running."""
MOST_DETAIL = 2_000
"""Most characters of a step's detail."""
OWN_LOOP = (
    "outside of the agent's event loop: hand the coroutine to that loop with asyncio.run_coroutine_threadsafe, or call "
    "the model at `client.base_url` with a client of your own"
)
"""What is wrong with an agent that does something in another event loop, or in none, and what to do instead."""
LEFT = "not finished when the agent ended"
"""Detail of the step of a tool that an agent has left running."""
Given = ParamSpec("Given")
Computed = TypeVar("Computed")


class LiveEpisode:
    """One episode; make and use it in one event loop."""

    def __init__(
        self,
        order: EpisodeOrder,
        limits: EpisodeDeadlines,
        tell: Callable[[str, float], object] | None = None,
        api_key: str = "",
    ) -> None:
        """
        Args:
            order: the episode's order.
            limits: its deadlines.
            tell: called with the tools that it waits for ('': none), and since when.
            api_key: key of its session.
        """
        self.order, self.limits, self.api_key = order, limits, api_key
        self.steps: list[EpisodeStep] = []
        self.void: Void | None = None
        """Why it ends without a reward: a deadline has expired, or it was given up; None: neither."""
        self.over = asyncio.Event()
        """Set together with `void`."""
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        """What the agent has started in the event loop, itself included."""
        self.limits_turns = True
        """Whether turns have a limit: not where the model may be called without being counted here."""
        self.threads: set[object] = set()
        """Calls of tools and of `pool` that have not ended."""
        self.pool = ThreadPoolExecutor(thread_name_prefix=f"call of {order.sample_id}")
        """Threads for what the agent gives to the event loop's default executor; none starts before that."""
        self._loop = asyncio.get_running_loop()
        self._tell = tell
        self._doing: dict[object, str] = {}
        """What is waited for, in words."""
        self._tools: dict[object, tuple[str, float]] = {}
        """The tools among it, by name, and since when."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._calls = 0

    def step(self, kind: Literal["tool", "environment", "agent"], name: str, started: float, detail: str = "") -> None:
        """Record something that has just ended."""
        if len(self.steps) < MOST_STEPS:
            name, detail = plain_text(name, MOST_DETAIL), plain_text(detail, MOST_DETAIL)
            self.steps.append(EpisodeStep(kind, name, started, time.time(), detail))

    def begin(self) -> None:
        """Start the time of the episode, and of the agent's first turn."""
        seconds = self.limits.episode_s
        self._timers["episode"] = asyncio.get_running_loop().call_later(seconds, self._expire_episode, seconds)
        self._begin_turn()

    def end(self) -> None:
        """Stop the times of the episode and its turn."""
        for timer in self._timers.values():
            timer.cancel()

    def note_left(self) -> None:
        """Record the tools that the agent has left running."""
        for name, since in self._tools.values():
            self.step("tool", name, since, LEFT)

    def require_own_loop(self, what: str) -> None:
        """Refuse what is done in another event loop, where it would break timers and connections of other episodes.

        Args:
            what: what would be done, in words.

        Raises:
            RuntimeError: the event loop that runs here is not that of the agent, or none runs.
        """
        try:
            own = asyncio.get_running_loop() is self._loop
        except RuntimeError:  # such as under trio
            own = False
        if not own:
            raise RuntimeError(f"{what} {OWN_LOOP}")

    @contextlib.contextmanager
    def limited(self, what: str, seconds: float, tool: str = "", spent: float = 0.0) -> Iterator[None]:
        """Limit the time of what is awaited inside.

        Args:
            what: what is waited for, in words.
            seconds: until the episode ends.
            tool: name of the tool that is waited for; '': it is none.
            spent: seconds that it was waited for before.
        """
        text = f"{what} took more than {seconds:g} s"
        timer = asyncio.get_running_loop().call_later(seconds - spent, self.expire, text)
        key = object()
        self._doing[key] = what
        if tool:
            self._tools[key] = plain_text(tool, MOST_DETAIL), time.time()
            self._say()
        try:
            yield
        finally:
            timer.cancel()
            del self._doing[key]
            if self._tools.pop(key, None) is not None:
                self._say()

    def count_call(self) -> None:
        """Begin a turn: the model is called now."""
        self._calls += 1
        self._begin_turn()

    def expire(self, text: str, cause: VoidCause = VoidCause.TIMEOUT) -> None:
        """End the episode without a reward."""
        if self.void is None:
            self.void = Void(cause, plain_text(text))
            self.over.set()

    def _begin_turn(self) -> None:
        if (timer := self._timers.get("turn")) is not None:
            timer.cancel()
        seconds = self.limits.turn_s
        self._timers["turn"] = asyncio.get_running_loop().call_later(seconds, self._expire_turn, seconds)

    def _expire_turn(self, seconds: float) -> None:
        if not self.limits_turns:
            return
        when = f"after its call {self._calls} of the model" if self._calls else "before its first call of the model"
        self.expire(f"a turn took more than {seconds:g} s: {when}, the agent waited for {self._waited_for()}")

    def _expire_episode(self, seconds: float) -> None:
        self.expire(f"the episode took more than {seconds:g} s, when the agent waited for {self._waited_for()}")

    def _waited_for(self) -> str:
        return ", ".join(self._doing.values()) or "something of its own"

    def _say(self) -> None:
        if self._tell is not None:
            since = min((since for _, since in self._tools.values()), default=time.time())
            self._tell(", ".join(name for name, _ in self._tools.values()), since)


class EpisodeThreads(ThreadPoolExecutor):
    """The default executor of a worker's event loop: each episode has its own threads (`LiveEpisode.pool`).

    So calls that never end take no thread from other episodes, and it is known whose they are.
    """

    def submit(self, fn: Callable[Given, Computed], /, *args: Given.args, **kwargs: Given.kwargs) -> Future[Computed]:
        """Run a function in a thread of the current episode; a process that it has forked ends where it ends."""
        if (episode := CURRENT.get()) is None:
            return super().submit(fn, *args, **kwargs)
        try:
            call = episode.pool.submit(fn, *args, **kwargs)
        except RuntimeError:  # the episode has ended: this is for something that others may use, too
            return super().submit(fn, *args, **kwargs)
        episode.threads.add(call)
        call.add_done_callback(episode.threads.discard)
        call.add_done_callback(partial(_end_copy_of, os.getpid()))
        return call


def _end_copy_of(worker: int, call: Future[Any]) -> None:
    end_copy(worker, None if call.cancelled() else call.exception())
