"""A rate limit for a stream of messages, and their size: pure arithmetic, the clock is the caller's."""

from __future__ import annotations

BURST_S = 0.05
"""Seconds' worth of bytes that may be caught up after a late wake-up: about the delay of a busy event loop."""
QUICK_S, LONG_S = 3.0, 10.0
"""Seconds until its acknowledgement under which a chunk may be larger, and above which it has to be smaller."""


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


class ChunkSize:
    """Size of the chunks for one peer: small at first, and larger if the link turns out to carry them quickly.

    A connection over which no whole message arrives for half a minute is made anew, and begins with the messages that
    were on their way: chunks that suit the declared bandwidth never arrive over a link that is far slower.

    Args:
        least: smallest size, and the first one, in bytes.
    """

    def __init__(self, least: int) -> None:
        self._least = self._size = least

    def within(self, most: int) -> int:
        """Return the size of the next chunk, at most `most` bytes."""
        return min(most, self._size)

    def acknowledged(self, nbytes: int, took_s: float) -> None:
        """Take into account that a chunk of `nbytes` was acknowledged after `took_s` seconds."""
        if took_s > LONG_S:
            self._size = max(self._least, min(self._size, nbytes) // 2)
        elif took_s < QUICK_S and nbytes >= self._size:
            self._size *= 2
