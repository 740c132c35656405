"""The TCP sockets on which processes listen, from /proc."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterable
from pathlib import Path

import psutil

LISTENS = "0A"


def family(pid: int) -> list[int]:
    """A process and all that it has started, directly or not."""
    process = psutil.Process(pid)
    return [pid, *(one.pid for one in process.children(recursive=True))]


def listening(pids: Iterable[int]) -> set[str]:
    """IP addresses on which these processes listen, all in this network namespace."""
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
                found.add(address(words[1].partition(":")[0]))
    return found


def address(hexadecimal: str) -> str:
    """An address as /proc/net writes it: 32-bit words in the machine's order, here little-endian."""
    words = [bytes.fromhex(hexadecimal[at : at + 8])[::-1] for at in range(0, len(hexadecimal), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))


def reachable(addresses: Iterable[str]) -> set[str]:
    """Those at which other machines could connect."""
    return {one for one in addresses if not ipaddress.ip_address(one).is_loopback}
