"""Network interfaces of this machine: on which one the processes that belong together listen for each other."""

from __future__ import annotations

import contextlib
import random
import socket
import sys
from pathlib import Path

import psutil

from streamrl.errors import UserError
from streamrl.transport.ip_addresses import family_of

LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
"""Interface that no other machine reaches."""
LOWEST_PORT = 20_000
"""First port that is chosen here: Ray's workers have those up to 19,999 by default."""
ENOUGH_PORTS, PORT_TRIES = 1_000, 20
IANA_DYNAMIC_PORTS = 49_152
"""First port that a system gives away by itself, if it does not say another one."""


def collectives_on(interface: str) -> dict[str, str]:
    """Return the environment that makes gloo and NCCL listen on one interface and no other."""
    return {"GLOO_SOCKET_IFNAME": interface} | nccl_on(interface)


def nccl_on(interface: str) -> dict[str, str]:
    """Return the environment that makes NCCL listen on one interface; by a bare name it takes all that begin so."""
    return {"NCCL_SOCKET_IFNAME": f"={interface}"}


def free_ports(count: int, host: str) -> list[int]:
    """Return distinct ports of this machine that are free now.

    They are below those that the system gives to whoever asks for any port or connects somewhere, if it leaves enough:
    such a port would often be taken before the process that it is meant for listens on it.
    """
    below = range(LOWEST_PORT, first_port_of_system())
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket(family_of(host))) for _ in range(count)]
        for probe in probes:
            _bind(probe, host, below)
        return [int(probe.getsockname()[1]) for probe in probes]


def _bind(probe: socket.socket, host: str, below: range) -> None:
    """Give a socket a port out of a range, or any that the system has if the range is too small or taken."""
    for port in random.SystemRandom().sample(below, PORT_TRIES) if len(below) >= ENOUGH_PORTS else ():
        with contextlib.suppress(OSError):  # somebody has it
            return probe.bind((host, port))
    probe.bind((host, 0))


def first_port_of_system() -> int:
    """Return the first of the ports that the system gives away by itself."""
    try:
        ports = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8")  # IPv6 uses them too
        return int(ports.split()[0])
    except (OSError, ValueError, IndexError):
        return IANA_DYNAMIC_PORTS


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
