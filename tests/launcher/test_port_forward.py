"""Connections are passed on, to wherever the target is now."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from streamrl.launcher.port_forward import Forwarder
from tests.ipv6 import with_ipv6
from tests.ports import free_port


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that says what it hears, in capitals; its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    while data := connection.recv(65536):
                        connection.sendall(data.upper())

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def say(port: int, text: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        connection.settimeout(5)
        answer = b""
        with contextlib.suppress(ConnectionError):  # closed before all was read
            connection.sendall(text)
            while len(answer) < len(text) and (data := connection.recv(65536)):
                answer += data
        return answer


@with_ipv6
def test_a_forwarder_listens_by_ipv6_too(echo: int) -> None:
    with Forwarder("::1", 0) as forwarder:
        forwarder.target = "127.0.0.1", echo
        with socket.create_connection(("::1", forwarder.server_address[1]), 5) as connection:
            connection.sendall(b"abc")
            assert connection.recv(3) == b"ABC"


def test_bytes_pass_in_both_directions_and_nothing_passes_without_a_target(echo: int) -> None:
    with Forwarder("127.0.0.1", free_port()) as forwarder:
        port = forwarder.listens[1]
        assert say(port, b"abc") == b""
        forwarder.target = "127.0.0.1", echo
        assert say(port, b"abc") == b"ABC"
        long = bytes(range(97, 107)) * 100_000
        assert say(port, long) == long.upper()
        forwarder.target = "127.0.0.1", free_port()
        assert say(port, b"abc") == b""
    with pytest.raises(OSError):
        say(port, b"abc")


def test_connections_end_with_the_forwarder(echo: int) -> None:
    with contextlib.ExitStack() as held:
        forwarder = held.enter_context(Forwarder("127.0.0.1", free_port()))
        forwarder.target = "127.0.0.1", echo
        with socket.create_connection(forwarder.listens, 5) as connection:
            connection.sendall(b"abc")
            assert connection.recv(3) == b"ABC"
            held.close()
            with contextlib.suppress(ConnectionError):
                assert connection.recv(1) == b""


def test_a_port_that_is_taken_is_told(echo: int) -> None:
    with pytest.raises(OSError), Forwarder("127.0.0.1", echo):
        raise AssertionError("it listens")
