"""How long processes have given no sign of life, measured by one that looks at them again and again. Pure.

Only time in which it looked counts. When the machine, or the process that looks, stands still, the other processes
could not speak or were not heard, and afterwards they need a moment to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

LOOK_EVERY_S = 1.0
MOST_S = 2.0
"""Most seconds between two looks that count; where they are further apart, something stood still."""


class Silences:
    """The seconds of silence of processes, by name."""

    def __init__(self) -> None:
        self._now_s = 0.0
        """Seconds that have counted so far; the other times here are on this scale."""
        self._looked = -math.inf
        self._started: dict[str, tuple[float, float]] = {}
        """Start of each process, by the clock of `look` and on the scale here."""
        self._signs: dict[str, float] = {}

    def look(self, now: float, started: Mapping[str, float]) -> bool:
        """Let time pass until now, unless the last look was less than `LOOK_EVERY_S` ago; return whether it was not.

        Args:
            now: seconds of any clock; steps of it count as at most `MOST_S`.
            started: start time of each living process by this clock; another one than before: it is another process.
        """
        passed = now - self._looked
        if 0 <= passed < LOOK_EVERY_S:
            return False
        before = self._now_s
        self._looked, self._now_s = now, before + min(max(0.0, passed), MOST_S)
        for name, at in started.items():
            if name not in self._started or self._started[name][0] != at:
                self._started[name] = at, max(before, self._now_s - max(0.0, now - at))
        return True

    def sign(self, name: str, ago_s: float = 0.0) -> None:
        """Note a sign of life, so many seconds old."""
        self._signs[name] = max(self._signs.get(name, -math.inf), self._now_s - ago_s)

    def has_spoken(self, name: str) -> bool:
        """Whether a process that has been looked at has given a sign of life since its start."""
        return self._signs.get(name, -math.inf) > self._started[name][1]

    def silent_s(self, name: str) -> float:
        """Return the seconds since the last sign of life of a process or, if later, since its start."""
        return self._now_s - max(self._signs.get(name, -math.inf), self._started[name][1])
