"""Names of hubs: looked up beside the event loop and beside libzmq, and again while the hub is silent."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from streamrl.transport import endpoint_base
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Flow, Hub, PeerLost
from streamrl.transport.name_lookup import NameLookup
from tests.ports import free_port
from tests.transport.sockets import link, run
from tests.waiting import scaled, until


class NameServer:
    """What a name server answers."""

    def __init__(self) -> None:
        self.address: str | Exception = "127.0.0.1"
        self.answers = threading.Event()
        """Cleared: it is silent."""
        self.answers.set()
        self.asked: list[str] = []

    def find(self, host: str, port: object, *args: object, **options: object) -> list[tuple[Any, ...]]:
        self.asked.append(host)
        self.answers.wait()
        if isinstance(self.address, Exception):
            raise self.address
        return [(socket.AF_INET6 if ":" in self.address else socket.AF_INET, 1, 6, "", (self.address, 0))]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    found = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", found.find)
    monkeypatch.setattr(endpoint_base, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr("streamrl.transport.link.LOOK_UP_S", 0.05)
    monkeypatch.setattr("streamrl.transport.link.LOOK_UP_LIMIT_S", 0.1)
    yield found
    found.answers.set()


def hub_at(host: str, port: int) -> Hub:
    return Hub("home", WaitRegistry("home")).bind_outside(f"tcp://{host}:{port}", None)


def test_only_names_are_looked_up_and_a_silent_server_is_asked_once_at_a_time(server: NameServer) -> None:
    async def body() -> None:
        for address in ("ipc:///tmp/a:b", "tcp://10.0.0.7:1", "tcp://[fd00::7]:1"):
            assert await NameLookup(address).numeric(1) == address
        assert server.asked == []
        names = NameLookup("tcp://home.test:1")
        assert await names.numeric(scaled(10)) == "tcp://127.0.0.1:1" and names.trouble == ""
        server.address = "fd00::7"
        assert await names.numeric(scaled(10)) == "tcp://[fd00::7]:1"
        server.answers.clear()
        for _ in range(2):
            assert await names.numeric(0.01) is None
        assert names.trouble == "the name home.test cannot be resolved: no answer within 0.01 s"
        assert server.asked == ["home.test"] * 3
        server.answers.set()
        assert await names.numeric(scaled(10)) == "tcp://[fd00::7]:1" and names.trouble == ""
        server.address = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        assert await names.numeric(scaled(10)) is None
        assert names.trouble == "the name home.test cannot be resolved: Name or service not known"

    run(body)


def test_a_silent_hub_whose_name_has_a_new_address_is_reached_there(server: NameServer) -> None:
    async def body() -> None:
        port = free_port()
        before = hub_at("127.0.0.1", port)
        east = await link("east", "east").connect(f"tcp://home.test:{port}", scaled(10))
        assert east._socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode() == f"tcp://127.0.0.1:{port}"
        await before.close()
        server.address = "127.0.0.2"
        after = hub_at("127.0.0.2", port)
        await east.send("item", {"i": 1})
        delivery = await after.receive()
        assert delivery.body == {"i": 1}
        delivery.ack()
        await east.flush(scaled(10))
        await east.close()
        await after.close()

    run(body)


def test_a_name_server_that_is_gone_is_named_and_holds_up_no_other_link(
    server: NameServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        port = free_port()
        hub, near = hub_at("127.0.0.1", port), hub_at("127.0.0.1", free_port())
        east = await link("east", "east").connect(f"tcp://home.test:{port}", scaled(10))
        beside = await link("beside", "east").connect(near._doors[0].socket.getsockopt_string(zmq.LAST_ENDPOINT))
        await hub.close()
        server.answers.clear()
        await until(lambda: "cannot be resolved: no answer within" in east.unresolved)
        await beside.send("item", {"i": 1})
        assert (await near.receive()).body == {"i": 1}
        hub = hub_at("127.0.0.1", port)  # at the old address, which is kept
        await east.send("item", {"i": 2})
        assert (await hub.receive()).body == {"i": 2}
        await until(lambda: east.unresolved == "", what="it is heard")
        named = [one for one in caplog.messages if "cannot be resolved" in one]
        assert len(named) >= 1 and named[0].startswith(f"the hub at tcp://home.test:{port} is silent, and the name")
        for one in (east, beside, hub, near):
            await one.close()

    run(body)


def test_the_error_of_a_lost_hub_names_the_look_up_that_failed(server: NameServer) -> None:
    async def body() -> None:
        port = free_port()
        hub = hub_at("127.0.0.1", port)
        east = await link("east", "east", flow=Flow(lost_after_s=1.0)).connect(f"tcp://home.test:{port}", scaled(10))
        await hub.close()
        server.address = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        with pytest.raises(PeerLost, match=r"silent for 1 s; the name home.test cannot be resolved: Temporary failure"):
            await asyncio.wait_for(east.receive(), scaled(20))
        await east.close()

    run(body)
