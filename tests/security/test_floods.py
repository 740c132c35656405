"""A peer with a valid key that keeps to no credits: what it can fill has an end, and others are served."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from streamrl.transport import budgets
from streamrl.transport import hub as hub_module
from streamrl.transport import peer as peer_module
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.delivery import MOST_AHEAD, Inbox
from streamrl.transport.endpoint import Hub, Link
from streamrl.transport.peer import HeldMessage, PeerRoute
from streamrl.transport.wire import MAX_ENVELOPE_BYTES, MAX_STATE_BYTES, Message, decode, encode
from tests.ports import free_port
from tests.transport.sockets import run, until

FLOOD = 20_000
SMALL_FLOOD = 2_000
"""Ten times as many as may come at once of those that a peer sends rarely."""


def flooded(frames: Any, count: int = FLOOD) -> Hub:
    """A hub to which a peer of another site has sent `frames(n)`, a message or its frames, for each n."""

    async def body() -> Hub:
        hub = Hub("controller", WaitRegistry("controller"))
        hub.forwards_hellos = True
        hub.bind_outside(f"tcp://127.0.0.1:{free_port()}", None)
        hub._answer = lambda route, answer: True  # type: ignore[method-assign]
        route = PeerRoute(hub._doors[0], b"flood")
        meta = {"name": "service-west", "role": "service", "meta": {"site": "west"}}
        hub._arrived(route, list(encode(Message("hello", "life", 0, meta))), None)
        for number in range(1, count + 1):
            made = frames(number)
            hub._arrived(route, made if isinstance(made, list) else list(encode(made)), None)
        await hub.close()
        return hub

    return asyncio.run(body())


def test_messages_beyond_any_credits_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = flooded(lambda number: Message("item", "life", number, {}))
    assert hub._inbox.qsize() == peer_module.MOST_OPEN + 1
    assert hub.refused() == {"too many": {"service-west": FLOOD - peer_module.MOST_OPEN}}
    monkeypatch.setattr(peer_module, "MOST_OPEN_BYTES", 100_000)
    data = {"x": np.zeros(1000, np.float32)}
    hub = flooded(lambda number: Message("item", "life", number, {}, data), 1000)
    assert 10 < hub._inbox.qsize() < 20


def test_a_message_counts_as_what_it_becomes_and_not_as_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "MOST_OPEN_BYTES", 10_000_000)
    hub = flooded(lambda number: Message("item", "life", number, {"x": [[]] * 10_000}), 30)  # 10 KB, 640 KB as lists
    assert 10 < hub._inbox.qsize() < 20 and sum(hub.refused()["too many"].values()) > 10


def test_a_message_without_a_number_cannot_fill_the_queue() -> None:
    hub = flooded(lambda number: Message("item", "life", 0, {}), 100)
    assert hub._inbox.qsize() == 1 and hub.refused() == {"malformed": {"service-west": 100}}


def hello(session: str, name: str = "service-west", **meta: Any) -> Message:
    return Message("hello", session, 0, {"name": name, "role": "service", "meta": {"site": "west"} | meta})


@pytest.mark.parametrize("ends", [False, True], ids=["again", "after a bye"])
def test_hellos_of_ever_new_sessions_cannot_fill_the_queue(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(budgets.PER_S, "hello", 0.0)  # however long the flood takes

    def frames(number: int) -> Message:
        return Message("bye", f"life {number - 1}", 0, {}) if ends and number % 2 else hello(f"life {number}")

    hub = flooded(frames, SMALL_FLOOD)
    admitted = int(budgets.SIZES["hello"]) - 1
    assert hub._inbox.qsize() == (2 * admitted - 1 if ends else admitted) and len(hub.peers) <= 1 >= len(hub._routes)
    assert sum(hub.refused()["too many"].values()) == 1 + (SMALL_FLOOD // 2 if ends else SMALL_FLOOD) - admitted


def test_large_hellos_and_heartbeats_are_few_and_no_larger_than_they_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("hello", "heartbeat"):
        monkeypatch.setitem(budgets.PER_S, kind, 0.0)
    monkeypatch.setitem(budgets.SIZES, "envelope", 1e4)
    large = {"x": "y" * 2_000_000}  # 31.5 messages
    assert flooded(lambda number: hello("another life", **large), 30).refused() == {"too many": {"service-west": 29}}
    hub = flooded(lambda number: Message("heartbeat", "life", 0, large), 30)
    assert hub.refused() == {"too many": {"service-west": 24}} and hub.peers["service-west"].state == large
    for message in (hello("life", x="y" * 5_000_000), Message("heartbeat", "life", 0, {"x": "y" * 5_000_000})):
        assert flooded(lambda number: message, 1).refused() == {"malformed": {"service-west": 1}}  # noqa: B023


def test_heartbeats_beyond_a_few_a_second_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(budgets.PER_S, "heartbeat", 0.0)
    hub = flooded(lambda number: Message("heartbeat", "life", 0, {"number": number}), SMALL_FLOOD)
    assert hub.peers["service-west"].state["number"] == 199  # each costs a little more than one
    assert hub.refused() == {"too many": {"service-west": SMALL_FLOOD - 199}}


def test_envelopes_of_another_site_are_unpacked_up_to_a_size_and_so_many_bytes_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A byte of an envelope can be a list, so those of a flood would keep the hub busy."""
    unpacked: list[int] = []

    def recorded(frames: list[bytes]) -> Message:
        unpacked.append(len(frames[0]))
        return decode(frames)

    monkeypatch.setattr(hub_module, "decode", recorded)
    monkeypatch.setitem(budgets.PER_S, "envelope", 0.0)
    huge = list(encode(Message("item", "life", 1, {"x": "y" * 5_000_000})))
    huge[0] = bytes(huge[0]) + bytes(MAX_ENVELOPE_BYTES)
    hub = flooded(lambda number: huge, 3)
    assert hub.refused() == {"malformed": {"service-west": 3}} and len(unpacked) == 1  # the hello
    monkeypatch.setattr(peer_module, "MOST_HELD_BYTES", 3 * 2**20 + 2**19)
    hub = flooded(lambda number: Message("item", "life", number, {"x": "y" * 2**20}), 40)
    passed = int(budgets.SIZES["envelope"]) // 16 - 1  # each is a little larger than 16 times 64 KiB
    assert hub.refused() == {"too many": {"service-west": 40 - passed - 3}} and len(unpacked) == 2 + passed
    assert len(hub.peers["service-west"].held) == 3
    flooded(lambda number: Message("item", "life", number, {}, {"x": np.zeros(2**20, np.float32)}), 40)
    assert len(unpacked) == 2 + passed + 41  # arrays are not unpacked


def test_before_its_hello_a_connection_is_read_less_and_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(budgets.PER_S, "envelope", 0.0)
    empty = len(encode(Message("item", "life", 1, {"x": "y" * 2**20}))[0]) - 2**20

    async def body() -> None:
        hub = Hub("controller", WaitRegistry("controller")).bind_outside(f"tcp://127.0.0.1:{free_port()}", None)
        hub._answer = lambda route, answer: True  # type: ignore[method-assign]
        stranger = PeerRoute(hub._doors[0], b"stranger")

        def arrives(size: int) -> None:
            hub._arrived(stranger, list(encode(Message("item", "life", 1, {"x": "y" * (size - empty)}))), None)

        arrives(MAX_STATE_BYTES + 1)
        assert (hub.malformed, hub.unknown) == (1, 0)
        for _ in range(8):  # the first has been charged, too
            arrives(MAX_STATE_BYTES)
        assert (hub.malformed, hub.unknown) == (1, 6) and sum(hub.refused()["too many"].values()) == 2
        await hub.close()

    asyncio.run(body())


def hub_with_peer() -> tuple[Hub, PeerRoute]:
    """A hub that service-west has said hello to, and that answers nobody, with the connection of the hello."""
    hub = Hub("controller", WaitRegistry("controller")).bind_outside(f"tcp://127.0.0.1:{free_port()}", None)
    hub._answer = lambda route, answer: True  # type: ignore[method-assign]
    route = PeerRoute(hub._doors[0], b"west")
    hub._arrived(route, list(encode(hello("life"))), None)
    return hub, route


def test_messages_that_come_too_fast_wait_and_are_taken_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be repeated only much later, after others: an older state would replace a newer one."""
    monkeypatch.setitem(budgets.PER_S, "envelope", 0.0)
    monkeypatch.setitem(budgets.SIZES, "envelope", 300.0)

    async def body() -> None:
        hub, route = hub_with_peer()
        for number, size in enumerate([15 * 2**20, 2**22, 2**22, 10, 2**22], 1):  # the first one takes most of it
            hub._arrived(route, list(encode(Message("item", "life", number, {"n": number, "x": "y" * size}))), None)
        assert hub._inbox.qsize() == 1 and len(hub.peers["service-west"].held) == 4
        hub.peers["service-west"].last_seen = 0.0
        hub._arrived(route, list(encode(Message("heartbeat", "life", 0, {"x": 1}))), None)
        assert hub.silent_for("service-west") < 1000 and hub.peers["service-west"].state == {}  # heard, read later
        monkeypatch.setitem(budgets.PER_S, "envelope", 1e6)
        assert [(await hub.receive()).body["n"] for _ in range(5)] == [1, 2, 3, 4, 5]
        await until(lambda: hub.peers["service-west"].state == {"x": 1})
        assert hub.refused() == {} and not hub.peers["service-west"].held
        await hub.close()

    run(body)


def test_an_error_in_a_message_that_has_waited_is_raised_by_receive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(budgets.PER_S, "envelope", 1e6)
    monkeypatch.setitem(budgets.SIZES, "envelope", 300.0)

    async def body() -> None:
        hub, route = hub_with_peer()
        item = list(encode(Message("item", "life", 1, {})))
        hub._hold(hub.peers["service-west"], HeldMessage(route, item, None))
        monkeypatch.setattr(hub, "_handle", Mock(side_effect=RuntimeError("a defect")))
        with pytest.raises(RuntimeError, match="a defect"):
            await hub.receive()
        await hub.close()

    run(body)


def test_a_budget_fills_with_time_and_large_messages_cost_more() -> None:
    budget = budgets.Budget("hello")
    assert [budget.spend(0, 5.0) for _ in range(61)] == [True] * 60 + [False]
    assert [budget.spend(0, 7.0) for _ in range(3)] == [True, True, False]
    assert [budget.spend(10 * 2**16, now) for now in (15.0, 18.5, 19.0)] == [False, True, False]
    assert [budget.spend(0, 10_000.0) for _ in range(61)] == [True] * 60 + [False]


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
            assert hub._inbox.qsize() <= peer_module.MOST_OPEN
        finally:
            for link in links:
                await link.close()
            await hub.close()

    asyncio.run(body())
