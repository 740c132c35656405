"""Whose a connection on this machine is, as the kernel knows it.

The kernel's socket table is asked for one socket (`man 7 sock_diag`), which takes microseconds; `/proc/net/tcp` has the
same, and takes milliseconds to read.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import Any

SOCK_DIAG = 4
"""NETLINK_SOCK_DIAG of linux/netlink.h."""
BY_FAMILY = 20
"""SOCK_DIAG_BY_FAMILY of linux/sock_diag.h; also the type of an answer that has a socket."""
MAPPED = bytes(10) + b"\xff\xff"
"""What an IPv4 address begins with on a socket of IPv6."""
HEADER = struct.Struct("=IHHII")
USER_AT = HEADER.size + 64
"""Where `idiag_uid` is in an answer (linux/inet_diag.h)."""


def is_of_another_user(transport: Any) -> bool:
    """Whether the other end of a connection over loopback belongs to another user, who is not root.

    False where the kernel has no table of sockets to ask (gVisor), or the other end is gone already.

    Args:
        transport: a connection of asyncio, IPv4.
    """
    (here, port), (there, peer_port) = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
    ports = struct.pack(">HH", peer_port, port)
    for family, prefix in ((socket.AF_INET, b""), (socket.AF_INET6, MAPPED)):
        places = struct.pack("16s16s", prefix + socket.inet_aton(there), prefix + socket.inet_aton(here))
        body = struct.pack("=BBHI", family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF) + ports + places + bytes(4) + b"\xff" * 8
        header = HEADER.pack(HEADER.size + len(body), BY_FAMILY, 1, 0, 0)
        with contextlib.suppress(OSError), socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, SOCK_DIAG) as table:
            table.send(header + body)
            answer = table.recv(4096, socket.MSG_DONTWAIT)
            if HEADER.unpack_from(answer)[1] == BY_FAMILY:
                return struct.unpack_from("=I", answer, USER_AT)[0] not in (0, os.geteuid())
    return False
