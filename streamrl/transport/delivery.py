"""Reliable delivery over a link that may break: pure state, no sockets, no clock of its own.

The sender numbers its messages 1, 2, 3 ... and keeps each until it is acknowledged. At most `credits` may be
unacknowledged at once, and none is sent while `window_bytes` are: that bounds memory on both sides. So one message may
be larger than the window, alone. The receiver acknowledges when it has *committed* a
message (written it to disk, handed it to its final owner), not when it has read it. After a reconnect or a silence the
sender sends what is unacknowledged again; the receiver drops what it has already seen and acknowledges again what
it had committed. So each message is processed exactly once while both processes live.

What must not happen: an acknowledgement before the commit (a crash in between would lose the message), and a
number used twice within a session. A new process has a new session, and its numbers start anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class Outbox(Generic[T]):
    """Sender's side of one peer."""

    credits: int
    """Most messages under way."""
    window_bytes: float = math.inf
    """No message is sent while so many bytes are under way."""
    next_number: int = 1
    pending: dict[int, T] = field(default_factory=dict)
    """Sent and not yet acknowledged, oldest first."""
    sent_at: dict[int, float] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    """Bytes of each."""
    under_way_bytes: int = 0
    """Of all that is pending."""

    @property
    def has_credit(self) -> bool:
        """Whether one more may be sent now."""
        return len(self.pending) < self.credits and self.under_way_bytes < self.window_bytes

    def send(self, message: T, now: float, size: int = 0) -> int:
        """Gives a message of `size` bytes its number, `next_number`, and keeps it.

        Raises:
            RuntimeError: there is no credit.
        """
        if not self.has_credit:
            raise RuntimeError("no credit left")
        number = self.next_number
        self.next_number += 1
        self.pending[number] = message
        self.sent_at[number] = now
        self.sizes[number] = size
        self.under_way_bytes += size
        return number

    def acknowledged(self, number: int) -> T | None:
        """Forgets a message and returns it; None if it was not waited for (a repeated acknowledgement)."""
        self.sent_at.pop(number, None)
        self.under_way_bytes -= self.sizes.pop(number, 0)
        return self.pending.pop(number, None)

    def forget(self) -> list[T]:
        """Gives up on what is under way; returns it, oldest first."""
        given_up = list(self.pending.values())
        self.pending.clear()
        self.sent_at.clear()
        self.sizes.clear()
        self.under_way_bytes = 0
        return given_up

    def to_resend(self, now: float, older_than: float) -> list[tuple[int, T]]:
        """Unacknowledged messages sent at least `older_than` seconds ago, in order; counts them as sent now."""
        due = [
            (number, message) for number, message in self.pending.items() if now - self.sent_at[number] >= older_than
        ]
        for number, _ in due:
            self.sent_at[number] = now
        return due


@dataclass
class Inbox:
    """Receiver's side of one peer."""

    session: str = ""
    committed_to: int = 0
    """Every number up to this one is committed."""
    committed: set[int] = field(default_factory=set)
    """Committed numbers above `committed_to`."""
    open: set[int] = field(default_factory=set)
    """Received, not yet committed."""

    def receive(self, session: str, number: int) -> str:
        """What to do with a message: 'new' (process it), 'open' (drop, it is being processed), 'committed' (drop and
        acknowledge again)."""
        if session != self.session:
            self.session, self.committed_to = session, 0
            self.committed, self.open = set(), set()
        if number <= self.committed_to or number in self.committed:
            return "committed"
        if number in self.open:
            return "open"
        self.open.add(number)
        return "new"

    def commit(self, session: str, number: int) -> bool:
        """Marks a message committed; False if it belongs to an earlier life of the peer."""
        if session != self.session or number not in self.open:
            return False
        self.open.discard(number)
        self.committed.add(number)
        while self.committed_to + 1 in self.committed:
            self.committed_to += 1
            self.committed.discard(self.committed_to)
        return True
