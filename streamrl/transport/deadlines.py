"""Every wait has an owner, something it waits for, and a limit; all of a process's waits can be listed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

from streamrl.errors import RunFailed


class DeadlineExpired(RunFailed):
    """A wait took longer than its limit; the message says who waited for whom, and how long."""


@dataclass(frozen=True)
class Wait:
    """One wait under way."""

    owner: str
    waiting_for: str
    since: float
    """Unix seconds."""
    limit_s: float


class WaitRegistry:
    """The waits of one process."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._waits: dict[int, Wait] = {}
        self._next = 0

    @asynccontextmanager
    async def deadline(self, waiting_for: str, limit_s: float) -> AsyncIterator[None]:
        """Limits what is awaited inside.

        Raises:
            DeadlineExpired: after `limit_s` seconds.
        """
        key, self._next = self._next, self._next + 1
        self._waits[key] = Wait(self.owner, waiting_for, time.time(), limit_s)
        try:
            async with asyncio.timeout(limit_s) as scope:
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise DeadlineExpired(f"{self.owner} waited {limit_s:.0f} s for {waiting_for}") from error
        finally:
            del self._waits[key]

    def snapshot(self) -> list[dict[str, Any]]:
        """All waits, oldest first, as plain values for a status file."""
        return [asdict(wait) for wait in sorted(self._waits.values(), key=lambda wait: wait.since)]
