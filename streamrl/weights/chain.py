"""Choose how a receiver gets new weights: a chain of deltas with anchors. Pure state: no bytes, no sockets, no clock.

    0 (anchor) -> 1 -> 2 -> 3 -> 4 (anchor) -> 5 -> 6 (newest)          anchor_every=4; an arrow is a delta

Published versions form one line. The delta of a version starts from the version published before it; numbers may have
gaps. The newest version and the newest anchor are kept complete. An anchor is a version that the caller keeps in
compressed form; compressing takes a while, so `published` says which version should become one, and the caller reports
it with `anchored`. Anchors are the first version, the `anchor_every`-th after each anchor, and the next version once
deltas no longer lead from the last anchor to the newest version.

Deltas are kept from the anchor on, so a receiver that holds nothing can take anchor + deltas, or the newest version
complete, whichever is fewer bytes. Older deltas are kept as long as a receiver needs them: 3 -> 4 stays until all
receivers have acknowledged 4 or later. So are the deltas from a version that is on its way to a receiver: otherwise
they could be gone when a slow transfer ends, and another complete version would follow. If a receiver is so far behind
that the kept deltas exceed their bound, the oldest ones are deleted all the same, and it is treated like one that holds
nothing. No path of deltas crosses a version without a delta (one with other tensors than before).

Two things must never happen: that a receiver counts as holding a version that it has not verified and acknowledged, and
that a delta from an acknowledged version is deleted within the bound.
"""

from __future__ import annotations

from dataclasses import dataclass


class Unreachable(Exception):
    """Raised when nothing kept leads to a version; the newest one is always reachable."""


@dataclass(frozen=True)
class ChainStep:
    """One part of a path: complete weights (base None) or the delta of a version."""

    number: int
    base: int | None
    nbytes: int


class Chain:
    """Existing versions, and the version that each receiver holds."""

    def __init__(self, anchor_every: int, max_delta_bytes: int | None = None) -> None:
        """Start without versions or receivers.

        Args:
            anchor_every: publications from one anchor to the next, at least 1.
            max_delta_bytes: most bytes of deltas to keep; None: the size of the newest complete weights, because
                more than that is never the cheapest path to the newest version.

        Raises:
            ValueError: a number below 1.
        """
        if anchor_every < 1 or (max_delta_bytes is not None and max_delta_bytes < 1):
            raise ValueError("anchor_every and max_delta_bytes are at least 1")
        self.anchor_every = anchor_every
        self.max_delta_bytes = max_delta_bytes
        self.newest: int | None = None
        self.anchor: int | None = None
        """The newest anchor that is ready."""
        self.coming_anchor: int | None = None
        """The version that will become the next anchor."""
        self.held: dict[str, int | None] = {}
        """The version that each receiver has acknowledged last (None: it holds nothing)."""
        self.in_transit: dict[str, int] = {}
        """The version that is being sent to a receiver, which it will hold next."""
        self._since_anchor = 0
        self._full_bytes = 0
        """Uncompressed bytes of the newest version."""
        self._deltas: dict[int, ChainStep] = {}
        """Kept deltas, oldest first, without gaps: each starts where the previous one ends."""
        self._complete: dict[int, int] = {}
        """Bytes of each version that is kept complete."""

    @property
    def deltas(self) -> tuple[int, ...]:
        """Versions whose delta is kept, oldest first."""
        return tuple(self._deltas)

    @property
    def complete(self) -> frozenset[int]:
        """Versions that are kept complete."""
        return frozenset(self._complete)

    @property
    def delta_bytes(self) -> int:
        """Bytes of the kept deltas."""
        return sum(step.nbytes for step in self._deltas.values())

    def published(self, number: int, delta_bytes: int | None, full_bytes: int) -> bool:
        """Add a new version, with a delta from the one published before (None: it has no delta).

        Returns:
            Whether it should become an anchor.

        Raises:
            ValueError: its number is not above the newest's, or the first version has a delta.
        """
        if self.newest is not None and number <= self.newest:
            raise ValueError(f"version {number} after version {self.newest}")
        if delta_bytes is None:
            self._deltas.clear()  # they lead to nothing newer
        elif self.newest is None:
            raise ValueError("the first version has nothing to be a delta of")
        else:
            self._deltas[number] = ChainStep(number, self.newest, delta_bytes)
        self.newest = number
        self._complete[number] = self._full_bytes = full_bytes
        self._since_anchor += 1
        due = self._since_anchor >= self.anchor_every or not self._leads_on(self.anchor)
        if not due or self.coming_anchor is not None:
            return False
        self.coming_anchor, self._since_anchor = number, 0
        return True

    def anchored(self, nbytes: int) -> None:
        """Record that the coming anchor is ready, in `nbytes` bytes."""
        assert self.coming_anchor is not None
        self.anchor, self.coming_anchor = self.coming_anchor, None
        self._complete[self.anchor] = nbytes

    def path(self, holds: int | None, want: int) -> tuple[ChainStep, ...]:
        """Return the path with the fewest bytes from the version that a receiver holds to the one it wants.

        Of equal paths, the one with fewest steps is taken, then the one that starts latest. It is empty if the receiver
        holds what it wants.

        Raises:
            Unreachable: nothing kept leads there.
        """
        if holds == want:
            return ()
        best: tuple[tuple[int, int], tuple[ChainStep, ...]] | None = None
        tail: tuple[ChainStep, ...] = ()
        at: int | None = want
        while at is not None:  # backwards along the deltas: the path may start at each version on the way
            way: tuple[ChainStep, ...] | None = tail if at == holds else None
            if way is None and at in self._complete:
                way = (ChainStep(at, None, self._complete[at]), *tail)
            if way is not None:
                cost = (sum(step.nbytes for step in way), len(way))
                if best is None or cost < best[0]:
                    best = cost, way
            delta = self._deltas.get(at)
            if delta is None or at == holds:
                break
            tail, at = (delta, *tail), delta.base
        if best is None:
            raise Unreachable(f"no way from version {holds} to {want}; the newest is {self.newest}")
        return best[1]

    def acknowledged(self, receiver: str, number: int | None) -> None:
        """Record that a receiver has verified and stored a version, or holds nothing (it may have restarted).

        What was sent to it before is in transit no more.
        """
        self.held[receiver] = number
        self.in_transit.pop(receiver, None)

    def sends(self, receiver: str, number: int) -> None:
        """Record that a version is on its way to a receiver, so that the deltas from there on are kept for it."""
        self.in_transit[receiver] = number

    def left(self, receiver: str) -> None:
        """Forget a receiver that is gone; nothing is kept for it."""
        self.held.pop(receiver, None)
        self.in_transit.pop(receiver, None)

    def collect(self) -> None:
        """Drop what no receiver can need any more from `deltas` and `complete`."""
        if self.newest is None:
            return
        starts = [self.anchor, self.coming_anchor, *self.held.values(), *self.in_transit.values()]
        start = min([self.newest, *(number for number in starts if number is not None and self._leads_on(number))])
        bound = self._full_bytes if self.max_delta_bytes is None else self.max_delta_bytes
        for number in self.deltas:  # oldest first
            if number > start and self.delta_bytes <= bound:
                break
            del self._deltas[number]
        if not self._leads_on(self.anchor):
            self.anchor = None
        self._complete = {
            number: self._complete[number] for number in self._complete.keys() & {self.anchor, self.newest}
        }

    def _leads_on(self, number: int | None) -> bool:
        """Return whether deltas lead from a version to the newest one."""
        return number is not None and (
            number == self.newest or any(step.base == number for step in self._deltas.values())
        )
