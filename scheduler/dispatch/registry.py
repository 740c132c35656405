"""All dispatch policies, by the names that users give."""

from __future__ import annotations

import math
from collections.abc import Callable

from scheduler.dispatch.baselines import LeastLoaded, LongestFirst, Random, RoundRobin, TwoChoices
from scheduler.dispatch.group_probe import GroupProbe
from scheduler.dispatch.planned import Algorithm2, SkewAware
from scheduler.dispatch.policy import DispatchPolicy

POLICIES: dict[str, tuple[str, Callable[[float, int], DispatchPolicy]]] = {
    "random": ("any instance", lambda longest, affinity: Random()),
    "round-robin": ("instances in turn", lambda longest, affinity: RoundRobin()),
    "two-choices": ("the less loaded of two random instances", lambda longest, affinity: TwoChoices()),
    "least-loaded": ("the instance with the fewest running requests", lambda longest, affinity: LeastLoaded(affinity)),
    "longest-first": ("least-loaded, the longest expected request first", lambda longest, affinity: LongestFirst()),
    "algorithm2": ("StreamRL's Algorithm 2 as printed (sum of both pools)", lambda longest, affinity: Algorithm2()),
    "algorithm2-max": ("Algorithm 2 with the later of both pools", lambda longest, affinity: Algorithm2("max")),
    "group-probe": (
        "skew-aware, one completion of each prompt first: its length informs the others' forecasts",
        lambda longest, affinity: GroupProbe(True, longest, affinity),
    ),
    "skew-aware-static": (
        "skew-aware without moving running requests",
        lambda longest, affinity: SkewAware(False, longest, affinity),
    ),
    "skew-aware": (
        "the cheapest plan by predicted lengths, corrected while it runs",
        lambda longest, affinity: SkewAware(True, longest, affinity),
    ),
}
"""Name -> (description for users, factory that takes the token limit per request and the affinity)."""


def make_policy(name: str, longest: float = math.inf, affinity: int = 0) -> DispatchPolicy:
    """Create a policy by name.

    Args:
        name: one of `POLICIES`.
        longest: largest number of tokens that a request may produce.
        affinity: siblings that are placed by load follow their group to an instance that is at most so many requests
            fuller than the emptiest one.

    Raises:
        ValueError: the name is unknown; the message lists the known ones.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name][1](longest, affinity)
