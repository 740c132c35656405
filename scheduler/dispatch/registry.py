"""All dispatch policies, by the names that users give."""

from __future__ import annotations

import math
from collections.abc import Callable

from scheduler.dispatch.baselines import LeastLoaded, LongestFirst, Random, RoundRobin, TwoChoices
from scheduler.dispatch.dispatch_objective import MAKESPAN, DispatchObjective, Streamed
from scheduler.dispatch.group_probe import GroupProbe
from scheduler.dispatch.planned import Algorithm2, SkewAware
from scheduler.dispatch.policy import DispatchPolicy

Make = Callable[[float, int, DispatchObjective], DispatchPolicy]
"""Creates a policy from the token limit per request, the affinity and the objective."""
POLICIES: dict[str, tuple[str, Make]] = {
    "random": ("any instance", lambda *_: Random()),
    "round-robin": ("instances in turn", lambda *_: RoundRobin()),
    "two-choices": ("the less loaded of two random instances", lambda *_: TwoChoices()),
    "least-loaded": (
        "the instance with the fewest running requests",
        lambda longest, affinity, objective: LeastLoaded(affinity),
    ),
    "longest-first": ("least-loaded, the longest expected request first", lambda *_: LongestFirst()),
    "algorithm2": ("StreamRL's Algorithm 2 as printed (sum of both pools)", lambda *_: Algorithm2()),
    "algorithm2-max": ("Algorithm 2 with the later of both pools", lambda *_: Algorithm2("max")),
    "group-probe": (
        "skew-aware, one completion of each prompt first: its length informs the others' forecasts",
        lambda longest, affinity, objective: GroupProbe(longest, affinity, objective),
    ),
    "skew-aware-static": (
        "skew-aware without moving running requests",
        lambda longest, affinity, objective: SkewAware(False, longest, affinity, objective),
    ),
    "skew-aware": (
        "the cheapest plan by predicted lengths for what the schedule waits for, corrected while it runs",
        lambda longest, affinity, objective: SkewAware(True, longest, affinity, objective),
    ),
}
"""Name -> (description for users, factory)."""
BLIND = frozenset({"random", "round-robin", "two-choices", "least-loaded"})
"""Policies that ignore forecasts."""
AUTO = "auto"
"""Stands for the default policy of the run's schedule (`policy_for`)."""
DEFAULTS = dict.fromkeys(("colocated", "sync", "stream", "one_step_off"), "skew-aware")
"""Default policies of schedules for which one is measured to be faster than least-loaded, that of all others
(`experiments/dispatch_quality.py`). Under `async` no policy is known to raise the rate of complete groups, and `auto`
may change to it at any step.
"""


def policy_for(schedule: str, chosen: str = AUTO) -> str:
    """Return the name of the policy that a run uses.

    Args:
        schedule: name of the run's schedule.
        chosen: the run's choice, a name of `POLICIES` or `AUTO`.
    """
    return DEFAULTS.get(schedule, "least-loaded") if chosen == AUTO else chosen


def objective_of(schedule: str, train_tokens_s: float = math.inf) -> DispatchObjective:
    """Return what plans make small under a schedule; see `dispatch_objective.py`.

    Args:
        schedule: name of the run's schedule.
        train_tokens_s: tokens, prompts included, that the trainer processes per second; infinite while unknown.
    """
    return Streamed(train_tokens_s) if schedule == "stream" else MAKESPAN


def make_policy(
    name: str, longest: float = math.inf, affinity: int = 0, objective: DispatchObjective = MAKESPAN
) -> DispatchPolicy:
    """Create a policy by name.

    Args:
        name: one of `POLICIES`.
        longest: largest number of tokens that a request may produce.
        affinity: siblings that are placed by load follow their group to an instance that is at most so many requests
            fuller than the emptiest one.
        objective: what policies that plan make small, see `objective_of`.

    Raises:
        ValueError: the name is unknown; the message lists the known ones.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name][1](longest, affinity, objective)
