"""Proxies that HTTP clients take from environment variables, and addresses that are reached without them."""

from __future__ import annotations

from collections.abc import Mapping

LOOPBACK = ("127.0.0.1", "localhost")
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
SPELLINGS = ("no_proxy", "NO_PROXY")
"""Clients differ in which one they read; most prefer the first."""


def beside_proxies(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a process so that it reaches servers of this machine beside any proxy."""
    found = dict(env)
    if not any(env.get(name) or env.get(name.upper()) for name in PROXIES):
        return found
    for name, other in zip(SPELLINGS, reversed(SPELLINGS), strict=True):
        hosts = [one.strip() for one in (env.get(name) or env.get(other) or "").split(",")]
        if "*" not in hosts:  # of all hosts, and only if it stands alone
            found[name] = ",".join(dict.fromkeys([*filter(None, hosts), *LOOPBACK]))
    return found
