"""Hub and links over real sockets on loopback."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
import zmq.asyncio

from streamrl.errors import RunFailed
from streamrl.transport import delivery as delivery_module
from streamrl.transport import endpoint_base
from streamrl.transport import hub as hub_module
from streamrl.transport import link as link_module
from streamrl.transport.deadlines import DeadlineExpired, WaitRegistry
from streamrl.transport.endpoint import Flow, Hub, Link, PeerLost, Refused
from streamrl.transport.peer import PeerRoute
from streamrl.transport.wire import PROTOCOL_VERSION, Message, encode
from tests.ports import free_port
from tests.transport import sockets
from tests.waiting import holds, scaled, until


def run(body: Callable[[str], Awaitable[Any]]) -> Any:
    return sockets.run(lambda: body(f"tcp://127.0.0.1:{free_port()}"))


def hub_at(address: str, **options: Any) -> Hub:
    return Hub("hub", WaitRegistry("hub"), **options).bind(address)


async def link_to(address: str, name: str = "peer", **options: Any) -> Link:
    return await Link(name, "test", WaitRegistry(name), **options).connect(address, scaled(10))


def test_messages_arrive_in_order_with_arrays_and_are_acknowledged_after_commit() -> None:
    async def body(address: str) -> None:
        hub, link = hub_at(address), await link_to(address)
        acknowledged: list[int] = []
        for i in range(20):
            await link.send("item", {"i": i}, {"x": np.full(3, i, np.int32)}, on_ack=lambda i=i: acknowledged.append(i))
        deliveries = [await hub.receive() for _ in range(20)]
        assert [d.body["i"] for d in deliveries] == list(range(20))
        assert deliveries[7].arrays["x"].tolist() == [7, 7, 7]
        await holds(lambda: acknowledged == [], 0.2)  # received is not committed
        for delivery in deliveries:
            delivery.ack()
        await link.flush(scaled(5))
        assert sorted(acknowledged) == list(range(20))
        await link.close()
        await hub.close()

    run(body)


@pytest.mark.parametrize("how", ["another process", "taken for dead"])
def test_a_life_that_has_ended_does_not_return(how: str) -> None:
    """Its receiver would take the first messages of a new outbox for those that it has had, and lose them."""

    async def body(address: str) -> None:
        hub, first = hub_at(address), await link_to(address)
        for i in range(3):
            await hub.send("peer", "item", {"i": i})
            (await first.receive()).ack()
        if how == "another process":
            second = await link_to(address)
        else:
            hub.drop("peer")
        with pytest.raises(Refused, match="another process of this name has come since, or hub has taken this one for"):
            await first.receive()  # its heartbeat is answered, and then its hello
        await first.close()
        if how == "taken for dead":
            second = await link_to(address)
        for i in range(3):
            await hub.send("peer", "item", {"i": i})
        assert [(await second.receive()).body["i"] for _ in range(3)] == [0, 1, 2]
        assert hub.peers["peer"].session == second.session
        await second.close()
        await hub.close()

    run(body)


def test_a_late_first_hello_displaces_a_process_that_began_later_only_if_that_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "HELLO_S", 0.1)
    monkeypatch.setattr(endpoint_base, "HEARTBEAT_S", scaled(0.2))

    async def body(address: str) -> None:
        hub = hub_at(address)
        replaced, behind = (Link("peer", "test", WaitRegistry("peer")) for _ in range(2))
        successor = await link_to(address)
        connecting = asyncio.create_task(replaced.connect(address, scaled(10)))
        await until(lambda: hub.refused_peers > 1)  # it asks again
        replaced._late_until = 0.0
        with pytest.raises(Refused, match="which began later, and hub hears it"):
            await connecting
        assert hub.peers["peer"].session == successor.session
        await hub.send("peer", "item", {"i": 0})
        assert (await successor.receive()).body == {"i": 0}
        for task in successor._tasks:  # it dies
            task.cancel()
        await asyncio.gather(*successor._tasks, return_exceptions=True)
        hub.peers["peer"].last_seen -= 60
        await behind.connect(address, scaled(10))  # on a machine whose clock is behind
        assert hub.peers["peer"].session == behind.session
        for link in (replaced, successor, behind):
            await link.close()
        await hub.close()

    run(body)


def test_a_successor_whose_clock_was_set_back_is_admitted_once_its_dead_predecessor_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "HELLO_S", 0.1)
    monkeypatch.setattr(endpoint_base, "HEARTBEAT_S", scaled(0.2))

    async def body(address: str) -> None:
        hub = hub_at(address)
        dead = await Link("peer", "test", WaitRegistry("peer"), clock=lambda: time.time() + 3600).connect(address)
        for task in dead._tasks:  # it is killed
            task.cancel()
        successor = await Link("peer", "test", WaitRegistry("peer")).connect(address, scaled(60))
        assert hub.refused_peers, "it was taken for late at first"
        assert hub.peers["peer"].session == successor.session
        for link in (dead, successor):
            await link.close()
        await hub.close()

    run(body)


@pytest.mark.parametrize("begun", ["now", None, float("inf")])
def test_a_hello_of_a_process_that_began_at_no_time_is_malformed(begun: object) -> None:
    async def body(address: str) -> None:
        hub = hub_at(address)
        socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        socket.connect(address)
        hello = {"name": "peer", "role": "test", "meta": {}, "begun": begun}
        await socket.send_multipart(encode(Message("hello", "s", 0, hello)))
        await until(lambda: hub.malformed == 1)
        assert not hub.peers
        socket.close(0)
        await hub.close()

    run(body)


def test_a_sender_without_credit_waits_and_says_for_whom() -> None:
    async def body(address: str) -> None:
        hub, link = hub_at(address, flow=Flow(credits=2)), await link_to(address)
        await hub.send("peer", "item", {"i": 0})
        await hub.send("peer", "item", {"i": 1})
        with pytest.raises(DeadlineExpired, match="hub waited 0 s for peer to acknowledge"):
            await hub.send("peer", "item", {"i": 2}, limit_s=0.3)
        waiting = asyncio.create_task(hub.send("peer", "item", {"i": 3}))
        await until(lambda: hub.waits.snapshot())
        assert [w["waiting_for"] for w in hub.waits.snapshot()] == ["peer to acknowledge messages"]
        (await link.receive()).ack()
        await waiting
        assert hub.waits.snapshot() == []
        await link.close()
        await hub.close()

    run(body)


def test_malformed_and_unknown_messages_are_counted_and_hurt_nobody() -> None:
    async def body(address: str) -> None:
        hub, link = hub_at(address), await link_to(address)
        stranger = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        stranger.connect(address)
        for _ in range(50):
            await stranger.send_multipart([b"\x00junk", b"more"])
        well_formed = encode(Message("sample", "nobody", 1, {}))
        await stranger.send_multipart(well_formed)
        await until(lambda: hub.malformed >= 50 and hub.unknown >= 1)
        await link.send("item", {"i": 1})
        assert (await hub.receive()).body == {"i": 1}
        stranger.close(0)
        await link.close()
        await hub.close()

    run(body)


def speak_as(version: int, end: Hub | Link) -> None:
    """Let an end's messages, but those of `send`, be of another version of the protocol."""
    original = end._control

    def control(kind: str, body: dict[str, Any] | None = None) -> list[Any]:
        envelope, *arrays = original(kind, body)
        return [msgpack.packb(msgpack.unpackb(envelope) | {"v": version}), *arrays]

    end._control = control  # type: ignore[method-assign]


def test_two_versions_of_the_protocol_are_named_at_both_ends() -> None:
    async def body(address: str) -> None:
        hub, link = hub_at(address), Link("peer", "test", WaitRegistry("peer"))
        speak_as(98, link)
        speak_as(99, hub)
        with pytest.raises(Refused, match=f"peer need the same streamrl: .* 99 there, {PROTOCOL_VERSION} here .*E1012"):
            await link.connect(address, scaled(10), hub="home")
        assert hub.refused() == {"protocol version": {"a stranger": 1}} and not hub.peers
        await link.close()
        await hub.close()

    run(body)


def test_a_link_that_outlives_a_hub_of_its_version_ends_at_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_base, "HEARTBEAT_S", 0.1)

    async def body(address: str) -> None:
        first, link = hub_at(address), await link_to(address)
        await first.close()
        speak_as(98, link)
        second = await sockets.bind_again(lambda: hub_at(address))
        speak_as(99, second)
        with pytest.raises(Refused, match="need the same streamrl"):
            await link.receive()
        await link.close()
        await second.close()

    run(body)


def test_a_silent_peer_is_reported_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_base, "HEARTBEAT_S", 0.1)

    async def body(address: str) -> None:
        hub, link = hub_at(address, flow=Flow(lost_after_s=0.8)), await link_to(address)
        await holds(lambda: hub.receive_now() is None, 1.2)  # beating: not lost
        for task in link._tasks:
            task.cancel()
        with pytest.raises(PeerLost, match="peer has been silent"):
            await hub.receive()
        await hub.close()

    run(body)


def test_a_command_that_was_killed_is_forgotten_and_one_that_is_heard_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_base, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(hub_module, "FORGOTTEN_AFTER_S", scaled(0.8))

    async def body(address: str) -> None:
        hub = hub_at(address, flow=Flow(lost_after_s=math.inf))
        hub.passing = lambda speaker: speaker.name != "process"
        killed, heard, process = [await link_to(address, name) for name in ("killed", "heard", "process")]
        for link in (killed, process):
            for task in link._tasks:
                task.cancel()
        await until(lambda: set(hub.peers) == {"heard", "process"}, scaled(10))
        assert len(hub._routes) == 2
        await holds(lambda: set(hub.peers) == {"heard", "process"}, 1.2)
        await heard.close()
        await hub.close()

    run(body)


def test_a_link_notices_a_dead_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_base, "HEARTBEAT_S", 0.1)

    async def body(address: str) -> None:
        hub, link = hub_at(address), await link_to(address, flow=Flow(lost_after_s=0.8))
        await hub.close()
        with pytest.raises(PeerLost, match="has been silent"):
            await link.receive()

    run(body)


def test_unacknowledged_messages_are_delivered_once_after_the_hub_restarts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint_base, "HEARTBEAT_S", 0.1)

    async def body(address: str) -> None:
        hub, link = hub_at(address), await link_to(address)
        await link.send("item", {"i": 1})
        (await hub.receive()).ack()
        await link.flush(scaled(5))
        await link.send("item", {"i": 2})
        await hub.receive()  # read, not committed
        await hub.close()
        again = await sockets.bind_again(lambda: hub_at(address))
        delivery = await again.receive()
        assert delivery.body == {"i": 2}
        delivery.ack()
        await link.flush(scaled(5))
        assert again.receive_now() is None
        await link.close()
        await again.close()

    run(body)


def test_a_link_that_outlives_its_hub_counts_on_and_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers are beyond those that a hub remembers, and the old hub has left gaps."""
    monkeypatch.setattr(endpoint_base, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(delivery_module, "MOST_AHEAD", 50)

    async def body(address: str) -> None:
        hub, link = hub_at(address), await link_to(address)
        for number in range(60):
            await link.send("item", {"i": number})
            arrived = await hub.receive()
            if number != 55:  # read, not committed
                arrived.ack()
        await until(lambda: len(link._outbox.pending) == 1)
        await hub.close()
        again = await sockets.bind_again(lambda: hub_at(address))
        delivery = await again.receive()
        assert delivery.body == {"i": 55}
        delivery.ack()
        for number in range(60, 200):
            await link.send("item", {"i": number})
            delivery = await again.receive()
            assert delivery.body == {"i": number}
            delivery.ack()
            await link.flush(scaled(5))
            if number % 10 == 0:  # within the numbers that are remembered
                beaten = again.peers["peer"].inbox
                await until(lambda: beaten.committed_to == 1 + number)  # noqa: B023  (called at once)
        assert not again.peers["peer"].inbox.committed
        await link.close()
        await again.close()

    run(body)


@pytest.mark.parametrize("first", [-1, True, 1.5, "1", None])
def test_a_hello_that_begins_at_no_number_is_malformed(first: object) -> None:
    async def body(address: str) -> None:
        hub = hub_at(address)
        route = PeerRoute(hub._doors[0], b"peer")
        about = {"name": "peer", "role": "test", "meta": {}, "first": first}
        hub._arrived(route, list(encode(Message("hello", "s", 0, about))), None)
        assert not hub.peers and hub.malformed == 1
        await hub.close()

    run(body)


def test_an_address_in_use_is_said() -> None:
    async def body(address: str) -> None:
        hub = hub_at(address)
        with pytest.raises(RunFailed, match="cannot listen on"):
            hub_at(address)
        await hub.close()

    run(body)


def test_the_address_of_a_closed_hub_is_free_at_once() -> None:
    async def body(address: str) -> None:
        for _ in range(300):  # libzmq closes in a thread of its own: a few in a hundred met the last one even when idle
            await hub_at(address).close()

    run(body)


def test_the_wait_for_missing_peers_is_not_renewed_by_others() -> None:
    async def body(address: str) -> None:
        hub, limits = hub_at(address), []
        waiting = asyncio.create_task(hub.wait_for({"other", "third"}, scaled(30), limits.append))
        links = [await link_to(address, f"operator-{number}") for number in range(3)]
        links += [await link_to(address, "third"), await link_to(address, "operator-3")]
        links.append(await link_to(address, "other"))
        await waiting
        assert limits == [["other", "third"], ["other"]]
        for link in links:
            await link.close()
        await hub.close()

    run(body)


def test_missing_peers_are_named_at_the_deadline() -> None:
    async def body(address: str) -> None:
        hub, link = hub_at(address), await link_to(address)
        with pytest.raises(DeadlineExpired, match=r"for other, third to start"):
            await hub.wait_for({"peer", "other", "third"}, 0.3)
        await link.close()
        await hub.close()

    run(body)
