"""The cost of a run's processes over time. Pure: no I/O and no clock."""

from __future__ import annotations


class Spending:
    """A price per hour that changes as instances come and go."""

    def __init__(self, usd_per_hour: float = 0.0) -> None:
        """Begin with `usd_per_hour`, valid for all times up to the first change."""
        self._changes = [(float("-inf"), usd_per_hour)]

    @property
    def usd_per_hour(self) -> float:
        """The current price per hour."""
        return self._changes[-1][1]

    def change(self, now: float, usd_per_hour: float) -> None:
        """Set the price per hour of all processes together from `now` on (unix seconds)."""
        if usd_per_hour != self.usd_per_hour:
            self._changes.append((now, usd_per_hour))

    def between(self, start: float, end: float) -> float:
        """Return the USD spent between two times (unix seconds)."""
        ends = [then for then, _ in self._changes[1:]] + [float("inf")]
        spent = 0.0
        for (since, rate), until in zip(self._changes, ends, strict=True):
            spent += rate * max(0.0, min(end, until) - max(start, since)) / 3600
        return spent
