"""Counts of what a process has refused from its peers, by cause and peer. Pure."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

log = logging.getLogger(__name__)

RefusalCause = Literal[
    "unknown key",
    "hello",
    "wrong key",
    "protocol version",
    "malformed",
    "not allowed",
    "not its own",
    "unreadable",
    "too many",
]
"""Why something was refused.

unknown key: a handshake; hello: it was not admitted; wrong key: a message over a connection of another site;
protocol version: a message of another version of the protocol; malformed: no message, or fields that do not fit; not
allowed: a kind that its role may not send; not its own: about a sample, a reward or a version that is not the sender's;
unreadable: samples that make no sense; too many: more in flight than it may have, or more hellos or heartbeats than it
may send.
"""
STRANGER = "a stranger"
"""Name under which refusals of connections without a hello are counted."""
MOST_PEERS = 50
"""Peers counted by name for each cause; further ones are counted together, since a stranger may make up names."""
OTHERS = "others"


RefusedCounts = Mapping[str, Mapping[str, int]]
"""Numbers of refusals, by cause and peer."""


def merged(parts: Iterable[RefusedCounts]) -> dict[str, dict[str, int]]:
    """Return the sums of several counts."""
    sums: dict[str, Counter[str]] = {}
    for part in parts:
        for cause, counts in part.items():
            sums.setdefault(cause, Counter()).update(counts)
    return {cause: dict(counts) for cause, counts in sums.items()}


class Refusals:
    """Numbers of refusals."""

    def __init__(self) -> None:
        self._counts: dict[RefusalCause, Counter[str]] = {}

    def count(self, cause: RefusalCause, peer: str, what: object) -> None:
        """Count a refusal; log the 1st, 10th, 100th ... of a cause and peer, so that a flood does not flood the log."""
        counts = self._counts.setdefault(cause, Counter())
        name = peer if peer in counts or len(counts) < MOST_PEERS else OTHERS
        counts[name] += 1
        if str(counts[name]).strip("0") == "1":
            log.warning("refused from %r so far, as %s: %d; this one: %.500s", name, cause, counts[name], what)

    def by_cause(self) -> dict[str, dict[str, int]]:
        """Return the numbers by cause and peer."""
        return {cause: dict(counts) for cause, counts in self._counts.items()}
