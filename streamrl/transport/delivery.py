"""Reliable delivery over a link that may break: pure state, no sockets and no clock.

The sender numbers its messages 1, 2, 3 ... and keeps each until it is acknowledged. At most `credits` messages may be
unacknowledged at once, and none is sent while `window_bytes` are; this bounds memory on both sides. A message larger
than the window is sent alone. The receiver acknowledges a message when it has *committed* it (written it to disk, or
handed it to its final owner), not when it has read it. After a reconnect or a silence the sender resends everything
unacknowledged; the receiver drops what it has already seen, and acknowledges again what it had committed. So each
message is processed exactly once while both processes live.

Two things must never happen: an acknowledgement before the commit (a crash in between would lose the message), and a
number used twice within a session. A new process has a new session and starts at number 1.

A receiver that was restarted begins with nothing, while its senders count on. Each sender says which of its messages
is the first that is not acknowledged; those before it will never come again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
MOST_AHEAD = 1_000_000
"""Numbers beyond the first that is not committed which a receiver remembers; no sender gets that far."""


@dataclass
class Outbox(Generic[T]):
    """The sender's side of one peer; its limits are those of a `Flow`."""

    credits: int
    window_bytes: float = math.inf
    next_number: int = 1
    pending: dict[int, T] = field(default_factory=dict)
    """Messages sent and not yet acknowledged, by number, oldest first."""
    sent_at: dict[int, float] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    """Bytes of each pending message."""
    in_flight_bytes: int = 0
    """Bytes of all pending messages."""

    @property
    def first(self) -> int:
        """Number before which everything is acknowledged or given up."""
        return next(iter(self.pending), self.next_number)

    @property
    def has_credit(self) -> bool:
        """Whether another message may be sent now."""
        return len(self.pending) < self.credits and self.in_flight_bytes < self.window_bytes

    def send(self, message: T, now: float, size: int = 0) -> int:
        """Give a message of `size` bytes the number `next_number`, and keep it.

        Raises:
            RuntimeError: there is no credit.
        """
        if not self.has_credit:
            raise RuntimeError("no credit left")
        number, self.next_number = self.next_number, self.next_number + 1
        self.pending[number], self.sent_at[number], self.sizes[number] = message, now, size
        self.in_flight_bytes += size
        return number

    def acknowledged(self, number: int) -> T | None:
        """Forget a message and return it; None if it was not pending (a repeated acknowledgement)."""
        self.sent_at.pop(number, None)
        self.in_flight_bytes -= self.sizes.pop(number, 0)
        return self.pending.pop(number, None)

    def forget(self) -> None:
        """Give up on everything in flight."""
        self.pending.clear()
        self.sent_at.clear()
        self.sizes.clear()
        self.in_flight_bytes = 0

    def to_resend(self, now: float, older_than: float) -> list[tuple[int, T]]:
        """Return unacknowledged messages sent at least `older_than` seconds ago, in order, and mark them sent now."""
        due = [number for number, sent in self.sent_at.items() if now - sent >= older_than]
        self.sent_at.update(dict.fromkeys(due, now))
        return [(number, self.pending[number]) for number in due]


@dataclass
class Inbox:
    """The receiver's side of one peer."""

    session: str = ""
    committed_to: int = 0
    """Number up to which everything is committed."""
    committed: set[int] = field(default_factory=set)
    """Committed numbers above `committed_to`."""
    open: dict[int, int] = field(default_factory=dict)
    """Bytes of each message received and not yet committed, by number."""
    open_bytes: int = 0
    """Bytes of all of them."""
    most_open: float = math.inf
    """Messages that may be open at once."""
    most_bytes: float = math.inf
    """Open bytes from which on no further message is taken; a single one may be larger."""

    def receive(self, session: str, number: int, size: int = 0) -> str:
        """Return what to do with a message of `size` bytes: 'new' (process it), 'open' (drop it, it is being
        processed), 'committed' (drop it and acknowledge again) or 'full' (drop it; its sender may repeat it)."""
        self._begin(session)
        if number <= self.committed_to or number in self.committed:
            return "committed"
        if number in self.open:
            return "open"
        if len(self.open) >= self.most_open or (self.open and self.open_bytes + size > self.most_bytes):
            return "full"
        if number - self.committed_to > MOST_AHEAD:
            return "full"  # numbers with gaps, each of which would have to be remembered
        self.open[number] = size
        self.open_bytes += size
        return "new"

    def commit(self, session: str, number: int) -> bool:
        """Mark a message committed; return False if it belongs to an earlier session of the peer."""
        if session != self.session or number not in self.open:
            return False
        self.open_bytes -= self.open.pop(number)
        if number > self.committed_to:
            self.committed.add(number)
            self._advance()
        return True

    def begin_at(self, session: str, first: int) -> None:
        """Expect no message before `first`: its sender has an acknowledgement of each, maybe of an earlier receiver."""
        self._begin(session)
        if first - 1 > self.committed_to:
            self.committed_to = first - 1
            self.committed = {number for number in self.committed if number > self.committed_to}
            self._advance()

    def _begin(self, session: str) -> None:
        if session != self.session:
            self.session, self.committed_to, self.committed, self.open, self.open_bytes = session, 0, set(), {}, 0

    def _advance(self) -> None:
        while self.committed_to + 1 in self.committed:
            self.committed_to += 1
            self.committed.discard(self.committed_to)
