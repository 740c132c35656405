"""A rate limit for a stream of messages: pure arithmetic, the clock is the caller's."""

from __future__ import annotations

BURST_S = 0.05
"""Seconds' worth of bytes that may be caught up after a late wake-up: about the delay of a busy event loop."""


class Pacer:
    """The virtual scheduling form of the leaky bucket (GCRA, ITU-T I.371).

    A message may be sent once the earlier ones have had their time at the rate. In any T seconds at most
    `rate * (T + BURST_S)` bytes and one message are sent.
    """

    _free_at = float("-inf")
    """When everything sent so far has had its time, in the caller's seconds."""

    def wait_s(self, nbytes: int, rate: float | None, now: float) -> float:
        """Return the seconds to wait before sending a message of `nbytes`, and count it as sent.

        The rate, in bytes per second (None: no limit), may change from call to call.

        Raises:
            ValueError: the rate is not positive.
        """
        if rate is None:
            return 0.0
        if rate <= 0:
            raise ValueError(f"a rate of {rate} bytes per second lets nothing go")
        start = max(self._free_at, now - BURST_S)
        self._free_at = start + nbytes / rate
        return max(0.0, start - now)
