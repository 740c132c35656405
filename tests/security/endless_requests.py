"""Requests without an end, and how much of one a web server takes."""

from __future__ import annotations

import contextlib
import socket

ENOUGH = 8 << 20
"""Bytes that nobody without a key may make a server take."""
ENDLESS = {
    "headers": (b"GET / HTTP/1.1\r\nHost: localhost\r\n", b"a: b\r\n" * 1000),
    "a header": (b"GET / HTTP/1.1\r\nHost: localhost\r\na: ", b"b" * 10000),
    "an address": (b"GET /?", b"a" * 10000),
}
"""How they begin, and how they go on."""


def taken(host: str, port: int, kind: str) -> int:
    """Bytes that a server takes of such a request before it ends the connection, up to `ENOUGH`."""
    begin, more = ENDLESS[kind]
    sent = 0
    with contextlib.suppress(ConnectionError), socket.create_connection((host, port), 30) as connection:
        connection.sendall(begin)
        while sent < ENOUGH:
            connection.sendall(more)
            sent += len(more)
    return sent
