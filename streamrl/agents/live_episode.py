"""An episode that an agent worker plays: its deadlines, its steps, and what it waits for.

A deadline that expires ends the episode, whatever the agent does about it: the episode is void from then on, and the
agent is cancelled. So an agent that catches every exception ends as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Literal

from streamrl.agents.episode import EpisodeOrder
from streamrl.config.tasks import EpisodeDeadlines
from streamrl.rollouts.trajectory import EpisodeStep
from streamrl.rollouts.void import Void, VoidCause

CURRENT: ContextVar[LiveEpisode | None] = ContextVar("episode", default=None)
"""The episode whose agent is running."""
MOST_STEPS = 10_000
MOST_DETAIL = 2_000
"""Most characters of a step's detail."""


class LiveEpisode:
    """One episode; use it from one event loop."""

    def __init__(
        self, order: EpisodeOrder, limits: EpisodeDeadlines, tell: Callable[[str, str, float], object] | None = None
    ) -> None:
        """
        Args:
            order: the episode's order.
            limits: its deadlines.
            tell: called with sample id, what it waits for ('': nothing that is known here), and since when.
        """
        self.order, self.limits = order, limits
        self.steps: list[EpisodeStep] = []
        self.void: Void | None = None
        """The deadline that has expired first; None: none has."""
        self.over = asyncio.Event()
        """Set when a deadline has expired."""
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        """What the agent has started in the event loop, itself included."""
        self.threads: set[threading.Thread] = set()
        """Threads in which a tool still runs."""
        self._tell = tell
        self._doing: dict[object, tuple[str, float]] = {}
        self._turn: asyncio.TimerHandle | None = None
        self._turns = 0

    def step(self, kind: Literal["tool", "agent"], name: str, started: float, detail: str = "") -> None:
        """Record something that has just ended."""
        if len(self.steps) < MOST_STEPS:
            self.steps.append(EpisodeStep(kind, name, started, time.time(), detail[:MOST_DETAIL]))

    @contextlib.contextmanager
    def limited(self, what: str, seconds: float, shown: str = "") -> Iterator[None]:
        """Limit the time of what is awaited inside.

        Args:
            what: what is waited for, in words.
            seconds: until the episode ends.
            shown: what `why-stuck` names meanwhile; '': nothing.
        """
        timer = asyncio.get_running_loop().call_later(seconds, self._expire_wait, what, seconds, shown)
        key = object()
        if shown:
            self._doing[key] = shown, time.time()
            self._say()
        try:
            yield
        finally:
            timer.cancel()
            if self._doing.pop(key, None) is not None:
                self._say()

    def begin_turn(self, calls: int = 1) -> None:
        """Start the time of a turn: the model is called now, or with 0 calls, the agent begins."""
        self._turns += calls
        self.end_turn()
        loop, seconds = asyncio.get_running_loop(), self.limits.turn_s
        self._turn = loop.call_later(seconds, self._expire_turn, seconds)

    def end_turn(self) -> None:
        """Stop the time of the turn, as the episode has ended."""
        if self._turn is not None:
            self._turn.cancel()

    def _expire_wait(self, what: str, seconds: float, shown: str) -> None:
        during = "" if shown else f", when the agent waited for {self.waited_for()}"
        self.expire(f"{what} took more than {seconds:g} s{during}")

    def _expire_turn(self, seconds: float) -> None:
        when = f"after its call {self._turns} of the model" if self._turns else "before its first call of the model"
        self.expire(f"a turn took more than {seconds:g} s: {when}, the agent waited for {self.waited_for()}")

    def waited_for(self) -> str:
        """Name what the agent waits for now."""
        return ", ".join(name for name, _ in self._doing.values()) or "something of its own"

    def expire(self, text: str) -> None:
        """End the episode without a reward."""
        if self.void is None:
            self.void = Void(VoidCause.TIMEOUT, text)
            self.over.set()

    def _say(self) -> None:
        if self._tell is not None:
            since = min((since for _, since in self._doing.values()), default=time.time())
            self._tell(self.order.sample_id, ", ".join(name for name, _ in self._doing.values()), since)
