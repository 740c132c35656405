"""A torch store through which processes of several nodes find each other, on one address of this machine.

torch's own store listens on all interfaces unless it is given a socket, and neither authenticates nor encrypts. So
whoever reaches that one address may speak to it (docs/explanation/security.md).
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

from streamrl.errors import RunFailed


def listening_store(host: str, port: int, ranks: int, limit_s: float) -> dist.TCPStore:
    """Return a store that listens on one address.

    Args:
        host: address of this machine.
        port: port; 0: one that is free.
        ranks: number of the processes that meet.
        limit_s: seconds that a request to it may take.

    Raises:
        RunFailed: this machine does not have the address, or the port is taken.
    """
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen()
        listening.setblocking(False)  # libuv's loop must never wait in accept
        port = int(listening.getsockname()[1])
    except OSError as error:
        listening.close()
        raise RunFailed(f"cannot listen on {host}:{port}, the address of its node: {error}") from error
    return dist.TCPStore(
        host,
        port,
        ranks,
        is_master=True,
        timeout=timedelta(seconds=limit_s),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
