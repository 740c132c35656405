"""Sockets inside and outside of network namespaces, and a home that echoes, swallows or ignores what it is sent."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from streamrl.emulation.namespaces import enter
from streamrl.emulation.network import EmulatedNetwork
from tests import waiting

T = TypeVar("T")
LIMIT_S = 20.0


def inside(namespace: str | None, make: Callable[[], T]) -> T:
    """Calls something in a namespace, in a thread of its own: sockets stay where they were made."""

    def work() -> T:
        if namespace is not None:
            enter(namespace)
        return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result(waiting.scaled(LIMIT_S))


@dataclass
class Received:
    """What a sink got over one connection."""

    nbytes: int = 0
    sha256: str = ""
    first: float = 0.0
    last: float = 0.0
    """Monotonic seconds of the newest byte."""
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)


class Home:
    """Listens on home's port; the first byte of a connection says what it wants: e(cho), s(ink), g(ive), i(gnore)."""

    def __init__(self, network: EmulatedNetwork, port: int) -> None:
        self.received: list[Received] = []
        self.asked = threading.Event()
        """A connection that wants to be given something is through."""
        self.given = threading.Event()
        """Home has closed its half of a connection that wanted to be given something."""
        self._open: list[socket.socket] = []
        address = (network.listen_address(), port)
        self.listener = inside(network.namespace(network.home), lambda: socket.create_server(address))
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for sock in self._open:
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.listener.accept()
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._open.append(sock)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        sock.settimeout(waiting.scaled(LIMIT_S))
        with contextlib.suppress(OSError):
            match sock.recv(1):
                case b"e":
                    while data := sock.recv(65536):
                        sock.sendall(data)
                    sock.close()
                case b"s":
                    self._sink(sock)
                case b"g":
                    self.asked.set()
                    (nbytes,) = struct.unpack("!Q", exactly(sock, 8))
                    sock.sendall(bytes(nbytes))
                    sock.close()
                    self.given.set()

    def _sink(self, sock: socket.socket) -> None:
        got = Received()
        self.received.append(got)
        digest = hashlib.sha256()
        try:
            while data := sock.recv(1 << 18):
                got.last = time.monotonic()
                got.first = got.first or got.last
                got.nbytes += len(data)
                digest.update(data)
        except OSError as error:
            got.error = error
        got.sha256 = digest.hexdigest()
        got.done.set()


@contextlib.contextmanager
def home_at(network: EmulatedNetwork, port: int) -> Iterator[Home]:
    home = Home(network, port)
    try:
        yield home
    finally:
        home.close()


def connect(network: EmulatedNetwork, port: int, site: str = "west", timeout: float = LIMIT_S) -> socket.socket:
    """From a remote site to home."""
    address = network.address_of_home(site, port)
    sock = inside(network.namespace(site), lambda: socket.create_connection(address, timeout))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(waiting.scaled(LIMIT_S))
    return sock


def exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        piece = sock.recv(min(1 << 18, nbytes - len(data)))
        if not piece:
            raise EOFError(f"{len(data)} of {nbytes} bytes")
        data += piece
    return bytes(data)


def round_trips(sock: socket.socket, count: int) -> list[float]:
    """Seconds, of single bytes over an echoing connection that is past its first byte."""
    times = []
    for _ in range(count):
        begun = time.monotonic()
        sock.sendall(b"x")
        exactly(sock, 1)
        times.append(time.monotonic() - begun)
    return times


def upload(network: EmulatedNetwork, home: Home, port: int, data: bytes) -> float:
    """Sends to a sink; seconds from the first byte sent to the last byte received."""
    with connect(network, port) as sock:
        before = len(home.received)
        sock.sendall(b"s")
        waiting.wait_for(lambda: len(home.received) > before, 5)  # the handshake's round trip is over
        got = home.received[-1]
        begun = time.monotonic()
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        assert got.done.wait(waiting.scaled(LIMIT_S))
        assert got.nbytes == len(data)
        assert got.sha256 == hashlib.sha256(data).hexdigest()
        return got.last - begun


def download(network: EmulatedNetwork, home: Home, port: int, nbytes: int) -> float:
    """Asks for bytes; seconds from the request, in which a late reader makes none shorter, to the last byte."""
    with connect(network, port) as sock:
        buffer = bytearray(1 << 18)
        missing = nbytes
        home.asked.clear()
        sock.sendall(b"g")
        waiting.wait_for(home.asked.is_set, 5)  # the handshake's round trip is over
        begun = time.monotonic()
        sock.sendall(struct.pack("!Q", nbytes))
        while missing:
            missing -= sock.recv_into(buffer)
        return time.monotonic() - begun
