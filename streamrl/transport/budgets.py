"""How often another site may send what has no credits (hellos, heartbeats) or costs much (requests, envelopes). Pure.

A budget is a token bucket: it fills with time up to its size, and a message that it does not cover is dropped, or, of a
peer that has said hello, waits with all after it if its envelope is not covered. Honest
processes stay far below: they say hello once per connection, and at most once a second while nobody answers; they send
one heartbeat per second, of a few hundred bytes per instance; they request weights once per version, and four times a
second from a relay that does not have them yet. The envelopes of all messages are charged by their bytes, before they
are unpacked, since a byte there can be a list; what is large travels in arrays, and envelopes have a few hundred bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Repeated = Literal["hello", "heartbeat", "request", "envelope"]
COUNTED_BYTES = 64 * 1024
"""Bytes of a message that count as much as one more message."""
SIZES: dict[Repeated, float] = {"hello": 60.0, "heartbeat": 200.0, "request": 100.0, "envelope": 512.0}
"""Messages that a site may send at once, all of its processes together."""
PER_S: dict[Repeated, float] = {"hello": 1.0, "heartbeat": 10.0, "request": 8.0, "envelope": 32.0}
"""Messages per second that a site may send in the long run."""


@dataclass
class Budget:
    """The messages of one kind that a site may still send; full at first."""

    kind: Repeated
    left: float = 0.0
    at: float | None = None
    """Time of the last message, in seconds of any clock; None: there was none."""

    def spend(self, nbytes: int, now: float) -> bool:
        """Charge a message of so many bytes; return whether it is covered. One that is not costs nothing."""
        gained = SIZES[self.kind] if self.at is None else (now - self.at) * PER_S[self.kind]
        self.left, self.at = min(SIZES[self.kind], self.left + gained), now
        price = (self.kind != "envelope") + nbytes / COUNTED_BYTES
        if self.left < price:
            return False
        self.left -= price
        return True
