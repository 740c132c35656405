"""What the processes of a run cost over time. Pure."""

from __future__ import annotations


class Spending:
    """A price per hour that changes as instances come and go."""

    def __init__(self, usd_per_hour: float = 0.0) -> None:
        """`usd_per_hour`: from the beginning of time on."""
        self._changes = [(float("-inf"), usd_per_hour)]

    @property
    def usd_per_hour(self) -> float:
        """Now."""
        return self._changes[-1][1]

    def change(self, now: float, usd_per_hour: float) -> None:
        """From `now` on (unix seconds) all processes together cost so much."""
        if usd_per_hour != self.usd_per_hour:
            self._changes.append((now, usd_per_hour))

    def between(self, start: float, end: float) -> float:
        """USD spent from one moment to another (unix seconds)."""
        ends = [then for then, _ in self._changes[1:]] + [float("inf")]
        spent = 0.0
        for (since, rate), until in zip(self._changes, ends, strict=True):
            spent += rate * max(0.0, min(end, until) - max(start, since)) / 3600
        return spent
