"""A clock for code whose time a test sets."""

from __future__ import annotations


class SteppedClock:
    """A clock that only sleep moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
