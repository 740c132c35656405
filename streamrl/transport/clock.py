"""Estimate the offset of a peer's clock from the hub's, from the times in heartbeats. Pure.

As in NTP (RFC 5905, section 8, with the hub's receive and transmit times as one): a peer sends at `sent` by its own
clock, the hub answers with its time `hub`, and the answer arrives at `received`. If both directions took equally long,

    offset = hub - (sent + received) / 2        round trip = received - sent

and however the round trip was split, the offset is wrong by at most half of it. So the sample with the shortest round
trip is the best (the clock filter of section 10): queues only make round trips longer. Only samples of the last minute
count, so the estimate follows a clock that drifts. One that contradicts the best shows that a clock has been set: what
was measured before no longer counts.
"""

from __future__ import annotations

import math
from collections import deque

KEPT = 60
"""Newest samples that count; at one heartbeat per second, those of a minute."""


class ClockSync:
    """Estimate of hub time minus own time."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=KEPT)
        """Samples (round trip, offset), seconds, oldest first."""

    def add(self, sent: float, hub: float, received: float) -> bool:
        """Add a sample (seconds); return False if it is invalid: not finite, or received before it was sent."""
        if not all(map(math.isfinite, (sent, hub, received))) or received < sent:
            return False
        rtt, offset = received - sent, hub - (sent + received) / 2
        if self._samples:
            best_rtt, best = min(self._samples)
            if abs(offset - best) > (rtt + best_rtt) / 2:  # further apart than both can be wrong
                self._samples.clear()
        self._samples.append((rtt, offset))
        return True

    @property
    def offset_s(self) -> float | None:
        """Hub time minus own time, seconds; None before the first sample."""
        return min(self._samples)[1] if self._samples else None

    @property
    def rtt_s(self) -> float | None:
        """Shortest round trip, seconds; `offset_s` is wrong by at most half of it."""
        return min(self._samples)[0] if self._samples else None

    def to_hub_time(self, t: float) -> float:
        """Convert own time to the hub's; unchanged before the first sample."""
        return t + (self.offset_s or 0.0)
