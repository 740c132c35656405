"""Groups that were issued and that no optimizer step has taken: where samples and rewards come together. Pure.

    issue -> (finish, score of each sample) -> complete -> take     (dynamic sampling: drop instead of take)

Groups wait in the order in which they are due: those issued under the oldest weights first, among them those that were
complete first.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler.schedule.schedules import ScheduleState, due_within
from streamrl.controller.group_source import sample_ids
from streamrl.rollouts.types import Group, Sample, Scored


@dataclass
class GroupPool:
    """See the module's text."""

    batch: int
    """Groups of an optimizer step."""
    steps: int
    """Optimizer steps of the run."""
    groups: dict[str, Group] = field(default_factory=dict)
    """Issued and not taken, by group id, in the order of issue."""
    received: dict[str, tuple[Sample, float]] = field(default_factory=dict)
    """Finished samples that wait for their reward, with the time of their arrival."""
    issued: int = 0
    """Groups issued since the run's start, less those dropped."""
    generated: int = 0
    """Groups of which every sample has ended, likewise."""
    _missing: dict[str, int] = field(default_factory=dict)
    """Samples that each group still waits for from generation."""
    _complete: list[tuple[int, int, str]] = field(default_factory=list)
    """Heap of (issued under, order of completion, group)."""
    _order: itertools.count[int] = field(default_factory=itertools.count)

    def resume_at(self, step: int) -> None:
        """A resumed run: so many steps are trained, and nothing is open."""
        self.issued = self.generated = step * self.batch

    def issue(self, groups: Iterable[Group], version: int) -> None:
        """Groups go out to generation while every instance serves `version` or newer."""
        for group in groups:
            group.issued_under = version
            self.groups[group.group_id] = group
            self._missing[group.group_id] = group.size
            self.issued += 1

    def finish(self, sample: Sample, now: float) -> Group:
        """A sample has arrived and is committed.

        Raises:
            KeyError: its group is not open.
        """
        group = self.groups[sample.group_id]
        self.received[sample.sample_id] = (sample, now)
        self._missing[group.group_id] -= 1
        self.generated += self._missing[group.group_id] == 0
        return group

    def score(self, sample_id: str, reward: float, error: str | None) -> tuple[Scored, Group]:
        """A reward has arrived; with the last one of a group it is complete.

        Raises:
            KeyError: no such sample waits for a reward.
        """
        sample, received_at = self.received.pop(sample_id)
        group = self.groups[sample.group_id]
        group.scored[sample_id] = scored = Scored(sample, reward, error, received_at)
        if group.complete:
            heapq.heappush(self._complete, (group.issued_under, next(self._order), group.group_id))
        return scored, group

    @property
    def complete(self) -> int:
        """Groups with all rewards."""
        return len(self._complete)

    @property
    def waiting(self) -> list[Group]:
        """Groups with all rewards, in the order in which they are due."""
        return [self.groups[group_id] for _, _, group_id in sorted(self._complete)]

    @property
    def running(self) -> int:
        """Samples that generation has not ended."""
        return sum(self._missing.values())

    def missing(self, group_id: str) -> int:
        """Samples of a group that generation has not ended; 0 also for one that is not open."""
        return self._missing.get(group_id, 0)

    def unfinished(self, group_ids: Iterable[str]) -> list[str]:
        """Samples of these groups that generation has not ended; groups that are not open have none."""
        groups = [self.groups[group_id] for group_id in group_ids if group_id in self.groups]
        return [
            sample_id
            for group in groups
            for sample_id in sample_ids(group)
            if sample_id not in group.scored and sample_id not in self.received
        ]

    def first(self) -> Group | None:
        """The complete group that is due first."""
        return self.groups[self._complete[0][2]] if self._complete else None

    def take(self) -> Group:
        """Removes and returns `first`."""
        _, _, group_id = heapq.heappop(self._complete)
        del self._missing[group_id]
        return self.groups.pop(group_id)

    def drop(self, group_id: str) -> Group:
        """Removes a complete group, as if it had never been issued: another may be issued in its place."""
        self._complete = [entry for entry in self._complete if entry[2] != group_id]
        heapq.heapify(self._complete)
        self.issued -= 1
        self.generated -= 1
        del self._missing[group_id]
        return self.groups.pop(group_id)

    def state(self, version: int, step: int, taken: int, max_staleness: int) -> ScheduleState:
        """What a schedule is told.

        Args:
            version: newest weights that every instance serves.
            step: optimizer steps done.
            taken: groups that the step under way has.
            max_staleness: the schedule's.
        """
        return ScheduleState(
            batch=self.batch,
            issued=self.issued,
            generated=self.generated,
            version=version,
            step=step,
            taken=taken,
            complete=self.complete,
            due=due_within((group.issued_under for group in self.groups.values()), step, max_staleness),
            steps=self.steps,
        )
