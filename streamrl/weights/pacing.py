"""Keeps a stream of messages within a rate: pure arithmetic, the clock is the caller's."""

from __future__ import annotations

from dataclasses import dataclass

BURST_S = 0.05
"""What may be made up for after a late wake-up, in seconds of the rate: about as late as a busy event loop is."""


@dataclass
class Pacer:
    """The virtual scheduling form of the leaky bucket (GCRA, ITU-T I.371): a message may go when the ones before it
    have had their time at the rate.

    In any T seconds at most `rate * (T + burst_s)` bytes and one message are let go.
    """

    burst_s: float = BURST_S
    _free_at: float = float("-inf")
    """When all that was let go has had its time (the caller's seconds)."""

    def wait_s(self, nbytes: int, rate: float | None, now: float) -> float:
        """Seconds to wait before a message of `nbytes` goes; it counts as sent.

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
