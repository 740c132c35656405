"""All dispatch policies, by the names that users give.

Every file of this folder is imported, and a policy that it offers (`policy_kinds.py`) can be chosen: a new policy is a
new file.
"""

from __future__ import annotations

import importlib
import math
import pkgutil

import scheduler.dispatch
from scheduler.dispatch.dispatch_objective import MAKESPAN, DispatchObjective, Streamed
from scheduler.dispatch.policy import DispatchPolicy
from scheduler.dispatch.policy_kinds import OFFERED, PolicySettings

for _file in pkgutil.iter_modules(scheduler.dispatch.__path__, "scheduler.dispatch."):
    if _file.name != __name__:
        importlib.import_module(_file.name)

POLICIES = dict(OFFERED)
"""All policies by name."""
BLIND = frozenset(name for name, kind in POLICIES.items() if kind.blind)
"""Policies that ignore forecasts."""
AUTO = "auto"
"""Stands for the default policy of the run's schedule (`policy_for`)."""
DEFAULTS = dict.fromkeys(("colocated", "sync", "stream", "one_step_off"), "skew-aware")
"""Default policies of schedules for which one is measured to be faster than least-loaded, that of all others
(`experiments/dispatch_quality.py`). Under `async` no policy is known to raise the rate of complete groups
(`experiments/async_policies.py`), and `auto` may change to it at any step.
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
        longest: see `PolicySettings`, as for the others.
        affinity: for policies that place by load.
        objective: for policies that plan, see `objective_of`.

    Raises:
        ValueError: the name is unknown; the message lists the known ones.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name].make(PolicySettings(longest, affinity, objective))
