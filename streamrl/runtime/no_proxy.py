"""Variables of processes that speak to this machine, on machines whose programs reach the network through a proxy."""

from __future__ import annotations

from collections.abc import Mapping

PROXIES = {"http_proxy", "https_proxy", "all_proxy"}
"""Variables that name a proxy; clients read them in either case."""
NEAR = ("127.0.0.1", "localhost")


def without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which no client asks a proxy for this machine; without a proxy they stay as they are.

    Args:
        environment: variables of a process.
    """
    made = dict(environment)
    if any(value and name.lower() in PROXIES for name, value in made.items()):
        upper, lower = made.get("NO_PROXY", ""), made.get("no_proxy", "")
        for name, text in (("NO_PROXY", upper or lower), ("no_proxy", lower or upper)):  # a client reads one of the two
            kept = [one.strip() for one in text.split(",") if one.strip()]
            if "*" not in kept:  # all hosts, and only while it stands alone
                made[name] = ",".join([*kept, *(one for one in NEAR if one not in kept)])
    return made
