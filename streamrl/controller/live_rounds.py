"""The rounds of a live run (`scheduler/schedule/rounds.py`): which groups are issued, deferred, continued, and when."""

from __future__ import annotations

from collections import defaultdict

from scheduler.schedule.rounds import PartialRollouts, Round, Rounds, TailBatching
from streamrl.config.run import RunConfig
from streamrl.config.schedule import PartialRolloutsConfig, TailBatchingConfig
from streamrl.controller.group_pool import GroupPool


class LiveRounds:
    """Tells the planner of rounds what becomes of samples; it thinks in groups."""

    def __init__(self, planner: Rounds, pool: GroupPool) -> None:
        self.planner, self.pool = planner, pool
        self.version = -1
        """Under which the newest round has begun."""
        self.number = 0
        """Of the newest round; a service tells with it which round a sample was parked in."""
        self.put_off = 0
        """Samples put off since `count_put_off` was last called."""
        self._parked: defaultdict[str, set[str]] = defaultdict(set)
        """Samples that have used up their budget in this round, by group."""
        self._off: set[str] = set()
        """Groups that are put off."""

    def may_begin(self, version: int, step: int) -> bool:
        """Whether the next round is to begin: that of new weights, or another under the same ones."""
        return self.planner.round is None and (self.planner.again or self.version < version == step)

    def begin(self, version: int) -> Round:
        """Begins it."""
        self.version = version
        self.number += 1
        self._parked.clear()
        begun = self.planner.begin(version)
        self._off.difference_update(begun.resumed)
        return begun

    def parked(self, sample_id: str, group_id: str, number: int) -> None:
        """A sample has used up its budget in a round; of a round that has ended meanwhile this is no news."""
        if number == self.number:
            self._parked[group_id].add(sample_id)
            self.finished(group_id)

    def finished(self, group_id: str) -> None:
        """A sample of a group has come: its siblings may all be parked."""
        if self.planner.round is None:
            return
        missing = self.pool.missing(group_id)
        if missing and len(self._parked[group_id]) == missing:
            self.planner.parked(group_id)

    def may_train(self, step: int, whole_batches: bool) -> bool:
        """Whether training may take complete groups now: its round has begun, and has ended if whole batches are
        wanted."""
        return self.version == step and not (whole_batches and self.planner.round is not None)

    def end_if_over(self) -> list[str]:
        """Ends the round if it is over; groups whose samples have to be parked."""
        if not self.planner.over:
            return []
        groups = self.planner.end()
        self.put_off += sum(self.pool.missing(group_id) for group_id in groups)
        self._off.update(groups)
        self._parked.clear()
        return groups

    @property
    def resting(self) -> int:
        """Samples that are not finished and that no instance works on: nobody waits for them now."""
        off = sum(self.pool.missing(group_id) for group_id in self._off)
        return off + sum(min(len(some), self.pool.missing(name)) for name, some in self._parked.items())

    def resting_samples(self) -> list[str]:
        """Those samples."""
        used_up = [sample_id for some in self._parked.values() for sample_id in some]
        return [*self.pool.unfinished(self._off), *used_up]

    def count_put_off(self) -> int:
        """Samples put off since the last call."""
        count, self.put_off = self.put_off, 0
        return count


def make_rounds(run: RunConfig, pool: GroupPool) -> LiveRounds | None:
    """What the run file asks for; None: groups are issued by the schedule alone."""
    batch = run.batch.prompts_per_step
    match run.schedule.rounds:
        case TailBatchingConfig(over_issue=factor, max_age=age):
            return LiveRounds(TailBatching(batch, factor, age), pool)
        case PartialRolloutsConfig(round_tokens=tokens, over_issue=factor, max_age=age):
            return LiveRounds(PartialRollouts(batch, tokens, factor, age), pool)
    return None
