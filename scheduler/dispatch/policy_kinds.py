"""Policies by the names that users give: each file with a policy offers it here as it is imported."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.dispatch.dispatch_objective import MAKESPAN, DispatchObjective
from scheduler.dispatch.policy import DispatchPolicy


@dataclass(frozen=True)
class PolicySettings:
    """What a run gives its policy."""

    longest: float = math.inf
    """Largest number of tokens that a request may produce."""
    affinity: int = 0
    """Siblings that are placed by load follow their group to an instance that is at most so many requests fuller than
    the emptiest one."""
    objective: DispatchObjective = MAKESPAN
    """What policies that plan make small."""


@dataclass(frozen=True)
class PolicyKind:
    """A policy that can be chosen."""

    summary: str
    """Where requests go, for users."""
    make: Callable[[PolicySettings], DispatchPolicy]
    blind: bool
    """Whether it ignores forecasts."""
    learns: bool
    """Whether it makes forecasts of its own, from the lengths of a prompt's other completions."""


OFFERED: dict[str, PolicyKind] = {}
"""Policies of the files imported so far; `registry.py` has them all."""


def offer(
    name: str,
    summary: str,
    make: Callable[[PolicySettings], DispatchPolicy],
    blind: bool = False,
    learns: bool = False,
) -> None:
    """Let users choose a policy.

    Args:
        name: value of `dispatch.policy` and of `streamrl simulate --policy`.
        summary: where requests go, as the reference page says it.
        make: creates a policy without instances.
        blind: whether it ignores forecasts.
        learns: whether it makes forecasts of its own, from the lengths of a prompt's other completions.

    Raises:
        ValueError: another policy has the name.
    """
    if name in OFFERED:
        raise ValueError(f"two dispatch policies are named {name!r}")
    OFFERED[name] = PolicyKind(summary, make, blind, learns)
