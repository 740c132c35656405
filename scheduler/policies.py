"""All dispatch policies by the name that users give."""

from __future__ import annotations

import math
from collections.abc import Callable

from scheduler.baselines import LeastLoaded, LongestFirst, Random, RoundRobin
from scheduler.planned import Algorithm2, SkewAware
from scheduler.policy import DispatchPolicy

POLICIES: dict[str, tuple[str, Callable[[float], DispatchPolicy]]] = {
    "random": ("any instance", lambda longest: Random()),
    "round-robin": ("instances in turn", lambda longest: RoundRobin()),
    "least-loaded": ("the instance with the fewest running requests", lambda longest: LeastLoaded()),
    "longest-first": ("least-loaded, the longest expected request first", lambda longest: LongestFirst()),
    "algorithm2": ("StreamRL's Algorithm 2 as printed (sum of both pools)", lambda longest: Algorithm2()),
    "algorithm2-max": ("the same with the later of both pools", lambda longest: Algorithm2("max")),
    "skew-aware-static": ("ours without moving running requests", lambda longest: SkewAware(False, longest)),
    "skew-aware": ("ours", lambda longest: SkewAware(True, longest)),
}
"""Name -> (what it does, how to make one for requests of at most so many tokens)."""


def make_policy(name: str, longest: float = math.inf) -> DispatchPolicy:
    """A policy by name.

    Raises:
        ValueError: there is none; the message lists what there is.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name][1](longest)
