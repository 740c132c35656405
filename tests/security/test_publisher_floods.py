"""A relay of another site floods the publisher of weights or falls silent: others get theirs, and memory has an end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zmq
import zmq.asyncio

from streamrl.protocol.message import wire
from streamrl.protocol.weights import Fetch, FetchAgain
from streamrl.transport import budgets, endpoint_base
from streamrl.transport import peer as peer_module
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.delivery import Outbox
from streamrl.transport.endpoint import Flow, Link
from streamrl.transport.endpoint_base import PeerLost
from streamrl.transport.peer import Peer
from streamrl.transport.wire import Message, encode
from streamrl.weights import publisher as publisher_module
from streamrl.weights.description import DESCRIPTION, read_description
from streamrl.weights.site_relay import WeightRelay
from streamrl.weights.version import lay_out
from streamrl.weights.version_store import WeightStore
from tests.ports import free_port
from tests.waiting import until
from tests.weights.world import Policy, World, in_world

FLOOD = 4_000
MOST_INDEXES = 100_000
"""Payloads that some requests name, of a version that has five."""
MOST_MEMORY = 60 * 2**20
"""Bytes by which memory may grow meanwhile."""
SITE = {"site": "far"}


def outer_door(world: World) -> str:
    """Open the publisher to other sites, and return the address."""
    address = f"tcp://127.0.0.1:{free_port()}"
    world.hub.bind_outside(address, None)
    return address


async def from_site(world: World, address: str, site: str) -> Link:
    link = Link(f"service-{site}", "relay", WaitRegistry(site), {"site": site})
    world.links.append(link)
    return await link.connect(address, 30)


def requests(number: int) -> list[Fetch | FetchAgain]:
    """Requests of one number: for what is there, for what never was, and for far more than there is."""
    everything = [(0, list(range(MOST_INDEXES if number % 800 < 5 else 3))), (2**31, [-1])]
    return [
        Fetch(request=number, number=0, newest=True),
        Fetch(request=number, number=10**9 + number),
        Fetch(request=number, number=-1, encoding="delta", holds=2**40, holds_hash="0" * 64),
        FetchAgain(request=number, of=0, tensors=[]),
        FetchAgain(request=number, of=number - 1, tensors=everything),
    ]


def test_fetches_go_on_while_a_relay_floods_the_publisher_with_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described: list[int] = []
    describe = publisher_module.describe
    monkeypatch.setattr(publisher_module, "describe", lambda *rest: described.append(1) or describe(*rest))
    monkeypatch.setitem(budgets.PER_S, "request", 0.0)  # however long the flood takes

    async def body(world: World) -> None:
        address = outer_door(world)
        hostile, honest = await from_site(world, address, "far"), await from_site(world, address, "east")
        near = await world.relay("near", "raw")
        away = WeightRelay(honest, WeightStore(tmp_path / "east"), 60)
        policy = Policy()
        await world.publisher.publish(*policy.version())
        before = most = psutil.Process().memory_info().rss
        for number in range(1, FLOOD + 1):
            orders = requests(number)
            kind, fields = wire(orders[number % len(orders)])
            hostile._put(encode(Message(kind, hostile.session, number, fields)))
        for turn in range(3):
            version = policy.version() if turn == 0 else policy.step()
            if turn:
                await world.publisher.publish(*version)
            for relay in (near, away):
                await world.fetch(relay, version)
            most = max(most, psutil.Process().memory_info().rss)
        too_many = FLOOD - int(budgets.SIZES["request"])
        await until(lambda: world.hub.refused().get("too many") == {"service-far": too_many})
        assert most - before < MOST_MEMORY
        assert len(described) <= 3 * 3  # raw, delta and complete of each version

    in_world(tmp_path, body)


def test_a_version_is_described_once_however_often_it_is_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described: list[int] = []
    describe = publisher_module.describe
    monkeypatch.setattr(publisher_module, "describe", lambda *rest: described.append(1) or describe(*rest))

    async def body(world: World) -> None:
        link = await from_site(world, outer_door(world), "far")
        policy = Policy()
        for number in range(2 * publisher_module.MOST_DESCRIBED):
            version = policy.version() if number == 0 else policy.step()
            await world.publisher.publish(*version)
            for request in range(3):
                await link.send(*wire(Fetch(request=3 * number + request, number=number)))
                while (delivery := await link.receive()).kind != "manifest":
                    delivery.ack()
                delivery.ack()
                manifest, _ = read_description(delivery.arrays[DESCRIPTION])
                assert (delivery.body["request"], manifest) == (3 * number + request, version[0])
        assert len(described) == 2 * publisher_module.MOST_DESCRIBED
        assert len(world.publisher._described) == publisher_module.MOST_DESCRIBED

    in_world(tmp_path, body)


def test_what_a_relay_acknowledges_and_does_not_read_is_not_kept_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_module, "MOST_UNREAD", 16)
    chunk, nbytes = 100_000, 60_000_000

    async def body(world: World) -> None:
        socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.setsockopt(zmq.RCVBUF, chunk)
        socket.connect(outer_door(world))
        await world.publisher.publish(*lay_out(1, [("a", np_tensor(nbytes))]))
        try:
            about = {"name": "service-far", "role": "relay", "meta": SITE}
            await socket.send_multipart(encode(Message("hello", "life", 0, about)))
            await socket.send_multipart(encode(Message("fetch", "life", 1, wire(Fetch(request=1, number=1))[1])))
            await until(lambda: world.publisher._tasks)
            peer = world.hub.peers["service-far"]
            while world.publisher._tasks:
                for number in list(peer.outbox.pending):
                    ack = Message("ack", "life", 0, {"n": number, "s": world.hub.session})
                    await socket.send_multipart(encode(ack))
                await asyncio.sleep(0)
            assert peer.outbox.next_number > nbytes // chunk, "it was sent everything"
            assert peer.bytes_out < nbytes // 2, "and most of it was dropped, because it reads nothing"
        finally:
            socket.close(0)

    in_world(tmp_path, body, chunk_of=lambda peer: chunk)


def np_tensor(nbytes: int) -> Any:
    import torch

    return torch.from_numpy(np.zeros(nbytes, np.uint8))


def test_a_request_for_one_payload_again_and_again_is_refused(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        await world.publisher.publish(*Policy().version())
        link = await from_site(world, outer_door(world), "far")
        await link.send(*wire(Fetch(request=1, number=0)))
        while (delivery := await link.receive()).kind != "manifest":
            delivery.ack()
        await link.send(*wire(FetchAgain(request=2, of=1, tensors=[(0, [0, 1, 0])])))
        while delivery.kind != "no_version":
            delivery.ack()
            delivery = await link.receive()
        assert delivery.body["reason"] == "cannot send again: a payload is there twice"

    in_world(tmp_path, body)


def test_the_silence_of_another_sites_relay_does_not_end_the_publisher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_base, "HEARTBEAT_S", 0.01)

    async def body(world: World) -> None:
        silent = {
            name: Peer(name, "relay", {}, "life", Outbox(1), Flow(lost_after_s=0.05), site)
            for name, site in (("service-far", "far"), ("service-home", None))
        }
        world.hub.peers.update(silent)
        with pytest.raises(PeerLost, match="service-home has been silent"):
            await world.serving
        assert silent["service-far"].lost

    in_world(tmp_path, body)
