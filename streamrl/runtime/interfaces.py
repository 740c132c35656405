"""Network interfaces of this machine: on which one the processes that belong together listen for each other."""

from __future__ import annotations

import contextlib
import socket
import sys

import psutil

from streamrl.errors import UserError
from streamrl.transport.ip_addresses import family_of

LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
"""Interface that no other machine reaches."""


def collectives_on(interface: str) -> dict[str, str]:
    """Return the environment that makes gloo and NCCL listen on one interface and no other."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def free_ports(count: int, host: str) -> list[int]:
    """Return distinct ports of this machine that are free now."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket(family_of(host))) for _ in range(count)]
        for probe in probes:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def address_towards(host: str) -> str:
    """Return the address from which this machine reaches another one (that address, if it is this machine's).

    Nothing is sent.

    Raises:
        UserError: the address is unknown, or there is no way to it.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(f"node {socket.gethostname()} cannot reach {host}: {error}") from error


def interface_towards(host: str) -> str:
    """Return the name of the interface by which this machine reaches an address (its own interface, if it has that).

    Raises:
        UserError: as `address_towards`, or no interface has that address.
    """
    own = address_towards(host)
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == own for one in addresses):
            return name
    raise UserError(f"node {socket.gethostname()} reaches {host} from {own}, which none of its interfaces has")
