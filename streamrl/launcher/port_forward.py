"""A TCP forwarder, for a process on a node that other sites cannot reach directly.

Bytes are forwarded unchanged, so encryption stays end to end.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import threading
from typing import Any, Self

from streamrl.transport.ip_addresses import family_of

log = logging.getLogger(__name__)

CONNECT_S = 10.0
CHUNK_BYTES = 1 << 18


class Forwarder(socketserver.ThreadingTCPServer):
    """A server whose threads forward connections to a target, until it is closed."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        """Listen on an address.

        Raises:
            OSError: it cannot be bound.
        """
        self.address_family = family_of(host)
        super().__init__((host, port), socketserver.BaseRequestHandler)
        self.listens = host, port
        self.target: tuple[str, int] | None = None
        """(host, port) to which new connections go; None: they are closed."""
        self._open: set[socket.socket] = set()

    def __enter__(self) -> Self:
        """Accept connections."""
        threading.Thread(target=self.serve_forever, name="forwarder", daemon=True).start()
        return self

    def __exit__(self, *args: object) -> None:
        """Stop listening and close all connections."""
        self.shutdown()
        self.server_close()
        for one in list(self._open):
            _shut(one)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Forward one connection in both directions until either end closes it."""
        if self.target is None:
            return
        try:
            there = socket.create_connection(self.target, CONNECT_S)
        except OSError as error:
            log.warning("%s:%d cannot be reached for another site: %s", *self.target, error)
            return
        there.settimeout(None)
        with there:
            self._open.add(request)
            back = threading.Thread(target=_pass_on, args=(there, request), name="forwarder", daemon=True)
            back.start()
            _pass_on(request, there)
            back.join()
            self._open.discard(request)


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(CHUNK_BYTES):
            sink.sendall(data)
    _shut(source)
    _shut(sink)


def _shut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other end has closed it
        one.shutdown(socket.SHUT_RDWR)
