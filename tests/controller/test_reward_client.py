"""Requests to rewards processes, which come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from streamrl.controller.reward_client import Rewarders
from streamrl.rollouts.types import Group
from streamrl.transport import flow as flow_module
from streamrl.transport.deadlines import DeadlineExpired
from streamrl.transport.endpoint import Flow
from tests.transport.sockets import Sites, link, run
from tests.waiting import holds, scaled, until

GROUP = Group("g", 1, 0, "p", "t", 0, "", np.arange(3, dtype=np.int32), 2)
PLACES = {"rewards-east": "east", "rewards-west": "west"}


class Leaving:
    """A hub whose peer says goodbye while the request for a sample waits for its credit."""

    def __init__(self, at: str) -> None:
        self.peers: dict[str, object] = {"rewards-home": None}
        self.at = at
        self.tried: list[str] = []
        self.sent: list[str] = []
        self.credit = asyncio.Event()
        self.credit.set()

    def beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.ensure_future(work)

    async def send(self, peer: str, kind: str, body: dict[str, Any]) -> None:
        self.tried.append(body["sample_id"])
        await self.credit.wait()
        if body["sample_id"] == self.at:
            self.peers.pop(peer, None)
        if peer not in self.peers:
            raise KeyError(peer)
        self.sent.append(body["sample_id"])


def test_a_process_that_leaves_before_it_takes_a_request_gets_it_when_it_is_back() -> None:
    hub = Leaving("g.001")
    rewarders = Rewarders(hub, {"rewards-home": "home"})  # type: ignore[arg-type]

    async def ask() -> None:
        rewarders.start()
        for number in range(3):
            rewarders.ask(GROUP, f"g.00{number}", "4")
        await until(lambda: len(hub.tried) == 3)
        assert hub.sent == ["g.000"]
        assert rewarders.answered("rewards-home", "g.000")
        hub.peers["rewards-home"], hub.at = None, ""
        rewarders.returned("rewards-home")
        await until(lambda: len(hub.tried) == 5)

    asyncio.run(ask())
    assert hub.sent == ["g.000", "g.001", "g.002"]


def test_a_process_that_is_back_gets_what_is_open_once() -> None:
    """Some requests still wait for a credit when it comes back, and one of them has been answered by then."""
    hub = Leaving("")
    rewarders = Rewarders(hub, {"rewards-home": "home"})  # type: ignore[arg-type]

    async def ask() -> None:
        rewarders.start()
        rewarders.ask(GROUP, "g.000", "4")
        await until(lambda: hub.sent == ["g.000"])
        hub.credit.clear()
        for number in range(1, 5):
            rewarders.ask(GROUP, f"g.00{number}", "4")
        await until(lambda: hub.tried[1:] == ["g.001"])
        assert rewarders.answered("rewards-home", "g.001")
        rewarders.returned("rewards-home")
        assert rewarders.answered("rewards-home", "g.002")
        hub.credit.set()
        await until(lambda: hub.sent[-1] == "g.004")

    asyncio.run(ask())
    assert hub.sent[2:] == ["g.000", "g.003", "g.004"]


def test_a_process_that_is_away_holds_up_no_other_and_neither_who_asks() -> None:
    """More is asked of it than it has credits for; once its site is excluded, nothing waits for a credit of it."""

    async def body() -> None:
        sites = Sites()
        hub = sites.hub(flow=Flow(credits=4))
        east = await link("rewards-east", "east").connect(sites.address, scaled(10), sites.as_client(sites.east))
        west = await link("rewards-west", "west").connect(sites.address, scaled(10), sites.as_client(sites.west))
        for task in east._tasks:
            task.cancel()  # it is connected, and neither reads nor acknowledges anything
        rewarders = Rewarders(hub, PLACES)
        rewarders.start()
        for name in PLACES:
            rewarders.names = [name]
            for number in range(100):
                rewarders.ask(GROUP, f"g.{number:03d}", "4")
        rewarders.names = list(PLACES)

        async def asked() -> str:
            delivery = await west.receive()
            delivery.ack()
            return str(delivery.body["sample_id"])

        assert [await asked() for _ in range(100)] == [f"g.{number:03d}" for number in range(100)]
        assert [wait["waiting_for"] for wait in hub.waits.snapshot()] == ["rewards-east to acknowledge messages"]
        rewarders.exclude("east")
        assert {await asked() for _ in range(100)} == {f"g.{number:03d}" for number in range(100)}
        await until(lambda: not hub.waits.snapshot())
        await holds(lambda: hub.receive_now() is None, 0.1)
        for end in (east, west, hub):
            await end.close()

    run(body)


def test_that_a_process_takes_nothing_for_too_long_reaches_the_owner_of_the_hub(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flow_module, "SEND_LIMIT_S", 0.1)

    async def body() -> None:
        sites = Sites()
        hub = sites.hub(flow=Flow(credits=1, lost_after_s=float("inf")))
        east = await link("rewards-east", "east").connect(sites.address, scaled(10), sites.as_client(sites.east))
        rewarders = Rewarders(hub, {"rewards-east": "east"})
        rewarders.start()
        for number in range(2):
            rewarders.ask(GROUP, f"g.00{number}", "4")
        with pytest.raises(DeadlineExpired, match="rewards-east to acknowledge messages"):
            await hub.receive()
        await east.close()
        await hub.close()

    run(body)


def test_nothing_is_sent_any_more_once_the_hub_is_closed() -> None:
    async def body() -> None:
        hub = Sites().hub()
        rewarders = Rewarders(hub, PLACES)
        rewarders.start()
        await hub.close()
        assert all(task.done() for task in rewarders._sending.values())

    run(body)
