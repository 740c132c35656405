"""The path of a service's reports: in order, and of those on the fleet only the newest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from streamrl.generation.site.reports import Reports
from streamrl.protocol.controller_site import FleetChanged, InstanceState, SiteAsleep
from streamrl.transport.wire import Arrays


class Controller:
    """Stands for the link: records what is sent, and acknowledges it when it is told to."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.acks: list[Callable[[], None]] = []

    async def send(
        self, kind: str, body: dict[str, Any], arrays: Arrays | None = None, on_ack: Callable[[], None] | None = None
    ) -> None:
        self.sent.append(body["instances"]["i"]["detail"] if kind == "fleet" else kind)
        if on_ack is not None:
            self.acks.append(on_ack)


def fleet(detail: str) -> FleetChanged:
    return FleetChanged(fleet=[], instances={"i": InstanceState("main", "dead", detail)})


def test_of_reports_on_the_fleet_only_the_newest_is_sent_and_only_after_the_one_before_was_handled() -> None:
    async def play() -> None:
        controller = Controller()
        reports = Reports(controller)  # type: ignore[arg-type]
        sending = asyncio.create_task(reports.run())

        async def put(*several: FleetChanged | SiteAsleep) -> list[Any]:
            for report in several:
                reports.put(report)
            for _ in range(10):  # whatever can be sent is sent then: nothing here waits for anything outside
                await asyncio.sleep(0)
            sent, controller.sent = controller.sent, []
            return sent

        assert await put(fleet("1"), fleet("2"), SiteAsleep(), fleet("3")) == ["3", "asleep"]
        assert await put(fleet("4"), SiteAsleep(), fleet("5")) == ["asleep"]
        controller.acks.pop()()
        assert await put() == ["5"]
        controller.acks.pop()()
        assert await put() == [] and not controller.acks
        assert await put(fleet("6")) == ["6"]
        sending.cancel()

    asyncio.run(play())
