"""How much of the time of environments is hidden behind generation, from the steps of a batch's episodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from streamrl.controller.step_times import Span, covered
from streamrl.rollouts.trajectory import EpisodeStep


@dataclass(frozen=True)
class EnvironmentTime:
    """Seconds of environments and of the engine."""

    stepped_s: float
    """Sum of all resets and steps, without what their own episode's turns took meanwhile."""
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


def environment_time(episodes: Iterable[Sequence[EpisodeStep]]) -> EnvironmentTime | None:
    """Add the steps of episodes up; None: no environment is among them.

    An environment that plays a whole episode calls the model itself: it waits while its own turns are generated.

    Args:
        episodes: steps of each episode, in any order.
    """
    turns: list[Span] = []
    stepped: list[Span] = []
    for steps in episodes:
        own = [(step.started, step.finished) for step in steps if step.kind == "generate"]
        turns += own
        for step in steps:
            if step.kind == "environment":
                stepped += without((step.started, step.finished), own)
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


def without(span: Span, others: Iterable[Span]) -> list[Span]:
    """Return the parts of an interval that no other one covers; itself, if it is empty."""
    start, end = span
    if start == end:
        return [span]
    parts = []
    for begin, finish in sorted(others):
        if begin >= end:
            break
        if finish <= start:
            continue
        if begin > start:
            parts.append((start, begin))
        start = finish
    return [*parts, (start, end)] if start < end else parts
