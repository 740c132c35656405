"""Hosts and their IP addresses, IPv4 or IPv6: how they are found and written."""

from __future__ import annotations

import ipaddress
import socket


def host_port(host: str, port: int) -> str:
    """Return "host:port", an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(place: str) -> str:
    """Return the host of "host:port", an IPv6 address without its brackets."""
    return place.rpartition(":")[0].strip("[]")


def family_of(address: str) -> socket.AddressFamily:
    """Return the family of an IP address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def resolve(host: str) -> str:
    """Return the IP address of a host: itself if it is one; of a name, one of IPv4 if it has any, else one of IPv6.

    Raises:
        OSError: it has none.
    """
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        found = [str(place[0]) for *_, place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
        return min(found, key=family_of)


def needs_ipv6(address: str) -> bool:
    """Return whether a ZeroMQ address is reached by IPv6 alone; a name is looked up, which may take seconds.

    A socket of libzmq that may use IPv6 takes it for every name that has such an address.

    Raises:
        OSError: the name has no address now.
    """
    kind, _, place = address.partition("://")
    return kind == "tcp" and family_of(resolve(host_of(place))) == socket.AF_INET6
