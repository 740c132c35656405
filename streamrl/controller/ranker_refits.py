"""Refits of a run's ranker, in a thread: one at a time, and with pauses, so that no step waits for them.

A refit of a full window takes seconds of a core, which instances and the trainer may want. So one of t seconds is
followed by a pause of at least `PAUSE` times t, or `LONG_PAUSE` times where forecasts are figures only. Only the first
one is waited for: that of a ranker that has no model yet, which has the samples of one step, or of a resumed run, which
precedes its first step.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import TypeVar

from ranker.model import LengthModel
from ranker.online import OnlineRanker

PAUSE = 10
"""Least pause after a refit, as a multiple of its seconds: refits take less than a tenth of the time of one core."""
LONG_PAUSE = 100
"""The same where nothing is placed by forecasts: less than a hundredth."""

Refitted = TypeVar("Refitted")


class RankerRefits:
    """The refits of one ranker."""

    def __init__(self, ranker: OnlineRanker, pause: int, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            ranker: whose model is replaced.
            pause: least pause after a refit, as a multiple of its seconds.
            clock: monotonic seconds.
        """
        self.ranker, self.pause, self.clock = ranker, pause, clock
        self.running: asyncio.Task[tuple[LengthModel, float]] | None = None
        """The refit that has not been adopted."""
        self._next = -math.inf
        """Time before which none begins."""

    async def begin(self) -> None:
        """Begin a refit on the rows of now, unless one runs or a pause is not over; wait for a ranker's first one."""
        if self.running is not None or self.clock() < self._next or (job := self.ranker.refit_job()) is None:
            return
        self.running = asyncio.create_task(asyncio.to_thread(self._timed, job))
        if self.ranker.model is None:
            await asyncio.wait([self.running])

    def refit_now(self) -> None:
        """Refit the ranker in this thread, before the first step."""
        self._timed(self.ranker.refit)

    def _timed(self, refit: Callable[[], Refitted]) -> tuple[Refitted, float]:
        """Refit, and set when the pause ends; return what `refit` returns and its seconds."""
        began = self.clock()
        result = refit()
        ended = self.clock()
        self._next = ended + self.pause * (ended - began)
        return result, ended - began

    def adopt(self) -> float | None:
        """Give the ranker the model of a refit that has ended; return the refit's seconds, None if there is none."""
        if self.running is None or not self.running.done():
            return None
        self.ranker.model, seconds = self.running.result()
        self.running = None
        return seconds
