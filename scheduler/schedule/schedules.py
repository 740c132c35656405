"""Schedules: when generation may issue groups and when training may take them. Pure objects.

The live controller and the simulator (`pipeline.py`) use the same objects. A batch is `batch` groups, trained in one
optimizer step; version v of the weights is that after v steps, and every `sync_every`-th is published. With eta the
bound on staleness (steps between a group's policy version at issue and the weights that train on it), all schedules
admit the next group, the `issued`-th (from 0), under

    floor(issued / batch) <= version + eta,

so new work waits and nothing is dropped. On-policy schedules have eta = sync_every - 1: a group issued under one
version is trained before the next one is published. `one_step_off` has eta = 1.

Admission alone does not bound the staleness of a group that others overtake: training takes complete groups as they
come. A group with version v at issue must be taken in step v + eta at the latest. So a complete group is taken out of
turn only while every group that is due earlier still fits: those due in the steps n .. m (n the current one) into the
(m - n + 1) batch - taken places that these steps have left. Admission keeps this true: all groups issued so far are
due in a step m >= version + eta at the latest, and there are at most (m + 1) batch of them. The group that is due first
may always be taken, so training may wait but never deadlocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class ScheduleState(NamedTuple):
    """State on which a schedule decides. Groups that were dropped (dynamic sampling) count nowhere.

    A tuple, since a simulation makes one per question, and a frozen dataclass takes five times as long to make.
    """

    batch: int
    """Groups per optimizer step."""
    issued: int
    """Groups issued so far."""
    generated: int
    """Groups in which every sample has ended."""
    version: int
    """Newest version that all of generation has."""
    step: int
    """Optimizer steps done, which is the trainer's version."""
    taken: int
    """Groups of the current step that are trained or being trained."""
    complete: int
    """Groups with all rewards that no step has taken."""
    due: tuple[int, ...]
    """[max_staleness] groups issued and not taken that must be taken within the next 1, 2, .. steps, counting the
    current one; see `due_within`.
    """
    steps: int
    """Optimizer steps of the whole run."""


def due_within(by_version: Mapping[int, int], step: int, max_staleness: int) -> tuple[int, ...]:
    """Compute `ScheduleState.due` from the number of groups not yet taken, by their version at issue."""
    return tuple(
        sum(count for version, count in by_version.items() if version + max_staleness - step <= ahead)
        for ahead in range(max_staleness)
    )


@dataclass(frozen=True)
class Schedule:
    """One schedule, created by name with `make_schedule`."""

    name: str
    max_staleness: int
    whole_batches: bool
    """Whether training waits until all groups that it may train before the next publication are complete, instead of
    starting with the first ones.
    """
    issue_barrier: bool
    """Whether the groups of one publication are issued only after all earlier ones are generated."""
    sync_every: int = 1
    """Optimizer steps between publications."""
    exclusive: bool = False
    """Whether generation and training share their devices: while one computes, the other must not."""

    def may_issue(self, state: ScheduleState) -> bool:
        """Return whether the next group may be issued now."""
        if state.issued >= state.steps * state.batch:
            return False
        if (
            self.issue_barrier
            and state.issued % (self.sync_every * state.batch) == 0
            and state.generated < state.issued
        ):
            return False
        version = state.version
        if self.issue_barrier:
            # in a run that was resumed between two publications, later groups wait for the next publication's weights
            version -= version % self.sync_every
        return state.issued // state.batch <= version + self.max_staleness

    def may_take(self, state: ScheduleState, issue_version: int) -> bool:
        """Return whether training may take a complete group into the current step.

        Args:
            state: the current state.
            issue_version: the group's policy version at issue.
        """
        room = state.batch - state.taken
        if room <= 0 or (self.whole_batches and state.complete < self._to_publication(state)):
            return False
        # below 0 if the run has changed to a schedule with a smaller bound: such a group may always be taken
        steps_left = max(0, issue_version + self.max_staleness - state.step)
        return all(due < ahead * state.batch + room for ahead, due in enumerate(state.due[:steps_left]))

    def publishes(self, step: int, steps: int) -> bool:
        """Return whether the weights after `step` of `steps` optimizer steps go to generation."""
        return step % self.sync_every == 0 or step == steps

    def _to_publication(self, state: ScheduleState) -> int:
        """Return how many groups remain to be trained before the next publication."""
        publication = min((state.step // self.sync_every + 1) * self.sync_every, state.steps)
        return (publication - state.step) * state.batch - state.taken


@dataclass(frozen=True)
class ScheduleKind:
    """What all schedules of one name have in common: all that a run file's model of them is made from."""

    summary: str
    """The schedule, for users: a sentence that begins with its name."""
    whole_batches: bool = False
    """See `Schedule`."""
    overlaps: bool = False
    """Whether generation continues while the trainer computes a step and its weights are sent."""
    continuous: bool = False
    """Whether groups are issued without waiting for a batch to end, so instances never run out of work."""
    exclusive: bool = False
    """See `Schedule`."""

    @property
    def barrier(self) -> bool:
        """Whether generation waits for each publication, so that samples are on-policy up to `sync_every`."""
        return not self.overlaps


KINDS = {
    "colocated": ScheduleKind(
        "Colocated: generation and training take turns on the same devices, under a lock.",
        whole_batches=True,
        exclusive=True,
    ),
    "sync": ScheduleKind("Sync: training starts when the whole batch is finished.", whole_batches=True),
    "stream": ScheduleKind("Stream: the trainer works on groups as they complete, with one optimizer step per batch."),
    "one_step_off": ScheduleKind(
        "One-step-off: trains on the last batch while the next one is generated, with one step of staleness.",
        whole_batches=True,
        overlaps=True,
    ),
    "async": ScheduleKind(
        "Async: generation and training overlap fully; prompts wait while their samples would become too stale.",
        overlaps=True,
        continuous=True,
    ),
}
"""All schedules by name; run files, `streamrl simulate`, `streamrl plan` and `auto` choose among them."""
NAMES = tuple(KINDS)
SEPARATE = tuple(sorted(name for name, kind in KINDS.items() if not kind.exclusive))
"""Names of the schedules whose generation and training have devices of their own."""


def make_schedule(name: str, max_staleness: int | None = None, sync_every: int = 1) -> Schedule:
    """Create a schedule by name.

    Args:
        name: one of `NAMES`.
        max_staleness: bound of `async`, by default 1; the others set their own.
        sync_every: optimizer steps between publications of weights.

    Raises:
        ValueError: the name is unknown, or the schedule does not support the bounds.
    """
    if name not in NAMES:
        raise ValueError(f"unknown schedule {name!r}; known: {', '.join(NAMES)}")
    if sync_every < 1:
        raise ValueError(f"weights are published every 1 or more steps, not every {sync_every}")
    kind = KINDS[name]
    if kind.continuous:
        bound = 1 if max_staleness is None else max_staleness
        if bound < 1:
            raise ValueError(f"{name} needs a staleness of 1 or more, got {bound}; use `stream` for 0")
        if sync_every > bound + 1:
            raise ValueError(f"weights every {sync_every} steps need a staleness of {sync_every - 1}, got {bound}")
    else:
        if kind.overlaps and sync_every != 1:
            raise ValueError(f"{name} publishes after every step, not every {sync_every}; use async for that")
        bound = 1 if kind.overlaps else sync_every - 1
        if max_staleness not in (None, bound):
            raise ValueError(f"{name} has a staleness of {bound}; only async takes a bound")
    return Schedule(name, bound, kind.whole_batches, not kind.continuous, sync_every, kind.exclusive)
