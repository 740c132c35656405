"""The rounds of a live run: which groups are issued, deferred and continued, and when.

`scheduler/schedule/rounds.py` plans them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from scheduler.schedule.rounds import PartialRollouts, Round, Rounds, TailBatching, taking
from scheduler.schedule.schedules import Schedule
from streamrl.config.run import RunConfig
from streamrl.config.schedule import PartialRolloutsConfig, TailBatchingConfig
from streamrl.controller.group_pool import GroupPool


class NoRounds:
    """Stand-in for a run without rounds, where the schedule alone decides: no round ever begins."""

    active = False
    number = 0
    resting = 0
    budget: int | None = None

    def taking(self, schedule: Schedule) -> Schedule:
        """Return the schedule that decides which complete groups may be trained."""
        return schedule

    def may_begin(self, version: int, step: int) -> bool:
        """Return whether the next round may begin: the first under new weights, or another under the same weights."""
        return False

    def begin(self, version: int) -> Round:
        """Begin the next round, which `may_begin` must have allowed."""
        raise RuntimeError("this run has no rounds")

    def end_if_over(self) -> list[str]:
        """End the round if it is over; return the deferred groups, whose samples have to be parked."""
        return []

    def may_train(self, step: int, whole_batches: bool) -> bool:
        """Return whether training may take complete groups now.

        The round of the current version must have begun, and have ended if the schedule trains whole batches.
        """
        return True

    def started(self, group_ids: Iterable[str]) -> None:
        """Report the groups of the round that has just begun."""

    def taken(self, group_id: str) -> None:
        """Report that a step has taken a group."""

    def completed(self, group_id: str) -> None:
        """Report that a group has all its rewards."""

    def dropped(self, group_id: str) -> None:
        """Report that another group will replace this one."""

    def finished(self, group_id: str) -> None:
        """Report the group as parked if generation works on none of its samples any more."""

    def parked(self, sample_id: str, group_id: str, number: int) -> None:
        """Record that a sample has used up its token budget; a no-op if its group is not of the current round."""

    def resting_samples(self) -> list[str]:
        """Return the ids of the resting samples."""
        return []

    def count_deferred(self) -> int:
        """Return the number of samples deferred since the last call."""
        return 0


class LiveRounds(NoRounds):
    """Rounds of a live run: translate the events of samples into those of groups, which the planner works on."""

    active = True

    def __init__(self, planner: Rounds, pool: GroupPool) -> None:
        self.planner, self.pool = planner, pool
        self.version = -1
        """Weight version that was served when the newest round began."""
        self.number = 0
        """Number of the newest round; a service reports it with each sample that it parks."""
        self.deferred = 0
        """Number of samples deferred since the last call of `count_deferred`."""
        self._parked: defaultdict[str, set[str]] = defaultdict(set)
        """Samples that have used up their token budget in this round, by group."""
        self._deferred_groups: set[str] = set()

    @property
    def budget(self) -> int | None:  # type: ignore[override]
        """Tokens after which samples of the current round are parked; None if they never are, or between rounds."""
        return self.planner.round.budget if self.planner.round is not None else None

    def taking(self, schedule: Schedule) -> Schedule:
        return taking(schedule, self.planner)

    def started(self, group_ids: Iterable[str]) -> None:
        self.planner.started(group_ids)

    def taken(self, group_id: str) -> None:
        self.planner.taken(group_id)

    def completed(self, group_id: str) -> None:
        self.planner.completed(group_id)

    def dropped(self, group_id: str) -> None:
        self.planner.dropped(group_id)

    def may_begin(self, version: int, step: int) -> bool:
        return self.planner.round is None and (self.planner.again or self.version < version == step)

    def begin(self, version: int) -> Round:
        self.version = version
        self.number += 1
        self._parked.clear()
        begun = self.planner.begin(version)
        self._deferred_groups.difference_update(begun.resumed)
        return begun

    def parked(self, sample_id: str, group_id: str, number: int) -> None:
        if number == self.number and self.planner.works_on(group_id):
            self._parked[group_id].add(sample_id)
            self.finished(group_id)

    def finished(self, group_id: str) -> None:
        if self.planner.round is None:
            return
        missing = self.pool.missing(group_id)
        if missing and len(self._parked[group_id]) == missing:
            self.planner.parked(group_id)

    def may_train(self, step: int, whole_batches: bool) -> bool:
        return self.version == step and not (whole_batches and self.planner.round is not None)

    def end_if_over(self) -> list[str]:
        if not self.planner.over:
            return []
        groups = self.planner.end()
        self.deferred += sum(self.pool.missing(group_id) for group_id in groups)
        self._deferred_groups.update(groups)
        self._parked.clear()
        return groups

    @property
    def resting(self) -> int:  # type: ignore[override]
        """Number of unfinished samples that no instance works on; the controller does not wait for them now."""
        off = sum(self.pool.missing(group_id) for group_id in self._deferred_groups)
        return off + sum(min(len(some), self.pool.missing(name)) for name, some in self._parked.items())

    def resting_samples(self) -> list[str]:
        used_up = [sample_id for some in self._parked.values() for sample_id in some]
        return [*self.pool.unfinished(self._deferred_groups), *used_up]

    def count_deferred(self) -> int:
        count, self.deferred = self.deferred, 0
        return count


def make_rounds(run: RunConfig, pool: GroupPool) -> NoRounds:
    """Make the rounds of the run file; `NoRounds` if groups are issued by the schedule alone."""
    batch = run.batch.prompts_per_step
    match run.schedule.rounds:
        case TailBatchingConfig(over_issue=factor, max_age=age):
            return LiveRounds(TailBatching(batch, factor, age), pool)
        case PartialRolloutsConfig(round_tokens=tokens, over_issue=factor, max_age=age):
            return LiveRounds(PartialRollouts(batch, tokens, factor, age), pool)
    return NoRounds()
