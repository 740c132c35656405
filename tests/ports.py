"""Ports for tests that have to know one before anything listens on it."""

from __future__ import annotations

import functools
import itertools
import os
import random
import socket
from collections.abc import Iterator
from contextlib import suppress

from streamrl.runtime.interfaces import LOWEST_PORT, first_port_of_system


def free_port() -> int:
    """Return a port that is free, and that no other test of this session has, or will soon be given."""
    ports = _own_ports(os.getpid())
    while True:
        with socket.socket() as probe, suppress(OSError):  # somebody has it
            probe.bind(("127.0.0.1", port := next(ports)))
            return port


@functools.cache
def _own_ports(pid: int) -> Iterator[int]:
    """Return the ports of this worker of pytest-xdist, again and again in one order; a forked process has its own."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    share = range(LOWEST_PORT, first_port_of_system())[worker :: int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))]
    return itertools.cycle(random.SystemRandom().sample(share, len(share)))
