"""Waits with an owner, something waited for, and a limit; all of a process's waits can be listed.

A limit counts only time in which the process lived. When it or the machine stands still, others could not be heard, and
most of them stood still as well; so a machine that wakes up ends no run.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from streamrl.errors import ErrorCode, RunFailed

T = TypeVar("T")
LOOK_EVERY_S = 1.0
MOST_S = 2.0
"""Most seconds between two looks at the clock that count; where they are further apart, something stood still."""
EARLY_S = 1e-3
"""Seconds by which a timer may be early."""
MOST_STANDSTILLS = 100
"""Standstills that are remembered; older ones count as time."""


def never() -> float:
    """Return the seconds since the latest progress of what shows none: inf."""
    return math.inf


class DeadlineExpired(RunFailed):
    """Raised when a wait exceeds its limit; the message says who waited for what, and how long."""


@dataclass(frozen=True)
class Wait:
    """One wait in progress."""

    owner: str
    waiting_for: str
    since: float
    """What the limit counts from, in unix seconds: the start of the wait, or the latest sign of progress."""
    limit_s: float


@dataclass
class _Open:
    """A wait as it began."""

    text: Callable[[], str]
    limit_s: float
    since_progress: Callable[[], float]
    started: float
    """Monotonic seconds; so is `due`."""
    due: float
    """When it expires, unless there is progress or a standstill until then."""
    rest: Callable[[], str] = str
    """Returns what its error adds."""
    timer: asyncio.TimerHandle | None = None
    """What ends it when it is due, or renews it."""

    def expired(self, owner: str) -> DeadlineExpired:
        """Return the error of this wait."""
        return DeadlineExpired(
            ErrorCode.HANG.refer(f"{owner} waited {self.limit_s:.0f} s for {self.text()}{self.rest()}")
        )


class _LivedTime:
    """Monotonic seconds without those in which this process stood still, as somebody looks again and again."""

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._lost: deque[tuple[float, float]] = deque(maxlen=MOST_STANDSTILLS)
        """End and seconds of each standstill."""

    def look(self) -> float:
        """Return the monotonic seconds, and note a standstill since the last look."""
        now = time.monotonic()
        if (lost_s := now - self._looked - MOST_S) > 0:
            self._lost.append((now, lost_s))
        self._looked = now
        return now

    def between(self, at: float, now: float) -> float:
        """Return the seconds between two monotonic times; the second is that of the last look."""
        return now - at - sum(min(lost_s, end - at) for end, lost_s in self._lost if end > at)


class WaitRegistry:
    """The waits of one process."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._waits: dict[object, _Open] = {}
        """Those of `begin` by their names."""
        self._lived = _LivedTime()
        self._looking: asyncio.AbstractEventLoop | None = None
        """The loop in which somebody looks at the clock."""

    def begin(
        self,
        name: str,
        waiting_for: str,
        limit_s: float,
        since_progress: Callable[[], float] = never,
        rest: Callable[[], str] = str,
    ) -> None:
        """Register a wait in the background; `end` ends it, and beginning it again renews its limit.

        Args:
            name: name of the wait.
            waiting_for: what is waited for, in words.
            limit_s: seconds until the wait expires.
            since_progress: returns the seconds since the latest sign of progress. The wait then expires only `limit_s`
                seconds after that sign.
            rest: returns what the error of an expired wait adds.
        """
        now = self._lived.look()
        self._waits[name] = _Open(lambda: waiting_for, limit_s, since_progress, now, now + limit_s, rest)

    def end(self, name: str) -> None:
        """End a wait of `begin`, if there is one."""
        self._waits.pop(name, None)

    @property
    def begun(self) -> frozenset[str]:
        """Names of the waits that `begin` has begun and `end` has not ended."""
        return frozenset(key for key in self._waits if isinstance(key, str))

    async def first_of_begun(self, awaitable: Awaitable[T]) -> T:
        """Await something until the first of the begun waits expires.

        Raises:
            DeadlineExpired: that wait has expired; the message names it.
            RuntimeError: no wait has begun, so this would have no limit.
        """
        if not self.begun:
            raise RuntimeError(f"{self.owner} would wait for nobody")
        self._keep_looking()
        task = asyncio.ensure_future(awaitable)
        try:
            while True:
                wait = min((self._waits[name] for name in self.begun), key=lambda wait: wait.due)
                done, _ = await asyncio.wait([task], timeout=max(0.0, wait.due - time.monotonic()))
                if done:
                    return await task
                if (left_s := self._left_s(wait)) <= 0:
                    raise wait.expired(self.owner)
                wait.due = time.monotonic() + left_s
        finally:
            task.cancel()

    @asynccontextmanager
    async def deadline(
        self, waiting_for: str | Callable[[], str], limit_s: float, since_progress: Callable[[], float] = never
    ) -> AsyncIterator[None]:
        """Limit the time of what is awaited inside.

        Args:
            waiting_for: what is waited for, in words; a function returns those for the moment.
            limit_s: seconds until the wait expires.
            since_progress: as in `begin`.

        Raises:
            DeadlineExpired: `limit_s` seconds have passed since the beginning and since the latest sign of progress.
        """
        key, loop, now = object(), asyncio.get_running_loop(), self._lived.look()
        text = (lambda: waiting_for) if isinstance(waiting_for, str) else waiting_for
        self._waits[key] = wait = _Open(text, limit_s, since_progress, now, now + limit_s)
        self._keep_looking()
        scope = asyncio.timeout(None)
        wait.timer = loop.call_later(limit_s, self._end_or_renew, wait, scope)
        try:
            async with scope:
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise wait.expired(self.owner) from error
        finally:
            wait.timer.cancel()  # which lets go of `scope`, and so of the task with its error
            del self._waits[key]

    def _end_or_renew(self, wait: _Open, scope: asyncio.Timeout) -> None:
        loop = asyncio.get_running_loop()
        if (left_s := self._left_s(wait)) > 0:
            wait.timer = loop.call_later(left_s, self._end_or_renew, wait, scope)
        else:
            scope.reschedule(loop.time())

    def snapshot(self) -> list[dict[str, Any]]:
        """Return all waits, oldest first, as plain values for a status file; a sign of progress makes one young.

        They are as old as their limits count: a clock that is set, and a standstill, make no wait older. Of those for
        the same, as where one wait is a part of another, the oldest is returned.
        """
        now, unix = self._lived.look(), time.time()
        waits = [
            Wait(self.owner, one.text(), unix - self._age_s(one, now), one.limit_s) for one in self._waits.values()
        ]
        oldest: dict[str, Wait] = {}
        for wait in sorted(waits, key=lambda wait: wait.since):
            oldest.setdefault(wait.waiting_for, wait)
        return [asdict(wait) for wait in oldest.values()]

    def _age_s(self, wait: _Open, now: float) -> float:
        """Return the seconds since a wait began or, if later, since its latest sign of progress."""
        return self._lived.between(max(wait.started, now - wait.since_progress()), now)

    def _left_s(self, wait: _Open) -> float:
        """Return the seconds until a wait expires; 0: it has."""
        left_s = wait.limit_s - self._age_s(wait, self._lived.look())
        return left_s if left_s > EARLY_S else 0.0

    def _keep_looking(self) -> None:
        """Look at the clock every `LOOK_EVERY_S` in the running loop, for as long as there are waits."""
        loop = asyncio.get_running_loop()
        if self._looking is not loop:
            self._looking = loop
            self._look(loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._lived.look()
        if not self._waits:
            self._looking = None
        elif self._looking is loop:
            loop.call_later(LOOK_EVERY_S, self._look, loop)
