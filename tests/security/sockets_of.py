"""The TCP sockets on which processes listen, from /proc."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

LISTENS = "0A"
GREETING = b"\xff" + bytes(8) + b"\x7f\x03"
"""A client's first words to a ZeroMQ socket (ZMTP 3): signature and version; the mechanism would be next."""


class Listener(NamedTuple):
    """A socket that listens."""

    address: str
    port: int


def family(pid: int) -> list[int]:
    """A process and all that it has started, directly or not."""
    process = psutil.Process(pid)
    return [pid, *(one.pid for one in process.children(recursive=True))]


def listeners(pids: Iterable[int]) -> set[Listener]:
    """Sockets on which these processes listen, all in this network namespace."""
    held: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    held.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and f"socket:[{words[9]}]" in held:
                place, _, port = words[1].partition(":")
                found.add(Listener(address(place), int(port, 16)))
    return found


def listening(pids: Iterable[int]) -> set[str]:
    """IP addresses on which these processes listen."""
    return {one.address for one in listeners(pids)}


def address(hexadecimal: str) -> str:
    """An address as /proc/net writes it: 32-bit words in the machine's order, here little-endian."""
    words = [bytes.fromhex(hexadecimal[at : at + 8])[::-1] for at in range(0, len(hexadecimal), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))


def reachable(addresses: Iterable[str]) -> set[str]:
    """Those at which other machines could connect."""
    return {one for one in addresses if not ipaddress.ip_address(one).is_loopback}


def mechanism(listener: Listener, limit_s: float) -> str | None:
    """How a ZeroMQ socket authenticates its peers, as it says itself ('NULL': not at all); None: it is none."""
    answer = b""
    with contextlib.suppress(OSError), socket.create_connection(listener, limit_s) as connection:
        connection.settimeout(limit_s)
        connection.sendall(GREETING)
        while len(answer) < 32 and (more := connection.recv(64)):
            answer += more
    return answer[12:32].rstrip(b"\0").decode() if answer[:1] == b"\xff" and len(answer) >= 32 else None
