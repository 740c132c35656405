"""Lengths of the turns of episodes, learned from the turns that have ended. Pure: no I/O.

A controller predicts how many tokens a whole episode will have. One turn asks much less of an instance, so a turn is
forecast from finished turns of this site:

    the newest `KEPT` turns of its task at its place in the episode (the first call, the second, ...), or, while there
    are fewer than `FEWEST` of these, the newest `KEPT` of its task at any place; with fewer than `FEWEST` of those
    either, there is no forecast

Places from `PLACES` on count as one. Of the first turns, short ones end first, so early forecasts are too short; the
window forgets them.
"""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np

from scheduler.cost.length_forecast import MIDPOINTS, Forecast

KEPT, FEWEST, PLACES = 64, 16, 32
"""Turns that a forecast is made of, the fewest that make one, and places that are told apart."""


def _window() -> deque[int]:
    return deque(maxlen=KEPT)


class TurnLengths:
    """The newest lengths of finished turns, by task and place."""

    def __init__(self) -> None:
        self._at: defaultdict[tuple[str, int], deque[int]] = defaultdict(_window)
        self._any: defaultdict[str, deque[int]] = defaultdict(_window)

    def record(self, task: str, place: int, length: int) -> None:
        """Record a finished turn: its task, its place in its episode from 0, and its sampled tokens."""
        self._at[task, min(place, PLACES)].append(length)
        self._any[task].append(length)

    def forecast(self, task: str, place: int, most: int) -> Forecast | None:
        """Return the forecast of a turn that may have at most `most` tokens; None: too few have ended."""
        for lengths in (self._at.get((task, min(place, PLACES))), self._any.get(task)):
            if lengths is not None and len(lengths) >= FEWEST:
                values = np.quantile(np.minimum(lengths, most), MIDPOINTS)
                return Forecast(tuple(np.maximum(values, 1.0).tolist()))
        return None
