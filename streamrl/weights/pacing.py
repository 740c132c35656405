"""A rate limit for a stream of messages: pure arithmetic, the clock is the caller's."""

from __future__ import annotations

from dataclasses import dataclass

BURST_S = 0.05
"""Seconds' worth of bytes that may be caught up after a late wake-up: about the delay of a busy event loop."""


@dataclass
class Pacer:
    """The virtual scheduling form of the leaky bucket (GCRA, ITU-T I.371).

    A message may be sent once the earlier ones have had their time at the rate. In any T seconds at most
    `rate * (T + burst_s)` bytes and one message are sent.
    """

    burst_s: float = BURST_S
    _free_at: float = float("-inf")
    """When everything sent so far has had its time, in the caller's seconds."""

    def wait_s(self, nbytes: int, rate: float | None, now: float) -> float:
        """Return the seconds to wait before sending a message of `nbytes`, and count it as sent.

        Args:
            rate: bytes per second (None: no limit); it may change from call to call.

        Raises:
            ValueError: the rate is not positive.
        """
        if rate is None:
            return 0.0
        if rate <= 0:
            raise ValueError(f"a rate of {rate} bytes per second lets nothing go")
        start = max(self._free_at, now - self.burst_s)
        self._free_at = start + nbytes / rate
        return max(0.0, start - now)
