"""Compute when bytes leave and arrive over one direction of a link: bandwidth, delay, loss and back-pressure.

A `Wire` is one direction of a link, shared by all its connections; a `ShapedFlow` is one connection on it. Both are
pure: callers pass the time, in seconds of any clock that does not go back.

    bandwidth   n bytes occupy the wire for n / bandwidth seconds, after all bytes sent before.
    delay       they arrive `delay_s` after they have left. Bytes of one flow arrive in order, whatever changes.
    queue       bytes may enter the wire while it has at most 50 ms of work, so other flows' small messages wait no
                longer than that.
    window      a flow's reader stops while the flow has a window or more between reading and delivery, which is what
                the wire and its queue hold. The sender's TCP then fills its buffers and blocks, as in a real network.
    loss        see `Wire.send`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

SEGMENT = 1448
"""Payload bytes of a TCP segment on Ethernet: 1500 less IP and TCP headers with timestamps."""
QUEUE_S = 0.05
"""Seconds of work that may wait in front of a wire; routers' buffers are of this order."""
CHUNK_S = 0.005
"""Seconds of the wire in one piece that is read and delivered: a full wire makes 200 wake-ups per second."""
RETRANSMIT_S = 0.2
"""Linux' shortest retransmission timeout (TCP_RTO_MIN)."""
MIN_CHUNK = 2 * SEGMENT
MAX_CHUNK = 256 * 1024
MIN_WINDOW = 64 * 1024
MAX_WINDOW = 32 * 1024 * 1024
"""Upper bound of a window in bytes, which bounds memory if the bandwidth exceeds what one process can relay."""
UNSHAPED_WINDOW = 4 * 1024 * 1024


@dataclass(frozen=True)
class LinkShape:
    """Bandwidth, delay and loss of a link, the same in both directions.

    Raises:
        ValueError: a bandwidth that is not positive, a negative delay, or a loss outside 0..1 (1 excluded).
    """

    bandwidth_bytes_per_s: float | None
    """Bandwidth of each direction; None: unlimited."""
    delay_s: float = 0.0
    """One-way delay; half of the round trip."""
    loss: float = 0.0
    """Share of segments that are lost."""

    def __post_init__(self) -> None:
        if self.bandwidth_bytes_per_s is not None and not 0 < self.bandwidth_bytes_per_s < math.inf:
            raise ValueError(f"a link's bandwidth must be positive, got {self.bandwidth_bytes_per_s} bytes/s")
        if not 0 <= self.delay_s < math.inf:
            raise ValueError(f"a link's delay must not be negative, got {self.delay_s} s")
        if not 0 <= self.loss < 1:
            raise ValueError(f"a link's loss must be at least 0 and below 1, got {self.loss}")

    @property
    def chunk(self) -> int:
        """Most bytes to read at once."""
        if self.bandwidth_bytes_per_s is None:
            return MAX_CHUNK
        return min(MAX_CHUNK, max(MIN_CHUNK, int(CHUNK_S * self.bandwidth_bytes_per_s)))

    @property
    def window(self) -> int:
        """Bytes that a flow may have between reading and delivery: bandwidth x (round trip + queue)."""
        if self.bandwidth_bytes_per_s is None:
            return UNSHAPED_WINDOW
        return min(MAX_WINDOW, max(MIN_WINDOW, int((2 * self.delay_s + QUEUE_S) * self.bandwidth_bytes_per_s)))

    @property
    def retransmit_s(self) -> float:
        """Seconds after which TCP retransmits a lost segment."""
        return max(2 * self.delay_s, RETRANSMIT_S)


@dataclass
class ShapedFlow:
    """One direction of a connection: the order of its bytes, and how many are in flight."""

    arrives: float = -math.inf
    """Arrival time of the bytes sent last."""
    in_flight: int = 0
    """Bytes sent that the receiver's socket has not taken."""


class Wire:
    """One direction of a link.

    Args:
        shape: shape of the link.
        rng: decides what is lost; seeded by the caller, so that a run can be repeated.
        paced: False: the kernel's token bucket limits the bandwidth. Bytes then take no time here, and the shape's
            bandwidth only determines the window.
    """

    def __init__(self, shape: LinkShape, rng: Random, paced: bool = True) -> None:
        self.shape = shape
        self.paced = paced
        self._rng = rng
        self._free_at = -math.inf

    @property
    def _bandwidth(self) -> float:
        bandwidth = self.shape.bandwidth_bytes_per_s
        return bandwidth if self.paced and bandwidth is not None else math.inf

    def backlog_s(self, now: float) -> float:
        """Return the seconds of work that the wire still has."""
        return max(0.0, self._free_at - now)

    def reshape(self, now: float, shape: LinkShape) -> None:
        """Change the link's shape; bytes still in its queue leave at the new bandwidth."""
        waiting = self.backlog_s(now)
        before = self._bandwidth
        self.shape = shape
        if waiting:  # then `before` was finite; bytes already sent keep their arrival times
            self._free_at = now + waiting * before / self._bandwidth

    def ready_at(self, now: float) -> float:
        """Return when the next bytes may enter: `now`, or as soon as the queue has room."""
        return max(now, self._free_at - QUEUE_S)

    def may_read(self, flow: ShapedFlow) -> bool:
        """Return whether a flow's window has room for another chunk."""
        return flow.in_flight < self.shape.window

    def send(self, now: float, nbytes: int, flow: ShapedFlow) -> float:
        """Put bytes on the wire; return the time at which the last of them is at the receiver, and may be delivered.

        A proxy of TCP connections cannot drop a segment, so it imitates the effect of loss on TCP: each segment (1448
        bytes) is lost with probability `loss`, and neither it nor the later bytes of its connection are delivered
        until it has been retransmitted, after max(round trip, 0.2 s). Other connections continue. Several losses are
        repaired in parallel, as with selective acknowledgements. The sender's congestion window is not imitated: a
        flow loses throughput only while its window is full.
        """
        self._free_at = max(now, self._free_at) + nbytes / self._bandwidth if self._bandwidth < math.inf else now
        own = self._free_at + self.shape.delay_s
        if self.shape.loss:
            segments = math.ceil(nbytes / SEGMENT)
            if self._rng.random() < 1 - (1 - self.shape.loss) ** segments:
                own += self.shape.retransmit_s
        flow.arrives = max(own, flow.arrives)
        flow.in_flight += nbytes
        return flow.arrives
