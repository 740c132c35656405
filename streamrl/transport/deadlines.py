"""Waits with an owner, something waited for, and a limit; all of a process's waits can be listed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from streamrl.errors import RunFailed

T = TypeVar("T")


class DeadlineExpired(RunFailed):
    """Raised when a wait exceeds its limit; the message says who waited for what, and how long."""


@dataclass(frozen=True)
class Wait:
    """One wait in progress."""

    owner: str
    waiting_for: str
    since: float
    """Start of the wait, in unix seconds."""
    limit_s: float


class WaitRegistry:
    """The waits of one process."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._waits: dict[object, Wait] = {}
        self._begun: dict[str, float] = {}
        """Expiry of each wait of `begin` (monotonic seconds)."""

    def begin(self, name: str, waiting_for: str, limit_s: float) -> None:
        """Register a wait in the background; `end` ends it, and beginning it again renews its limit."""
        self._waits[name] = Wait(self.owner, waiting_for, time.time(), limit_s)
        self._begun[name] = time.monotonic() + limit_s

    def end(self, name: str) -> None:
        """End a wait of `begin`, if there is one."""
        self._waits.pop(name, None)
        self._begun.pop(name, None)

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
        name = min(self._begun, key=self._begun.__getitem__)
        async with self._limited(self._waits[name], max(0.0, self._begun[name] - time.monotonic())):
            return await awaitable

    @asynccontextmanager
    async def deadline(self, waiting_for: str, limit_s: float) -> AsyncIterator[None]:
        """Limit the time of what is awaited inside.

        Raises:
            DeadlineExpired: `limit_s` seconds have passed.
        """
        key = object()
        wait = self._waits[key] = Wait(self.owner, waiting_for, time.time(), limit_s)
        try:
            async with self._limited(wait, limit_s):
                yield
        finally:
            del self._waits[key]

    @asynccontextmanager
    async def _limited(self, wait: Wait, seconds: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(seconds) as scope:
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise DeadlineExpired(f"{self.owner} waited {wait.limit_s:.0f} s for {wait.waiting_for}") from error

    def snapshot(self) -> list[dict[str, Any]]:
        """Return all waits, oldest first, as plain values for a status file."""
        return [asdict(wait) for wait in sorted(self._waits.values(), key=lambda wait: wait.since)]
