"""Commands to instances that wait for an answer, with a deadline that names the command and the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from streamrl.protocol.message import TypedMessage, wire
from streamrl.transport.deadlines import WaitRegistry, never
from streamrl.transport.endpoint import Delivery, Hub


class InstanceLost(Exception):
    """An instance died or fell silent while an answer was expected of it."""


class Answers:
    """The answers that a service expects from its instances: one per command."""

    def __init__(self, hub: Hub, waits: WaitRegistry) -> None:
        """
        Args:
            hub: hub that the instances connect to.
            waits: registry of waits for instances.
        """
        self._hub, self._waits = hub, waits
        self._expected: dict[tuple[str, str, str], asyncio.Future[Any]] = {}
        """Expected answers by (kind, instance, call)."""

    async def ask(
        self,
        name: str,
        command: TypedMessage,
        answer: str,
        limit_s: float,
        since_progress: Callable[[], float] = never,
        call: str = "",
    ) -> Any:
        """Send an instance a command and wait for its answer.

        Args:
            name: name of the instance.
            command: message to send.
            answer: kind of the message that answers it.
            limit_s: seconds to wait for the answer.
            since_progress: returns the seconds since the latest sign of progress, from which the limit then counts.
            call: id of the command that its answer repeats; '': it has none.

        Raises:
            InstanceLost: the instance died, or was given up.
            DeadlineExpired: the instance did not answer in time.
        """
        if name not in self._hub.peers:
            raise InstanceLost(name)
        key = answer, name, call
        future = self._expected[key] = asyncio.get_running_loop().create_future()
        kind, body = wire(command)
        try:
            await self._hub.send(name, kind, body)
            async with self._waits.deadline(f"{name} to answer {kind} with {answer}", limit_s, since_progress):
                return await future
        finally:
            if self._expected.get(key) is future:  # an answer that comes later is nobody's
                del self._expected[key]

    def give_up(self, name: str) -> bool:
        """Stop waiting for an instance's answers; return whether any were awaited."""
        expected = [self._expected.pop(key) for key in list(self._expected) if key[1] == name]
        waiting = [future for future in expected if not future.done()]
        for future in waiting:
            future.set_exception(InstanceLost(name))
        return bool(waiting)

    def take(self, delivery: Delivery) -> bool:
        """Accept an instance's message; return whether it was an expected answer."""
        future = self._expected.pop((delivery.kind, delivery.peer, getattr(delivery.body, "call", "")), None)
        if future is not None and not future.done():
            future.set_result(delivery.body)
        return future is not None
