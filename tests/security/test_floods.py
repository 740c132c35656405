"""A peer with a valid key that keeps to no credits: what it can fill has an end, and others are served."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from streamrl.transport import hub as hub_module
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.delivery import MOST_AHEAD, Inbox
from streamrl.transport.endpoint import Hub, Link
from streamrl.transport.peer import PeerRoute
from streamrl.transport.wire import Message, encode
from tests.training.conftest import free_port

FLOOD = 20_000


def flooded(frames: Any, count: int = FLOOD) -> Hub:
    """A hub to which a peer of another site has sent `frames(n)` for each n."""

    async def body() -> Hub:
        hub = Hub("controller", WaitRegistry("controller"))
        hub.bind_outside(f"tcp://127.0.0.1:{free_port()}", None)
        hub._answer = lambda route, answer: True  # type: ignore[method-assign]
        route = PeerRoute(hub._doors[0], b"flood")
        meta = {"name": "service-west", "role": "service", "meta": {"site": "west"}}
        hub._arrived(route, list(encode(Message("hello", "life", 0, meta))), None)
        for number in range(1, count + 1):
            hub._arrived(route, list(encode(frames(number))), None)
        await hub.close()
        return hub

    return asyncio.run(body())


def test_messages_beyond_any_credits_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = flooded(lambda number: Message("item", "life", number, {}))
    assert hub._inbox.qsize() == hub_module.MOST_OPEN
    assert hub.refused() == {"too many": {"service-west": FLOOD - hub_module.MOST_OPEN}}
    monkeypatch.setattr(hub_module, "MOST_OPEN_BYTES", 100_000)
    hub = flooded(lambda number: Message("item", "life", number, {"x": "y" * 1000}), 1000)
    assert 90 < hub._inbox.qsize() < 100


def test_a_message_without_a_number_cannot_fill_the_queue() -> None:
    hub = flooded(lambda number: Message("item", "life", 0, {}), 100)
    assert hub._inbox.empty() and hub.refused() == {"malformed": {"service-west": 100}}


def test_numbers_with_gaps_are_not_remembered_for_ever() -> None:
    inbox = Inbox()
    for n in range(1, 1000):
        if inbox.receive("life", n * MOST_AHEAD) == "new":
            inbox.commit("life", n * MOST_AHEAD)
    assert len(inbox.committed) == 1 and not inbox.open


def test_what_is_committed_makes_room_and_one_large_message_always_has_it() -> None:
    inbox = Inbox(most_open=2, most_bytes=100)
    assert inbox.receive("life", 1, 500) == "new"
    assert inbox.receive("life", 2, 1) == "full"
    assert inbox.commit("life", 1) and inbox.open_bytes == 0
    assert [inbox.receive("life", n, 10) for n in (2, 3, 4)] == ["new", "new", "full"]
    assert inbox.commit("life", 3)
    assert inbox.receive("life", 4, 10) == "new"
    assert inbox.receive("another life", 1, 10) == "new" and inbox.open_bytes == 10


def test_another_peer_is_served_during_a_flood() -> None:
    async def body() -> None:
        hub = Hub("controller", WaitRegistry("controller"))
        hub.bind_outside(address := f"tcp://127.0.0.1:{free_port()}", None)
        links = [
            await Link(f"service-{site}", "service", WaitRegistry(site), {"site": site}).connect(address, 30)
            for site in ("west", "east")
        ]
        hostile, honest = links
        try:
            for number in range(1, FLOOD + 1):  # its own outbox is not asked
                hostile._put(encode(Message("item", hostile.session, number, {})))
            await honest.send("item", {"from": "east"})
            while (delivery := await hub.receive()).peer != "service-east":
                pass
            delivery.ack()
            await honest.flush(30)
            assert hub._inbox.qsize() <= hub_module.MOST_OPEN
        finally:
            for link in links:
                await link.close()
            await hub.close()

    asyncio.run(body())
