"""The path of a service's reports to the controller, in order; finished samples have their own (`uplink.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from streamrl.protocol.message import TypedMessage, wire
from streamrl.transport.endpoint import Link
from streamrl.transport.wire import Arrays


class Reports:
    """A queue of reports.

    While another site is away, the link has no credit: whoever hears from instances or looks after them must not wait
    for that. What is queued then is little: one report for each event of an instance.
    """

    def __init__(self, controller: Link) -> None:
        self._controller = controller
        self._waiting: asyncio.Queue[tuple[TypedMessage, Arrays | None, Callable[[], None]]] = asyncio.Queue()

    def put(
        self, report: TypedMessage, arrays: Arrays | None = None, on_sent: Callable[[], None] = lambda: None
    ) -> None:
        """Queue a report without waiting; `on_sent` is called once it has been handed to the link."""
        self._waiting.put_nowait((report, arrays, on_sent))

    async def run(self) -> None:
        """Send the reports, one after the other.

        Raises:
            DeadlineExpired, Refused: see `Link.send`.
        """
        while True:
            report, arrays, on_sent = await self._waiting.get()
            await self._controller.send(*wire(report), arrays)
            on_sent()
