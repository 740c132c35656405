"""Waits with an owner, something waited for, and a limit; all of a process's waits can be listed."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from streamrl.errors import ErrorCode, RunFailed

T = TypeVar("T")


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

    def __str__(self) -> str:
        return f"{self.owner} waited {self.limit_s:.0f} s for {self.waiting_for}"


class WaitRegistry:
    """The waits of one process."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._waits: dict[object, Wait] = {}
        """The waits as they began: `since` is the start of each."""
        self._begun: dict[str, float] = {}
        """Expiry of each wait of `begin` (monotonic seconds)."""
        self._progress: dict[object, Callable[[], float]] = {}
        """The seconds since the latest sign of progress, of each wait."""
        self._rest: dict[str, Callable[[], str]] = {}

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
        self._waits[name] = Wait(self.owner, waiting_for, time.time(), limit_s)
        self._begun[name] = time.monotonic() + limit_s
        self._progress[name] = since_progress
        self._rest[name] = rest

    def end(self, name: str) -> None:
        """End a wait of `begin`, if there is one."""
        self._waits.pop(name, None)
        self._begun.pop(name, None)
        self._rest.pop(name, None)
        self._progress.pop(name, None)

    @property
    def begun(self) -> frozenset[str]:
        """Names of the waits that `begin` has begun and `end` has not ended."""
        return frozenset(self._begun)

    async def first_of_begun(self, awaitable: Awaitable[T]) -> T:
        """Await something until the first of the begun waits expires.

        Raises:
            DeadlineExpired: that wait has expired; the message names it.
            RuntimeError: no wait has begun, so this would have no limit.
        """
        if not self._begun:
            raise RuntimeError(f"{self.owner} would wait for nobody")
        task = asyncio.ensure_future(awaitable)
        try:
            while True:
                name = min(self._begun, key=self._begun.__getitem__)
                done, _ = await asyncio.wait([task], timeout=max(0.0, self._begun[name] - time.monotonic()))
                if done:
                    return await task
                wait = self._waits[name]
                left_s = wait.limit_s - self._progress[name]()
                if left_s <= 0:
                    raise DeadlineExpired(ErrorCode.HANG.refer(f"{wait}{self._rest[name]()}"))
                self._begun[name] = time.monotonic() + left_s
        finally:
            task.cancel()

    @asynccontextmanager
    async def deadline(
        self, waiting_for: str, limit_s: float, since_progress: Callable[[], float] = never
    ) -> AsyncIterator[None]:
        """Limit the time of what is awaited inside.

        Args:
            waiting_for: what is waited for, in words.
            limit_s: seconds until the wait expires.
            since_progress: as in `begin`.

        Raises:
            DeadlineExpired: `limit_s` seconds have passed since the beginning and since the latest sign of progress.
        """
        key, loop = object(), asyncio.get_running_loop()
        self._waits[key] = wait = Wait(self.owner, waiting_for, time.time(), limit_s)
        self._progress[key] = since_progress
        timer = loop.call_later(limit_s, lambda: end_or_renew())

        def end_or_renew() -> None:
            nonlocal timer
            if (left_s := limit_s - since_progress()) > 0:
                timer = loop.call_later(left_s, end_or_renew)
            else:
                scope.reschedule(loop.time())

        try:
            async with asyncio.timeout(None) as scope:
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise DeadlineExpired(ErrorCode.HANG.refer(str(wait))) from error
        finally:
            timer.cancel()
            del self._waits[key], self._progress[key]

    def snapshot(self) -> list[dict[str, Any]]:
        """Return all waits, oldest first, as plain values for a status file; a sign of progress makes one young."""
        now = time.time()
        waits = [replace(wait, since=max(wait.since, now - self._progress[key]())) for key, wait in self._waits.items()]
        return [asdict(wait) for wait in sorted(waits, key=lambda wait: wait.since)]
