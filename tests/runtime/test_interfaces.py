"""Ports that are chosen for processes that will listen on them later."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from streamrl.runtime import interfaces
from streamrl.runtime.interfaces import LOWEST_PORT, PORT_TRIES, first_port_of_system, free_ports


def test_ports_are_distinct_and_none_that_the_system_gives_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "first_port_of_system", lambda: 32_768)
    ports = free_ports(50, "127.0.0.1")
    assert len(set(ports)) == 50 and all(LOWEST_PORT <= port < 32_768 for port in ports)


def test_taken_ports_are_passed_over_and_a_system_that_leaves_too_few_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    first = first_port_of_system()
    with ExitStack() as held:
        taken = [held.enter_context(socket.socket()) for _ in range(PORT_TRIES)]
        for one in taken:
            one.bind(("127.0.0.1", 0))
        numbers = [one.getsockname()[1] for one in taken]
        monkeypatch.setattr("random.SystemRandom.sample", lambda self, below, count: numbers[:count])
        [port] = free_ports(1, "127.0.0.1")
    assert port not in numbers and port >= first
    monkeypatch.setattr("random.SystemRandom.sample", None)
    monkeypatch.setattr(interfaces, "first_port_of_system", lambda: 1_024)
    [port] = free_ports(1, "127.0.0.1")
    assert port >= first


def test_the_first_port_of_the_system_is_where_an_unbound_connection_begins() -> None:
    first = first_port_of_system()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert min(server.getsockname()[1], client.getsockname()[1]) >= first
