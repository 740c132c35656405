"""How much may be under way to a peer, and how long to wait for it: pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

RESEND_S = 20.0
"""Above any commit's time. A reconnect resends at once, so this is for what got lost in no visible way."""
SEND_LIMIT_S = 300.0
"""A send waits so long for a credit, or as long as the peer may be away if that is more."""
WINDOWS_BEFORE_RESEND = 4
"""So many full windows may pass on a link before something is taken for lost: slow is not lost."""


@dataclass(frozen=True)
class Flow:
    """Limits of one direction to one peer."""

    credits: int = 256
    """Most messages that are sent and not acknowledged."""
    window_bytes: float = math.inf
    """No message is sent while this many bytes are not acknowledged; so at most that and one message are."""
    resend_s: float = RESEND_S
    """Unacknowledged for this long while the peer is heard: sent again."""
    lost_after_s: float = 60.0
    """Silent for this long: lost. Infinite: its owner judges it by other signs."""

    @property
    def send_limit_s(self) -> float:
        """For how long a send waits for a credit."""
        return max(SEND_LIMIT_S, self.lost_after_s) if math.isfinite(self.lost_after_s) else SEND_LIMIT_S

    def __post_init__(self) -> None:
        """Raises ValueError for limits under which nothing would move."""
        if self.credits < 1 or not self.window_bytes > 0 or not self.resend_s > 0 or not self.lost_after_s > 0:
            raise ValueError(f"a flow's limits must be above zero, got {self}")

    @classmethod
    def over(cls, bytes_per_s: float, rtt_s: float, absence_s: float, message_bytes: float) -> Self:
        """The flow that keeps a link full and queues little before it.

        A link of bandwidth B and round trip R is full with B x R bytes under way. The window is twice that, since an
        acknowledgement waits for a commit, and at least two messages, so that one is on the link while another is
        being acknowledged.

        Args:
            bytes_per_s: of the link, in this direction.
            rtt_s: there and back.
            absence_s: how long the peer may be away.
            message_bytes: size of a large message, all frames.

        Raises:
            ValueError: a bandwidth, an absence or a size that is not above zero, or a negative round trip.
        """
        if not (bytes_per_s > 0 and message_bytes > 0 and rtt_s >= 0):
            raise ValueError(f"no link: {bytes_per_s} bytes/s, {rtt_s} s there and back, messages of {message_bytes}")
        window = max(2 * bytes_per_s * rtt_s, 2 * message_bytes)
        full_s = (window + message_bytes) / bytes_per_s + rtt_s
        return cls(
            credits=max(2, math.ceil(window / message_bytes)),
            window_bytes=window,
            resend_s=max(RESEND_S, WINDOWS_BEFORE_RESEND * full_s),
            lost_after_s=absence_s,
        )
