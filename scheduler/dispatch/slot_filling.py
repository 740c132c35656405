"""Which slot each waiting request gets, if every one starts in the slot that becomes free first.

A site has tens of thousands of slots and as many waiting requests, so no request may look at all slots. Each pass finds
the slots that become free first, its window, and gives all of them to requests at once, as far as none of these ends
before the window does. Where requests are so short that they do, the pass continues one by one inside its window.
Few slots are one window, and are filled one by one to the end.
"""

from __future__ import annotations

import heapq
import math

import numpy as np
import numpy.typing as npt

from scheduler.cost.decode import Floats

LEAST_WINDOW = 64
"""Least number of slots of a window: a pass takes as long as some tens of single steps."""
WINDOWS = 32
"""Number of windows into which many slots are divided: a pass looks at all slots once, to find its window."""

Slots = npt.NDArray[np.int64]


def fill_slots(free_at: Floats, pace: Floats, lengths: Floats) -> tuple[Slots, Floats]:
    """Start each request, in the given order, in the slot that is free first; of several, in that with the least index.

    Args:
        free_at: [scenarios, slots] seconds at which each slot becomes free; afterwards those at which its last request
            has ended.
        pace: [slots] seconds of a token.
        lengths: [scenarios, requests] tokens of each request, none negative.

    Returns:
        [scenarios, requests] slot of each request, and the seconds at which it has ended.
    """
    chosen, ended = np.zeros(lengths.shape, dtype=np.int64), np.zeros(lengths.shape)
    size = max(LEAST_WINDOW, free_at.shape[1] // WINDOWS)
    for free, tokens, slots, ends in zip(free_at, lengths, chosen, ended, strict=True):
        done = 0
        while done < len(tokens):
            window, rest = _first_free(free, size), tokens[done:]
            taken, until = _pass(window, free, pace, rest)
            slots[done : done + len(taken)] = taken
            ends[done : done + len(taken)] = until
            free[taken] = until  # of a slot that was taken twice, the last one counts
            done += len(taken)
    return chosen, ended


def _first_free(free: Floats, size: int) -> Slots:
    """Return the slots that become free first, in this order; those that do together, by index."""
    if size >= len(free):
        return np.argsort(free, kind="stable")
    latest = np.partition(free, size - 1)[size - 1]
    found = np.flatnonzero(free <= latest)
    return found[np.argsort(free[found], kind="stable")][:size]


def _pass(window: Slots, free: Floats, pace: Floats, tokens: Floats) -> tuple[Slots, Floats]:
    """Return slots and ends of the next requests: as many at once as can be, or one by one where those are few."""
    if len(window) < len(free):
        taken, ends = _at_once(window, free, pace, tokens)
        if 4 * len(taken) >= min(len(window), len(tokens)):
            return taken, ends
    return _one_by_one(window, free, pace, tokens)


def _at_once(window: Slots, free: Floats, pace: Floats, tokens: Floats) -> tuple[Slots, Floats]:
    """Return a window's slots and the ends of their next requests, as far as none ends before a slot here is free."""
    slots = window[: len(tokens)]
    ends = free[slots] + tokens[: len(slots)] * pace[slots]
    too_late = np.flatnonzero(free[slots[1:]] >= np.minimum.accumulate(ends)[:-1])
    fit = int(too_late[0]) + 1 if len(too_late) else len(slots)
    return slots[:fit], ends[:fit]


def _one_by_one(window: Slots, free: Floats, pace: Floats, tokens: Floats) -> tuple[Slots, Floats]:
    """Return slots and ends of the next requests until all slots of a window are taken beyond what was free there.

    If the window is all slots, that is never.
    """
    heap = list(zip(free[window].tolist(), window.tolist(), strict=True))  # ascending, so it is a heap
    of_token = dict(zip(window.tolist(), pace[window].tolist(), strict=True))
    latest = heap[-1] if len(window) < len(free) else (math.inf, 0)
    taken, ends = [], []
    for number in tokens.tolist():
        at, slot = heap[0]
        if (at, slot) > latest:  # a slot outside the window may be free before
            break
        end = at + number * of_token[slot]
        heapq.heapreplace(heap, (end, slot))
        taken.append(slot)
        ends.append(end)
    return np.asarray(taken, dtype=np.int64), np.asarray(ends)
