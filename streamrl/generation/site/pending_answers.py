"""What a service expects of its instances: one command, one answer, with a deadline that names both."""

from __future__ import annotations

import asyncio
from typing import Any

from streamrl.protocol.message import TypedMessage, wire
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Delivery, Hub


class InstanceLost(Exception):
    """An instance died, or fell silent, while something was expected of it."""


class Answers:
    """See the module's text."""

    def __init__(self, hub: Hub, waits: WaitRegistry) -> None:
        """
        Args:
            hub: that the instances connect to.
            waits: where waits for them are registered.
        """
        self._hub, self._waits = hub, waits
        self._expected: dict[tuple[str, str], asyncio.Future[Any]] = {}
        """By kind and instance."""

    async def ask(self, name: str, command: TypedMessage, answer: str, limit_s: float) -> Any:
        """Sends an instance a command and waits for its answer.

        Args:
            name: of the instance.
            command: what it is told.
            answer: kind of the message that answers it.
            limit_s: for the answer.

        Raises:
            InstanceLost: it died, or was given up.
            DeadlineExpired: it did not answer in time.
        """
        if name not in self._hub.peers:
            raise InstanceLost(name)
        future = self._expected[answer, name] = asyncio.get_running_loop().create_future()
        kind, body = wire(command)
        await self._hub.send(name, kind, body)
        async with self._waits.deadline(f"{name} to answer {kind} with {answer}", limit_s):
            return await future

    def give_up(self, name: str) -> bool:
        """Nothing is expected of an instance any more; whether anything was."""
        expected = [self._expected.pop(key) for key in list(self._expected) if key[1] == name]
        waiting = [future for future in expected if not future.done()]
        for future in waiting:
            future.set_exception(InstanceLost(name))
        return bool(waiting)

    def take(self, delivery: Delivery) -> bool:
        """An instance's message; whether it was an answer that is waited for."""
        future = self._expected.pop((delivery.kind, delivery.peer), None)
        if future is not None and not future.done():
            future.set_result(delivery.body)
        return future is not None
