"""How far a peer's clock is from the hub's, from the heartbeats that go to and fro: pure.

As in NTP (RFC 5905, section 8, with the hub's receive and transmit times as one): a peer sends at `sent` by its own
clock, the hub answers with `hub`, its time, and the answer is back at `received`. If both ways took the same,

    offset = hub - (sent + received) / 2        round trip = received - sent

and however the round trip was split between the two ways, the offset is wrong by at most half of it. So the sample of
the shortest round trip says most (the clock filter of section 10): queues only ever make round trips longer. Samples
of the last minute count, so that a clock that drifts or is set is followed.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

KEPT = 60
"""Samples that count; at one heartbeat per second, those of a minute."""


@dataclass
class ClockSync:
    """Estimate of hub time minus own time."""

    _samples: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=KEPT))
    """(round trip, offset), seconds, oldest first."""

    def add(self, sent: float, hub: float, received: float) -> bool:
        """Takes a sample (seconds); False if it cannot be one: not finite, or back before it was sent (a set clock)."""
        if not all(map(math.isfinite, (sent, hub, received))) or received < sent:
            return False
        self._samples.append((received - sent, hub - (sent + received) / 2))
        return True

    @property
    def offset_s(self) -> float | None:
        """Hub time minus own time, seconds; None before the first sample."""
        return min(self._samples)[1] if self._samples else None

    @property
    def rtt_s(self) -> float | None:
        """Round trip of the sample that counts, seconds; `offset_s` is wrong by at most half of it."""
        return min(self._samples)[0] if self._samples else None

    def to_hub_time(self, t: float) -> float:
        """Own time as the hub's; as it is before the first sample."""
        offset = self.offset_s
        return t if offset is None else t + offset
