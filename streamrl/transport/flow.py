"""Limits on what may be in flight to a peer, and on waits for it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Self

RESEND_S = 20.0
"""Least seconds without an acknowledgement until messages are resent, longer than any commit takes.

A reconnect resends at once, so this is for messages that got lost without a visible cause.
"""
SEND_LIMIT_S = 300.0
"""Least seconds that a send waits for a credit; it waits longer if the peer may be away for longer."""
WINDOWS_BEFORE_RESEND = 4
"""Full windows that may pass on a link of the declared bandwidth before messages are taken for lost."""


@dataclass(frozen=True)
class Flow:
    """Limits of messages in one direction to one peer."""

    credits: int = 256
    """Most unacknowledged messages."""
    window_bytes: float = math.inf
    """Unacknowledged bytes at which no further message is sent, so at most one message more is in flight."""
    resend_s: float = RESEND_S
    """Seconds without any acknowledgement after which messages are resent, if the peer is heard; more on a link that
    turns out to be slower."""
    lost_after_s: float = 60.0
    """Seconds of silence after which the peer is lost; infinite: its owner judges it by other signs."""
    lost_key: str = field(default="", compare=False)
    """Key of the cluster file that sets `lost_after_s`, for errors; '': none does."""

    @property
    def send_limit_s(self) -> float:
        """Seconds that a send waits for a credit."""
        return max(SEND_LIMIT_S, self.lost_after_s) if math.isfinite(self.lost_after_s) else SEND_LIMIT_S

    def silence(self, silent_s: float) -> str:
        """Return in words that a peer is lost after this silence, and what sets the limit."""
        limit = f", and {self.lost_key} is {self.lost_after_s:g} s" if self.lost_key else ""
        return f"has been silent for {silent_s:.0f} s{limit}"

    def __post_init__(self) -> None:
        """Check the limits.

        Raises:
            ValueError: a limit under which no message would ever be sent.
        """
        if self.credits < 1 or not self.window_bytes > 0 or not self.resend_s > 0 or not self.lost_after_s > 0:
            raise ValueError(f"a flow's limits must be above zero, got {self}")

    @classmethod
    def over(cls, bytes_per_s: float, rtt_s: float, absence_s: float, message_bytes: float) -> Self:
        """Return the flow that keeps a link full and queues little in front of it.

        A link of bandwidth B and round trip R is full with B x R bytes in flight. The window is twice that, since an
        acknowledgement waits for a commit, and at least two messages, so that one is on the link while another is
        being acknowledged.

        Args:
            bytes_per_s: bandwidth of the link, in this direction.
            rtt_s: round trip.
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
            credits=max(cls.credits, math.ceil(window / message_bytes)),  # the window is to bound small messages, too
            window_bytes=window,
            resend_s=max(RESEND_S, WINDOWS_BEFORE_RESEND * full_s),
            lost_after_s=absence_s,
            lost_key="absence_s",
        )
