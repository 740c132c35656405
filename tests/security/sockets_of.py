"""The sockets on which processes listen, from /proc."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

LISTENS, UNCONNECTED = "0A", "07"
"""States of TCP and UDP sockets in /proc/net."""
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
    """TCP sockets on which these processes listen, all in this network namespace."""
    held, found = _held(pids), set()
    for table in ("tcp", "tcp6"):
        for words in _rows(table):
            if words[3] == LISTENS and words[9] in held:
                found.add(_listener(words))
    return found


def open_to_others(pids: Iterable[int]) -> set[str]:
    """Doors of these processes that another machine or another user of this one can knock at, loopback apart.

    TCP sockets that listen and UDP sockets without a peer, at addresses other machines reach; Unix sockets without a
    file, and those whose file others may write to.
    """
    held, found = _held(pids), set()
    for table, state in (("tcp", LISTENS), ("tcp6", LISTENS), ("udp", UNCONNECTED), ("udp6", UNCONNECTED)):
        for words in _rows(table):
            if words[3] == state and words[9] in held and reachable([_listener(words).address]):
                found.add(f"{table} {_listener(words)}")
    for words in _rows("unix"):
        if words[6] in held and len(words) > 7 and _others_reach(words[7]):
            found.add(f"unix {words[7]}")
    return found


def _others_reach(name: str) -> bool:
    """Whether another user can connect to a Unix socket of this name, as /proc/net/unix writes it."""
    if not name.startswith("/"):
        return True  # an abstract name, which has no owner
    path = Path(name)
    with contextlib.suppress(FileNotFoundError):
        return bool(path.stat().st_mode & 0o002) and all(one.stat().st_mode & 0o001 for one in path.parents)
    return False


def _held(pids: Iterable[int]) -> set[str]:
    """Numbers of the sockets that these processes have open."""
    held: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    held.add(os.readlink(f"/proc/{pid}/fd/{name}").removeprefix("socket:[").removesuffix("]"))
    return held


def _rows(table: str) -> list[list[str]]:
    return [line.split() for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]]


def _listener(words: list[str]) -> Listener:
    place, _, port = words[1].partition(":")
    return Listener(address(place), int(port, 16))


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
