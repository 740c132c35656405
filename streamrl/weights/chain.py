"""Which way new weights take to a receiver: a chain of deltas with anchors. Pure state: no bytes, no sockets, no clock.

    0 (anchor) -> 1 -> 2 -> 3 -> 4 (anchor) -> 5 -> 6 (newest)          anchor_every=4; an arrow is a delta

Published versions form one line. The delta of a version starts from the version published before it; numbers may have
gaps. Kept complete are the newest version and the newest anchor. An anchor is a version that the caller keeps in a
compressed form; that takes a while, so `published` says which version is to become one and `anchored` tells when it
is. It is the first version, the `anchor_every`-th after each anchor, and whichever comes when deltas no longer lead
from the last anchor to the newest version.

Deltas are kept from the anchor on, so who holds nothing can go by anchor + deltas, or take the newest version
complete, whichever is fewer bytes. Older deltas are kept for the receivers that still need them, which their
acknowledgements tell: 3 -> 4 stays until everybody has acknowledged 4 or later. A receiver that is so far behind that
the kept deltas exceed their bound loses the oldest ones, and takes the way of one that holds nothing. A version
without a delta (other tensors than before) lets nobody past it with deltas.

What must not happen: a receiver counted as holding a version that it has not verified and acknowledged; a delta deleted
that leads from an acknowledged version within the bound.
"""

from __future__ import annotations

from dataclasses import dataclass


class Unreachable(Exception):
    """No kept deltas or complete weights lead to a version; the newest one is always reachable."""


@dataclass(frozen=True)
class ChainStep:
    """One part of a way: complete weights (base None) or the delta of a version."""

    number: int
    base: int | None
    nbytes: int


@dataclass(frozen=True)
class Garbage:
    """What nobody can need any more."""

    deltas: frozenset[int]
    """Versions whose delta may go."""
    complete: frozenset[int]
    """Versions whose complete weights may go."""


class Chain:
    """Versions that exist, and what each receiver holds."""

    def __init__(self, anchor_every: int, max_delta_bytes: int | None = None) -> None:
        """
        Args:
            anchor_every: publications from one anchor to the next, at least 1.
            max_delta_bytes: most bytes of deltas to keep; None: the size of the newest complete weights, because
                more than that is never the cheapest way to the newest version.

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
        """The version that is to become one."""
        self.held: dict[str, int | None] = {}
        """By receiver: the version that it has acknowledged last (None: it holds nothing)."""
        self._since_anchor = 0
        self._full_bytes = 0
        """Of the newest version, not compressed."""
        self._deltas: dict[int, ChainStep] = {}
        """Kept deltas, oldest first; without gaps, each starts where the one before it ends."""
        self._severed: set[int] = set()
        """Versions whose delta no longer leads to the newest, not yet collected."""
        self._complete: dict[int, int] = {}
        """Kept complete weights: number -> bytes."""

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
        """A new version, with a delta that starts from the one published before (None: it has no delta).

        Returns:
            Whether it is to become an anchor.

        Raises:
            ValueError: its number is not above the newest's, or the first version has a delta.
        """
        if self.newest is not None and number <= self.newest:
            raise ValueError(f"version {number} after version {self.newest}")
        if delta_bytes is None:
            self._severed |= self._deltas.keys()  # what is before it leads to nothing newer
            self._deltas.clear()
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
        """The coming anchor is kept, in so many bytes."""
        assert self.coming_anchor is not None
        self.anchor, self.coming_anchor = self.coming_anchor, None
        self._complete[self.anchor] = nbytes

    def path(self, holds: int | None, want: int) -> tuple[ChainStep, ...]:
        """The fewest bytes that bring a receiver from the version it holds to another; of equal ones the shortest,
        then the one that starts latest. Empty if it holds what it wants.

        Raises:
            Unreachable: nothing that is kept leads there.
        """
        if holds == want:
            return ()
        best: tuple[tuple[int, int], tuple[ChainStep, ...]] | None = None
        tail: tuple[ChainStep, ...] = ()
        at: int | None = want
        while at is not None:  # backwards along the deltas: the way may start at each version that is passed
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
        """A receiver has verified and stored a version, or says that it holds nothing (it may have restarted)."""
        self.held[receiver] = number

    def left(self, receiver: str) -> None:
        """A receiver is gone; nothing is kept for it."""
        self.held.pop(receiver, None)

    def collect(self) -> Garbage:
        """Drops what nobody can need any more, and tells what it was."""
        if self.newest is None:
            return Garbage(frozenset(), frozenset())
        starts = [self.anchor, self.coming_anchor, *self.held.values()]
        start = min([self.newest, *(number for number in starts if number is not None and self._leads_on(number))])
        drop = {number for number in self._deltas if number <= start}
        excess = sum(step.nbytes for number, step in self._deltas.items() if number > start) - self._bound()
        for number in [number for number in self._deltas if number > start]:
            if excess <= 0:
                break
            excess -= self._deltas[number].nbytes
            drop.add(number)
        for number in drop:
            del self._deltas[number]
        if not self._leads_on(self.anchor):
            self.anchor = None
        complete = self._complete.keys() - {self.anchor, self.newest}
        for number in complete:
            del self._complete[number]
        severed, self._severed = self._severed, set()
        return Garbage(frozenset(drop | severed), frozenset(complete))

    def _leads_on(self, number: int | None) -> bool:
        """Whether deltas lead from a version to the newest one."""
        return number is not None and (
            number == self.newest or any(step.base == number for step in self._deltas.values())
        )

    def _bound(self) -> int:
        if self.max_delta_bytes is not None:
            return self.max_delta_bytes
        return self._full_bytes
