"""The path of a service's reports to the controller, in order; finished samples have their own (`uplink.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from streamrl.protocol.controller_site import FleetChanged
from streamrl.protocol.message import TypedMessage, wire
from streamrl.transport.endpoint import Link
from streamrl.transport.wire import Arrays


class Reports:
    """A queue of reports.

    While another site is away, the link has no credit: whoever hears from instances or looks after them must not wait
    for that. What is queued then is little: one report for each event of an instance.

    A report on the fleet is the exception: it tells of all instances, and at a large site all may change at once. It is
    sent when the controller has handled the one before; of those that come meanwhile only the newest is. So the link is
    not filled with them, and none arrives after a newer one.
    """

    def __init__(self, controller: Link) -> None:
        self._controller = controller
        self._waiting: asyncio.Queue[tuple[TypedMessage | None, Arrays | None, Callable[[], None]]] = asyncio.Queue()
        """Reports with their arrays and `on_sent`; None: the newest on the fleet, at the time of sending."""
        self._fleet: FleetChanged | None = None
        """Newest report on the fleet, if it has not been sent."""
        self._fleet_on_its_way = False
        """Whether a report on the fleet is queued, or sent and not acknowledged."""

    def put(
        self, report: TypedMessage, arrays: Arrays | None = None, on_sent: Callable[[], None] = lambda: None
    ) -> None:
        """Queue a report without waiting; `on_sent` is called once it has been handed to the link."""
        if isinstance(report, FleetChanged):
            self._fleet = report
            if not self._fleet_on_its_way:
                self._queue_fleet()
        else:
            self._waiting.put_nowait((report, arrays, on_sent))

    def _queue_fleet(self) -> None:
        self._fleet_on_its_way = self._fleet is not None
        if self._fleet_on_its_way:
            self._waiting.put_nowait((None, None, lambda: None))

    async def run(self) -> None:
        """Send the reports, one after the other.

        Raises:
            DeadlineExpired, Refused: see `Link.send`.
        """
        while True:
            report, arrays, on_sent = await self._waiting.get()
            if report is not None:
                await self._controller.send(*wire(report), arrays)
            elif self._fleet is not None:
                report, self._fleet = self._fleet, None
                await self._controller.send(*wire(report), on_ack=self._queue_fleet)
            on_sent()
