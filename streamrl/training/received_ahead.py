"""Receive and prepare the next item while the current one is worked on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class ReceivedAhead(Generic[T, R]):
    """Items in their order, each with what was prepared of it; one is received and prepared ahead."""

    def __init__(self, receive: Callable[[], Awaitable[T]], prepare: Callable[[T], Awaitable[R]]) -> None:
        """
        Args:
            receive: waits for the next item.
            prepare: what can be done with an item before it is its turn.
        """
        self._receive, self._prepare = receive, prepare
        self._coming = asyncio.create_task(self._one())

    async def _one(self) -> tuple[T, R]:
        item = await self._receive()
        return item, await self._prepare(item)

    async def next(self) -> tuple[T, R]:
        """Return the next item, and begin with the one after it."""
        found = await self._coming
        self._coming = asyncio.create_task(self._one())
        return found

    def close(self) -> None:
        """End the wait for the next item."""
        self._coming.cancel()
