"""Reliable delivery over a link that may break: pure state, no sockets and no clock.

The sender numbers its messages 1, 2, 3 ... and keeps each until it is acknowledged. At most `credits` messages may be
unacknowledged at once, and none is sent while `window_bytes` are; this bounds memory on both sides. A message larger
than the window is sent alone. The receiver acknowledges a message when it has *committed* it (written it to disk, or
handed it to its final owner), not when it has read it. After a reconnect, or if no acknowledgement comes, the sender
resends everything unacknowledged; the receiver drops what it has already seen, and acknowledges again what it had
committed. So each message is processed exactly once while both processes live.

Slow is not lost: a copy on a slow link waits behind the originals and delays everything further. So no message is
repeated while acknowledgements come, unless one of a later message has come before its own. And each repeat makes the
wait for the next one twice as long, until a message that was sent only once shows how long an acknowledgement takes.

Two things must never happen: an acknowledgement before the commit (a crash in between would lose the message), and a
number used twice within a session. A new process has a new session and starts at number 1.

A receiver that was restarted begins with nothing, while its senders count on. Each sender says which of its messages
is the first that is not acknowledged; those before it will never come again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from streamrl.transport.flow import SEND_LIMIT_S

T = TypeVar("T")
MOST_PATIENCE_S = SEND_LIMIT_S / 2
"""Most seconds by which a slow link puts off a repeat: what is lost is repeated before a wait for a credit ends."""
MOST_AHEAD = 1_000_000
"""How far beyond its first uncommitted number a receiver remembers others; no sender gets that far."""


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
    heard_at: float = -math.inf
    """Time of the last acknowledgement, a repeated one included."""
    highest: int = 0
    """Highest number that has been acknowledged."""
    once_from: int = 1
    """Number from which on no message has been repeated; of an earlier one, any copy may have been acknowledged."""
    patience_s: float = 0.0
    """Least seconds until something is repeated: twice what an acknowledgement took last, or what a repeat waited."""

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

    def acknowledged(self, number: int, now: float) -> T | None:
        """Forget a message and return it; None if it was not pending (a repeated acknowledgement)."""
        sent = self.sent_at.pop(number, None)
        if 0 < number < self.next_number:
            self.heard_at, self.highest = now, max(self.highest, number)
        if sent is not None and number >= self.once_from:
            self.patience_s = 2 * (now - sent)
        self.in_flight_bytes -= self.sizes.pop(number, 0)
        return self.pending.pop(number, None)

    def forget(self) -> None:
        """Give up on everything in flight."""
        self.pending.clear()
        self.sent_at.clear()
        self.sizes.clear()
        self.in_flight_bytes = 0

    def to_resend(self, now: float, older_than: float) -> list[tuple[int, T]]:
        """Return what to send again, in order, and mark it sent now.

        Args:
            now: time in seconds.
            older_than: seconds without an acknowledgement after which a message may be lost, at the speed for which
                the limits were made; 0: a new connection, on which nothing has been sent.
        """
        due = list(self.sent_at)
        if older_than > 0:
            limit = max(older_than, min(self.patience_s, MOST_PATIENCE_S))
            due = [number for number in due if now - self._waits_since(number) >= limit]
            if due:
                self.patience_s = 2 * limit
        if due:
            self.once_from = self.next_number
        self.sent_at.update(dict.fromkeys(due, now))
        return [(number, self.pending[number]) for number in due]

    def _waits_since(self, number: int) -> float:
        """Return the time since which a pending message lacks its acknowledgement, although it has had its turn."""
        sent = self.sent_at[number]
        return sent if number < self.highest else max(sent, self.heard_at)


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
