"""Who gets in from outside, as whom, and what everyone else gets: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import math
import select
import socket
from typing import Any

import numpy as np
import pytest
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from streamrl.errors import RunFailed
from streamrl.transport import endpoint_base
from streamrl.transport.curve import ClientSecurity, ServerSecurity
from streamrl.transport.deadlines import DeadlineExpired, WaitRegistry
from streamrl.transport.endpoint import Flow, Hub, Link, Refused
from streamrl.transport.wire import Message, encode
from tests.ports import free_port
from tests.transport.proxy import Proxy
from tests.transport.sockets import Sites, link, new_key, run, until
from tests.waiting import scaled, settled

SILENT_S = 0.3
"""Limit of a connection that gets no answer."""


def memory(hub: Hub) -> tuple[Any, ...]:
    """What a hub holds for peers."""
    return dict(hub.peers), dict(hub._routes), hub._inbox.qsize(), hub.malformed, hub.unknown, hub.refused_peers


def test_a_site_with_its_key_gets_in_and_talks_both_ways() -> None:
    async def body() -> None:
        sites = Sites()
        hub = sites.hub()
        east = await link("service-east", "east").connect(sites.address, scaled(10), sites.as_client(sites.east))
        assert hub.peers["service-east"].site == "east"
        await east.send("item", {"i": 1})
        delivery = await hub.receive()
        assert (delivery.peer, delivery.body) == ("service-east", {"i": 1})
        delivery.ack()
        await east.flush(scaled(5))
        await hub.send("service-east", "order", {"j": 2})
        assert (await east.receive()).body == {"j": 2}
        peer = hub.peers["service-east"]
        assert 0 < peer.bytes_in <= east.bytes_out
        assert 0 < east.bytes_in <= peer.bytes_out
        assert hub.silent_for("service-east") < 5 > east.silent_for
        await east.close()
        await hub.close()

    run(body)


@pytest.mark.parametrize("leaves", ["says goodbye", "is dropped", "is replaced"])
def test_the_bytes_of_a_site_are_counted_on_when_it_comes_back(leaves: str) -> None:
    """A link's bytes may cost money, whichever process has sent or received them."""

    async def body() -> None:
        sites = Sites()
        hub = sites.hub()
        first = await link("service-east", "east").connect(sites.address, scaled(10), sites.as_client(sites.east))
        await first.send("item", {"x": "x" * 10_000})
        await hub.send("service-east", "order", {"x": "x" * 20_000})
        await hub.receive()
        if leaves == "says goodbye":
            await first.close()
            await until(lambda: "service-east" not in hub.peers)
        elif leaves == "is dropped":
            hub.drop("service-east")
        again = await link("service-east", "east").connect(sites.address, scaled(10), sites.as_client(sites.east))
        peer = hub.peers["service-east"]
        assert peer.session == again.session
        assert 10_000 < peer.bytes_in < 20_000 < peer.bytes_out < 40_000
        for one in (first, again, hub):
            await one.close()

    run(body)


def test_an_unknown_key_gets_nothing_and_costs_nothing_while_others_go_on() -> None:
    async def body() -> None:
        sites = Sites()
        hub = sites.hub()
        east = await link("service-east", "east").connect(sites.address, scaled(10), sites.as_client(sites.east))
        before = memory(hub)
        stranger = link("service-west", "west")
        with pytest.raises(DeadlineExpired, match="other's present key"):
            await stranger.connect(sites.address, SILENT_S, sites.as_client(new_key()))
        await until(lambda: hub.refused_keys)
        assert stranger.bytes_in == 0
        assert memory(hub) == before
        await east.send("item", {"i": 1})
        assert (await hub.receive()).body == {"i": 1}
        for end in (stranger, east, hub):
            await end.close()

    run(body)


def test_a_plain_client_gets_nothing_at_the_door_for_keys() -> None:
    async def body() -> None:
        sites = Sites()
        hub = sites.hub()
        before = memory(hub)
        plain = link("service-east", "east")
        with pytest.raises(DeadlineExpired):
            await plain.connect(sites.address, SILENT_S)
        assert plain.bytes_in == 0
        assert memory(hub) == before
        await plain.close()
        await hub.close()

    run(body)


def test_a_link_does_not_talk_to_a_hub_with_another_key() -> None:
    async def body() -> None:
        sites = Sites()
        impostor = sites.hub()
        east = link("service-east", "east")
        with pytest.raises(DeadlineExpired):
            await east.connect(sites.address, SILENT_S, ClientSecurity(sites.east, new_key().public))
        assert (impostor.peers, impostor.unknown, impostor.refused_keys, east.bytes_in) == ({}, 0, 0, 0)
        await east.close()
        await impostor.close()

    run(body)


def test_a_site_cannot_speak_for_another_one() -> None:
    async def body() -> None:
        sites = Sites()
        hub = sites.hub()
        as_east = sites.as_client(sites.east)
        claims_west, says_nothing = link("service-west", "west"), link("service-east")
        with pytest.raises(
            Refused, match=r"home-hub at .* the key is that of site 'east', the hello is of site 'west'"
        ):
            await claims_west.connect(sites.address, 10, as_east)
        with pytest.raises(Refused, match="must name its site"):
            await says_nothing.connect(sites.address, 10, as_east)
        with pytest.raises(Refused):
            await claims_west.receive()
        assert (hub.refused_peers, hub.peers, hub._routes) == (2, {}, {})
        assert hub.refused() == {"hello": {"site east": 2}}, "who it was, and not whom it named"
        for end in (claims_west, says_nothing, hub):
            await end.close()

    run(body)


def test_admission_is_asked_with_the_site_of_the_key_and_its_reason_is_told() -> None:
    async def body() -> None:
        asked: list[tuple[Any, ...]] = []

        def admit(name: str, role: str, meta: dict[str, Any], site: str | None) -> str | None:
            asked.append((name, role, meta, site))
            if name == "broken":
                raise ValueError("no such flow" + 1000 * ".")
            return None if name == f"service-{site}" else f"site {site} has no {name}"

        sites = Sites()
        hub = sites.hub()
        hub.admit = admit
        east = await link("service-east", "east").connect(sites.address, scaled(10), sites.as_client(sites.east))
        for name, why in (
            ("controller", "site west has no controller"),
            ("broken", r"judged: ValueError: no such flow\.{188}$"),
        ):
            wrong = link(name, "west")
            with pytest.raises(Refused, match=why):
                await wrong.connect(sites.address, 10, sites.as_client(sites.west))
            await wrong.close()
        assert asked[0] == ("service-east", "test", {"site": "east"}, "east")
        assert set(hub.peers) == {"service-east"}
        await east.close()
        await hub.close()

    run(body)


@pytest.mark.parametrize("encrypted", [True, False])
def test_a_name_of_inside_or_of_another_site_cannot_be_taken_from_outside(encrypted: bool) -> None:
    async def body() -> None:
        sites = Sites()
        security = ServerSecurity(sites.home, {sites.east.public: "east", sites.west.public: "west"})
        inner = f"tcp://127.0.0.1:{free_port()}"
        hub = Hub("home-hub", WaitRegistry("hub")).bind(inner)
        hub.bind_outside(sites.address, security if encrypted else None)
        inside = await link("trainer-0").connect(inner, scaled(10))
        east = await link("service-east", "east").connect(
            sites.address, scaled(10), sites.as_client(sites.east) if encrypted else None
        )
        for name, owner in (("trainer-0", "inside this site"), ("service-east", "at site 'east'")):
            thief = link(name, "west")
            with pytest.raises(Refused, match=f"belongs to a peer {owner}"):
                await thief.connect(sites.address, 10, sites.as_client(sites.west) if encrypted else None)
            await thief.close()
        for peer, end in (("trainer-0", inside), ("service-east", east)):
            await hub.send(peer, "order", {"to": peer})
            assert (await end.receive()).body == {"to": peer}
            await end.close()
        await hub.close()

    run(body)


def test_a_connection_keeps_the_name_of_its_first_hello() -> None:
    async def body() -> None:
        sites = Sites()
        hub = sites.hub()
        two_faced = await link("service-east", "east").connect(sites.address, scaled(10), sites.as_client(sites.east))
        hello = {"name": "second", "role": "test", "meta": {"site": "east"}}
        two_faced._put(encode(Message("hello", two_faced.session, 0, hello)))
        with pytest.raises(Refused, match="this connection is that of 'service-east'"):
            await two_faced.receive()
        assert set(hub.peers) == {"service-east"}
        await two_faced.close()
        await hub.close()

    run(body)


def test_messages_under_another_sites_key_are_dropped_even_if_the_connection_looks_the_same() -> None:
    async def body() -> None:
        sites = Sites()
        hub = sites.hub()
        east = await link("service-east", "east").connect(sites.address, scaled(10), sites.as_client(sites.east))
        peer = hub.peers["service-east"]
        assert peer.route is not None
        forged = [bytes(frame) for frame in encode(Message("item", east.session, 1, {}))]
        hub._arrived(peer.route, forged, "west")
        hub._arrived(peer.route, forged, None)
        assert (hub.misplaced, hub.receive_now()) == (2, None)
        hub._arrived(peer.route, forged, "east")
        assert hub.receive_now() is not None
        await east.close()
        await hub.close()

    run(body)


def test_two_hubs_of_a_process_have_their_own_lists_of_keys() -> None:
    async def body() -> None:
        sites, others = Sites(), Sites()
        first, second = sites.hub(), others.hub()
        await first.close()  # must not stop the one who asks for keys at the other
        stranger = link("service-east", "east")
        with pytest.raises(DeadlineExpired):
            await stranger.connect(others.address, 0.7, ClientSecurity(sites.east, others.home.public))
        await until(lambda: second.refused_keys)
        east = await link("service-east", "east").connect(others.address, scaled(10), others.as_client(others.east))
        for end in (stranger, east, second):
            await end.close()

    run(body)


def test_the_outer_door_is_opened_once_and_an_address_in_use_is_said() -> None:
    async def body() -> None:
        sites = Sites()
        hub = sites.hub()
        with pytest.raises(RunFailed, match="already"):
            hub.bind_outside(f"tcp://127.0.0.1:{free_port()}", None)
        with pytest.raises(RunFailed, match="cannot listen on"):
            sites.hub()
        east = await link("service-east", "east").connect(sites.address, scaled(10), sites.as_client(sites.east))
        await east.close()
        await hub.close()

    run(body)


def test_a_crowd_has_time_to_get_in_at_a_door_of_its_own_site_and_strangers_have_little() -> None:
    async def body() -> None:
        sites = Sites()
        own = ServerSecurity(sites.home, {sites.east.public: "east"})
        hub = sites.hub().bind(address := f"tcp://127.0.0.1:{free_port()}", own)
        peer = await link("east").connect(address, scaled(10), sites.as_client(sites.east))
        far = link("service-west", "west", outside=True)
        await far.connect(sites.address, scaled(10), sites.as_client(sites.west))
        outer, inner = (door.socket for door in hub._doors)
        assert inner.getsockopt(zmq.BACKLOG) == outer.getsockopt(zmq.BACKLOG) == 4096
        limits = [one.getsockopt(zmq.HANDSHAKE_IVL) for one in (outer, far._socket, inner, peer._socket)]
        assert limits == [10_000, 10_000, 60_000, 60_000]  # milliseconds
        await far.close()
        await peer.close()
        await hub.close()

    run(body)


async def replay(port: int, recorded: bytes, step: int) -> None:
    """Sends a recording to a port: the greeting, then after its answer the rest in steps, until the port hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(recorded[:64])
    assert (await reader.readexactly(64)).startswith(b"\xff")
    with contextlib.suppress(OSError, TimeoutError):
        for start in range(64, len(recorded), step):
            writer.write(recorded[start : start + step])
            await asyncio.sleep(0.01)  # sleeps: an answer may come in between
            if writer.is_closing():
                break
        while await asyncio.wait_for(reader.read(4096), 0.3):
            pass
    writer.transport.abort()


def test_a_recorded_stream_of_a_valid_client_delivers_nothing_when_it_is_sent_again() -> None:
    async def body() -> None:
        sites = Sites()
        hub = sites.hub()
        proxy = await Proxy(sites.port).start()
        east = await link("service-east", "east").connect(proxy.address, scaled(10), sites.as_client(sites.east))
        for i in range(5):
            await east.send("item", {"i": i})
            (await hub.receive()).ack()
        await east.flush(scaled(5))
        recorded = bytes(proxy.sent_by_clients[0])
        assert len(recorded) > 1000
        for task in east._tasks:
            task.cancel()  # from here on, everything that arrives is the recording
        hub_s_bytes = lambda: hub.peers["service-east"].bytes_in  # noqa: E731
        while (before := hub_s_bytes()) != (await asyncio.to_thread(settled, hub_s_bytes)):
            pass
        for step in (len(recorded), 64):  # at once, and in steps, so that the handshake's answers come in between
            await replay(sites.port, recorded, step)
        assert hub.receive_now() is None
        assert hub.peers["service-east"].bytes_in == before
        assert set(hub.peers) == {"service-east"}
        await east.close()
        await proxy.stop()
        await hub.close()

    run(body)


@pytest.mark.parametrize("encrypted", [True, False])
def test_nothing_is_lost_or_doubled_over_a_connection_that_breaks(
    encrypted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_base, "HEARTBEAT_S", 0.1)

    async def body() -> None:
        sites = Sites()
        # only connecting anew sends again; all may be under way, for a slow machine is cut off before it is welcome
        flow = Flow(resend_s=1000.0, credits=1000)
        hub = sites.hub(flow=flow) if encrypted else Hub("hub", WaitRegistry("hub"), flow=flow).bind(sites.address)
        proxy = await Proxy(sites.port).start()
        east = await link("service-east", "east", flow=flow).connect(
            proxy.address, scaled(10), sites.as_client(sites.east) if encrypted else None
        )
        got: dict[str, list[int]] = {"hub": [], "link": []}

        async def receive(end: Hub | Link, into: list[int]) -> None:
            while True:
                delivery = await end.receive()
                into.append(delivery.body["i"])
                delivery.ack()

        readers = [asyncio.create_task(receive(hub, got["hub"])), asyncio.create_task(receive(east, got["link"]))]
        for i in range(300):
            await east.send("item", {"i": i})
            await hub.send("service-east", "item", {"i": i})
            if i in (50, 150, 250):
                await asyncio.sleep(0.02)  # sleeps: some of it is under way
                await proxy.stop()
            if i in (100, 200):
                connected = len(proxy.sent_by_clients)
                await proxy.start()
                await until(lambda connected=connected: len(proxy.sent_by_clients) > connected)
        await asyncio.sleep(0.3)  # sleeps: it is away for some heartbeats
        await proxy.start()
        await east.flush(scaled(10))
        await until(lambda: not hub.peers["service-east"].outbox.pending)
        assert len(proxy.sent_by_clients) >= 3
        assert sorted(got["hub"]) == list(range(300)) == sorted(got["link"])
        assert len(hub._routes) == 1
        for reader in readers:
            reader.cancel()
        await east.close()
        await proxy.stop()
        await hub.close()

    run(body)


def test_a_connection_that_no_longer_carries_anything_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_base, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr("streamrl.transport.link.PING_S", 0.2)
    monkeypatch.setattr("streamrl.transport.link.DEAD_AFTER_S", 0.5)

    async def body() -> None:
        sites = Sites()
        hub = sites.hub()
        proxy = await Proxy(sites.port).start()
        flow = Flow(resend_s=0.5)
        east = await link("service-east", "east", flow=flow).connect(
            proxy.address, scaled(10), sites.as_client(sites.east)
        )
        proxy.deaf.add(0)  # as a firewall that has forgotten it
        await east.send("item", {"i": 1})
        assert (await hub.receive()).body == {"i": 1}
        assert len(proxy.sent_by_clients) >= 2  # one more after each standstill of this machine
        await east.close()
        await proxy.stop()
        await hub.close()

    run(body)


@pytest.mark.parametrize("upwards", [True, False])
def test_connections_that_carry_nothing_but_a_hello_are_counted(monkeypatch: pytest.MonkeyPatch, upwards: bool) -> None:
    """Large packets are dropped on the way, as behind a smaller MTU."""
    monkeypatch.setattr(endpoint_base, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr("streamrl.transport.link.PING_S", 0.1)
    monkeypatch.setattr("streamrl.transport.link.DEAD_AFTER_S", 0.3)

    async def body() -> None:
        sites = Sites()
        hub = sites.hub(flow=Flow(resend_s=0.3))
        proxy = await Proxy(sites.port).start()
        east = link("service-east", "east", flow=Flow(resend_s=0.3))
        await east.connect(proxy.address, scaled(10), sites.as_client(sites.east))
        peer = hub.peers["service-east"]
        await until(lambda: east.empty_connections == peer.empty_connections == 0, what="heartbeats")
        proxy.most_bytes = 20_000
        await proxy.stop()
        await proxy.start()
        data = {"data": np.zeros(100_000, np.uint8)}
        await (east.send("item", arrays=data) if upwards else hub.send("service-east", "item", arrays=data))
        await until(lambda: east.empty_connections >= 3)
        await until(lambda: peer.empty_connections >= 3 or not upwards)
        proxy.most_bytes = math.inf
        await proxy.stop()
        await proxy.start()
        assert (await (hub if upwards else east).receive()).kind == "item"
        await until(lambda: east.empty_connections == peer.empty_connections == 0)
        await east.close()
        await proxy.stop()
        await hub.close()

    run(body)


def test_an_attempt_to_connect_that_gets_no_answer_is_soon_given_up_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system would go on with the first one for two minutes."""
    monkeypatch.setattr("streamrl.transport.link.CONNECT_MS", 300)

    async def body() -> None:
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
            while True:  # until its queue is full, and further attempts are dropped
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(listener.getsockname())
                if not select.select([], [waiting], [], 0.2)[1]:
                    break
            east = link("service-east", "east")
            events = east._socket.get_monitor_socket(zmq.EVENT_CONNECT_DELAYED | zmq.EVENT_CONNECT_RETRIED)
            address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
            connecting = asyncio.create_task(east.connect(address, scaled(60)))
            seen = [parse_monitor_message(await events.recv_multipart())["event"] for _ in range(3)]
            delayed, retried = zmq.Event.CONNECT_DELAYED, zmq.Event.CONNECT_RETRIED
            assert seen == [delayed, retried, delayed]
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
            east._socket.disable_monitor()
            events.close(0)
            await east.close()

    run(body)


def test_a_hub_that_no_longer_admits_a_site_ends_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_base, "HEARTBEAT_S", 0.1)

    async def body() -> None:
        sites = Sites()
        hub = sites.hub()
        proxy = await Proxy(sites.port).start()
        east = await link("service-east", "east", flow=Flow(credits=1)).connect(
            proxy.address, scaled(10), sites.as_client(sites.east)
        )
        await east.send("item", {"i": 1})
        waiting = asyncio.create_task(east.send("item", {"i": 2}))
        hub.admit = lambda name, role, meta, site: "the run has ended"
        await proxy.stop()
        await proxy.start()
        with pytest.raises(Refused, match=r"home-hub at .* refuses service-east: the run has ended"):
            await east.receive()
        with pytest.raises(Refused):
            await waiting
        await east.close()
        await proxy.stop()
        await hub.close()

    run(body)


def test_a_raw_client_with_a_chosen_identity_gains_nothing() -> None:
    async def body() -> None:
        inner = f"tcp://127.0.0.1:{free_port()}"
        hub = Hub("home-hub", WaitRegistry("hub")).bind(inner)
        victim = await link("trainer-0").connect(inner, scaled(10))
        raw = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        raw.setsockopt(zmq.IDENTITY, b"trainer-0")
        raw.connect(inner)
        await raw.send_multipart(encode(Message("item", victim.session, 1, {})))
        await until(lambda: hub.unknown)
        await hub.send("trainer-0", "order", {"i": 1})
        assert (await victim.receive()).body == {"i": 1}
        assert hub.receive_now() is None
        raw.close(0)
        await victim.close()
        await hub.close()

    run(body)
