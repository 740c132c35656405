"""Judgement of measured step times: are they stable, and are they possible? Pure functions.

A machine that does something else meanwhile makes steps slower, for a while. So every step time is measured again until
its repeats agree, and a step of a larger batch that seems faster than one of a smaller batch is nonsense: within
`NOISE` both get their mean (`StepCurve.measured`), beyond it the measurement is refused or said to be doubtful.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

NOISE = 0.15
"""Share by which a step of a larger batch may seem faster before that is nonsense: an assumption, half as much again as
the spread that repeats may have."""
SPREAD = 0.10
"""Largest relative spread (`spread`) of repeats that counts as stable: an assumption; plans pass on no smaller change
of a step time either."""
LEAST_REPEATS = 3
"""Fewest repeats that can be stable: of two that differ, none is the odd one out."""


def spread(repeats: Sequence[float]) -> float:
    """Return the median absolute deviation of repeats, as a share of their median."""
    middle = statistics.median(repeats)
    return statistics.median(abs(one - middle) for one in repeats) / middle


def is_stable(repeats: Sequence[float]) -> bool:
    """Return whether a time was measured often enough, and its repeats agree within `SPREAD`."""
    return len(repeats) >= LEAST_REPEATS and spread(repeats) <= SPREAD


def steepest_fall(points: Mapping[int, float], spreads: Mapping[int, float] | None = None) -> tuple[int, int] | None:
    """Return the smaller and the larger batch between which the step time falls most; None: by noise at most.

    Args:
        points: seconds of a step by batch size.
        spreads: relative spread of each one's repeats, by which it may be off besides `NOISE`, so that a fall counts
            as far as it is sure; None: not known.
    """
    off = spreads or {}
    falls: list[tuple[float, int, int]] = []
    slowest, small = 0.0, 0
    for large in sorted(points):
        # of the smaller batches, the slowest one gives the steepest fall
        if (most := points[large] * (1 + off.get(large, 0.0))) < (1 - NOISE) * slowest:
            falls.append((most / slowest, small, large))
        if (least := points[large] * (1 - off.get(large, 0.0))) > slowest:
            slowest, small = least, large
    return min(falls)[1:] if falls else None


def describe_fall(points: Mapping[int, float], small: int, large: int) -> str:
    """Return a clause about a step time that falls between two batch sizes."""
    return (
        f"a step of batch {large} took {1e3 * points[large]:.4g} ms and one of batch {small} "
        f"{1e3 * points[small]:.4g} ms, but a larger batch cannot be faster (by more than {NOISE:.0%}, for noise)"
    )
