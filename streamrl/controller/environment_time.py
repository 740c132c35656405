"""How much of the time of environments is hidden behind generation, from the steps of a batch's episodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from streamrl.controller.step_times import covered
from streamrl.rollouts.trajectory import EpisodeStep


@dataclass(frozen=True)
class EnvironmentTime:
    """Seconds of environments and of the engine."""

    stepped_s: float
    """Sum of all resets and steps."""
    busy_s: float
    """Seconds in which at least one environment was reset or stepped."""
    hidden_s: float
    """Those of `busy_s` in which at least one turn was generated as well."""
    generated_s: float
    """Seconds in which at least one turn was generated."""

    @property
    def hidden_fraction(self) -> float | None:
        """Share of `busy_s` in which turns were generated; None: no environment stepped."""
        return self.hidden_s / self.busy_s if self.busy_s > 0 else None


def environment_time(steps: Iterable[EpisodeStep]) -> EnvironmentTime | None:
    """Add the steps of episodes up; None: no environment is among them.

    Args:
        steps: steps of any number of episodes, in any order.
    """
    turns, stepped = [], []
    for step in steps:
        if step.kind == "generate":
            turns.append((step.started, step.finished))
        elif step.kind == "environment":
            stepped.append((step.started, step.finished))
    if not stepped:
        return None
    first = min(start for start, _ in [*turns, *stepped])
    last = max(end for _, end in [*turns, *stepped])
    busy, generated = covered(stepped, first, last), covered(turns, first, last)
    return EnvironmentTime(
        stepped_s=sum(end - start for start, end in stepped),
        busy_s=busy,
        hidden_s=busy + generated - covered([*turns, *stepped], first, last),  # of two sets: what both have
        generated_s=generated,
    )
