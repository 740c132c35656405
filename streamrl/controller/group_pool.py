"""The pool of groups that were issued and that no optimizer step has taken yet. Pure: no I/O and no clock.

    issue -> (finish, score of each sample) -> complete -> take     (a group that is replaced: drop instead of take)

Complete groups wait in the order in which they are due: those with the oldest policy version at issue first, and among
them those that were complete first.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler.schedule.schedules import ScheduleState, due_within
from streamrl.controller.group_source import sample_ids
from streamrl.rollouts.types import Group, Sample, Scored
from streamrl.rollouts.void import Void


@dataclass
class GroupPool:
    """Groups between issue and training, with the samples and rewards that they still miss."""

    batch: int
    """Number of groups of an optimizer step."""
    steps: int
    """Number of optimizer steps of the run."""
    groups: dict[str, Group] = field(default_factory=dict)
    """Groups issued and not taken, by id, in the order of issue."""
    received: dict[str, tuple[Sample, float]] = field(default_factory=dict)
    """Finished samples that wait for their reward, by id, with their time of arrival."""
    issued: int = 0
    """Number of groups issued since the run's start, less those dropped."""
    generated: int = 0
    """Number of groups whose samples have all finished, less those dropped."""
    _missing: dict[str, int] = field(default_factory=dict)
    """Number of samples that generation still owes, by group."""
    _complete: list[tuple[int, int, str]] = field(default_factory=list)
    """Heap of (policy version at issue, order of completion, group id)."""
    _order: itertools.count[int] = field(default_factory=itertools.count)

    def resume_at(self, step: int) -> None:
        """Begin a resumed run after `step` trained steps, with no open group."""
        self.issued = self.generated = step * self.batch

    def issue(self, groups: Iterable[Group], version: int) -> None:
        """Enter groups that are issued now, while every instance serves `version` or a newer one."""
        for group in groups:
            group.issue_version = version
            self.groups[group.group_id] = group
            self._missing[group.group_id] = group.size
            self.issued += 1

    def finish(self, sample: Sample, now: float) -> Group:
        """Record a finished sample, which the ledger has committed; return its group.

        Raises:
            KeyError: its group is not in the pool.
        """
        group = self.groups[sample.group_id]
        self.received[sample.sample_id] = (sample, now)
        self._missing[group.group_id] -= 1
        self.generated += self._missing[group.group_id] == 0
        return group

    def score(self, sample_id: str, reward: float | None, void: Void | None) -> tuple[Scored, Group]:
        """Record a sample's reward, or why it is void; the last one of a group completes it.

        Raises:
            KeyError: no such sample waits for a reward.
        """
        sample, received_at = self.received.pop(sample_id)
        group = self.groups[sample.group_id]
        group.scored[sample_id] = scored = Scored(sample, reward, void, received_at)
        if group.complete:
            heapq.heappush(self._complete, (group.issue_version, next(self._order), group.group_id))
        return scored, group

    @property
    def complete(self) -> int:
        """Number of groups that have all their rewards."""
        return len(self._complete)

    @property
    def waiting(self) -> list[Group]:
        """Groups that have all their rewards, in the order in which they are due."""
        return [self.groups[group_id] for _, _, group_id in sorted(self._complete)]

    @property
    def running(self) -> int:
        """Number of samples that generation has not finished."""
        return sum(self._missing.values())

    def missing(self, group_id: str) -> int:
        """Return the number of samples of a group that generation has not finished; 0 also for unknown groups."""
        return self._missing.get(group_id, 0)

    def unfinished(self, group_ids: Iterable[str]) -> list[str]:
        """Return the ids of the samples of these groups that generation has not finished; unknown groups have none."""
        groups = [self.groups[group_id] for group_id in group_ids if group_id in self.groups]
        return [
            sample_id
            for group in groups
            for sample_id in sample_ids(group)
            if sample_id not in group.scored and sample_id not in self.received
        ]

    def first(self) -> Group | None:
        """Return the complete group that is due first; None: there is none."""
        return self.groups[self._complete[0][2]] if self._complete else None

    def take(self) -> Group:
        """Remove and return the complete group that is due first."""
        _, _, group_id = heapq.heappop(self._complete)
        del self._missing[group_id]
        return self.groups.pop(group_id)

    def drop(self, group_id: str) -> Group:
        """Remove a complete group as if it had never been issued, so that another one may be issued in its place."""
        self._complete = [entry for entry in self._complete if entry[2] != group_id]
        heapq.heapify(self._complete)
        self.issued -= 1
        self.generated -= 1
        del self._missing[group_id]
        return self.groups.pop(group_id)

    def state(self, version: int, step: int, taken: int, max_staleness: int) -> ScheduleState:
        """Return the state that a schedule decides on.

        Args:
            version: newest version that every instance serves.
            step: number of optimizer steps done.
            taken: number of groups that the current step has taken.
            max_staleness: bound of the schedule, in versions.
        """
        return ScheduleState(
            batch=self.batch,
            issued=self.issued,
            generated=self.generated,
            version=version,
            step=step,
            taken=taken,
            complete=self.complete,
            due=due_within(Counter(group.issue_version for group in self.groups.values()), step, max_staleness),
            steps=self.steps,
        )
