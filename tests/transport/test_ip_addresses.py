"""Hosts and addresses of both kinds, and connections by IPv6."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from streamrl.transport.curve import ClientSecurity
from streamrl.transport.deadlines import DeadlineExpired, WaitRegistry
from streamrl.transport.endpoint import Hub, Link
from streamrl.transport.ip_addresses import host_of, host_port, needs_ipv6, resolve
from tests.ipv6 import with_ipv6
from tests.transport.sockets import new_key
from tests.waiting import scaled

HOSTS = {"both": ["fd00::7", "10.0.0.7"], "new": ["fd00::8"], "old": ["10.0.0.9"]}


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the names of `HOSTS` be known, and no others."""

    def find(host: str, port: object, *args: object, **options: object) -> list[tuple[Any, ...]]:
        if host not in HOSTS:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET6 if ":" in one else socket.AF_INET, 1, 6, "", (one, 0)) for one in HOSTS[host]]

    monkeypatch.setattr(socket, "getaddrinfo", find)


@pytest.mark.parametrize(
    ("host", "port", "written"),
    [("10.0.0.7", 5600, "10.0.0.7:5600"), ("gpu-1", 80, "gpu-1:80"), ("fd00::7", 5600, "[fd00::7]:5600")],
)
def test_a_host_with_its_port_is_read_as_it_was_written(host: str, port: int, written: str) -> None:
    assert host_port(host, port) == written and host_of(written) == host


def test_a_name_is_found_by_ipv4_if_it_has_such_an_address(names: None) -> None:
    assert [resolve(host) for host in HOSTS] == ["10.0.0.7", "fd00::8", "10.0.0.9"]
    assert [resolve(host) for host in ("10.1.2.3", "fd00::0:1")] == ["10.1.2.3", "fd00::1"], "these are no names"
    with pytest.raises(OSError, match="not known"):
        resolve("nowhere")


@pytest.mark.parametrize(
    ("address", "needed"),
    [
        ("tcp://both:1", False),
        ("tcp://new:1", True),
        ("tcp://10.0.0.7:1", False),
        ("tcp://[::1]:1", True),
        ("ipc:///tmp/a:b", False),
    ],
)
def test_a_socket_uses_ipv6_only_where_there_is_no_other_way(names: None, address: str, needed: bool) -> None:
    assert needs_ipv6(address) == needed


def test_a_name_without_an_address_is_named_at_the_deadline_and_keys_are_not_blamed(names: None) -> None:
    with pytest.raises(OSError, match="not known"):
        needs_ipv6("tcp://nowhere:1")

    async def body() -> None:
        link = Link("east", "service", WaitRegistry("east"))
        keys = ClientSecurity(new_key(), new_key().public)
        with pytest.raises(DeadlineExpired, match="for the name of home at tcp://nowhere:1 to have an IP address"):
            await link.connect("tcp://nowhere:1", 0.2, keys, "home")
        await link.close()

    asyncio.run(body())


@with_ipv6
def test_a_hub_whose_name_gets_its_address_late_and_of_ipv6_alone_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.transport.link.HELLO_S", 0.05)
    looked: list[str] = []

    def late(host: str, *args: object, **options: object) -> list[tuple[Any, ...]]:
        looked.append(host)
        if len(looked) < 3:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(socket.AF_INET6, 1, 6, "", ("::1", 0))]

    async def body() -> None:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as probe:
            port = probe.getsockname()[1]
        hub, link = Hub("hub", WaitRegistry("hub")), Link("east", "service", WaitRegistry("east"))
        hub.bind(f"tcp://[::1]:{port}")
        monkeypatch.setattr(socket, "getaddrinfo", late)
        await link.connect(f"tcp://late.test:{port}", scaled(10))
        assert looked[:3] == ["late.test"] * 3
        await link.close()
        await hub.close()

    asyncio.run(body())


@with_ipv6
@pytest.mark.parametrize(("listen", "connect"), [("::1", "::1"), ("::", "::1"), ("::", "127.0.0.1")])
def test_a_hub_and_a_link_talk_by_ipv6_and_one_that_listens_everywhere_by_ipv4_as_well(
    listen: str, connect: str
) -> None:
    async def body() -> None:
        hub, link = Hub("hub", WaitRegistry("hub")), Link("east", "service", WaitRegistry("east"))
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as probe:
            port = probe.getsockname()[1]
        hub.bind_outside(f"tcp://{host_port(listen, port)}", None)
        link.meta["site"] = "east"
        await link.connect(f"tcp://{host_port(connect, port)}", scaled(10))
        await link.send("item", {"i": 1})
        delivery = await hub.receive()
        assert (delivery.peer, delivery.body) == ("east", {"i": 1})
        delivery.ack()
        await link.flush(scaled(5))
        await link.close()
        await hub.close()

    asyncio.run(body())
