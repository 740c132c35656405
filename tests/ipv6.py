"""A mark of tests that need IPv6: containers often have none, not even on loopback."""

from __future__ import annotations

import socket

import pytest


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


with_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine or container has no IPv6 on loopback")
