"""Rounds that do not wait for their stragglers: tail batching and partial rollouts.

Both issue groups in rounds. Groups that are unfinished when a round is over are deferred with the tokens that they
have, and continue in a later round. Nothing is dropped before the run ends: training sees every length, the long ones
later and, since tokens are kept, from more than one weight version. What is deferred at the end is not trained.

`TailBatching`: a regular round issues more groups than a batch needs and ends as soon as enough are complete; when a
whole batch has been deferred, a tail round continues exactly these and waits for all. Source of the idea: RollPacker
(arXiv 2509.21009), which regenerates deferred groups from the start.

`PartialRollouts`: a sample may produce `round_tokens` per round and is then parked; every round resumes all parked
samples and adds new groups. Sources: Kimi k1.5 (arXiv 2501.12599, partial rollouts), APRIL (arXiv 2509.18521, which
over-issues and recycles what is unfinished).

A round is over when as many groups are complete as the current step lacks, or when none of its groups can continue: all
are parked or dropped. In the second case (`again`) the next round begins at once, under the same weights.

Age: with `max_age` no group is trained more than so many steps after its policy version at issue. It is the
schedules' rule (`schedules.py`): new groups are limited to what (max_age + 1) batches hold, and a round resumes, and
waits for, the groups that are due first and that later steps have no room for. Training must do its part:
complete groups are taken by (version at issue, completion), where `taking(schedule, rounds)` allows it.

The objects only decide; they have no clock and do no I/O. A caller starts the groups of a `Round`, reports their
progress, and withdraws what is unfinished when the round is over:

    planner = TailBatching(batch=32, over_issue=1.25)
    current = planner.begin(version=0)         # 40 new groups, over when 32 are complete
    planner.started(new_ids)                   # the caller's names for the 40
    planner.completed(group_id)  ...  planner.over
    planner.end()                              # returns the 8 that are deferred
    planner.taken(group_id)  ...               # as training takes them: 32 until the next version
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from scheduler.schedule.schedules import Schedule, due_within


@dataclass(frozen=True)
class Round:
    """Groups that one round generates."""

    new: int
    """Number of new groups to issue."""
    resumed: tuple[str, ...]
    """Groups to continue, from the tokens that they have."""
    needed: int
    """Number of complete groups (those that are due included) at which the round is over."""
    budget: int | None = None
    """New tokens that each sample may produce in this round; None: unlimited."""


class Rounds(ABC):
    """What both kinds of rounds share: the state of every group, and which groups are due; see the module."""

    def __init__(self, batch: int, over_issue: float, max_age: int | None) -> None:
        if batch < 1 or not 1 <= over_issue < math.inf:
            raise ValueError(f"rounds need a batch and an over-issue factor of 1 or more: {batch}, {over_issue}")
        if max_age is not None and max_age < 0:
            raise ValueError(f"the age bound of rounds must not be negative, got {max_age}")
        self.batch, self.over_issue, self.max_age = batch, over_issue, max_age
        self.deferred: list[str] = []
        """Deferred groups, in the order in which they were deferred."""
        self.round: Round | None = None
        """The current round."""
        self.again = False
        """Whether the last round ended without what its step needs, so that another begins under the same weights."""
        self._version_at_issue: dict[str, int] = {}
        """Policy version at issue of every group that training has not taken, in order of issue."""
        self._complete: set[str] = set()
        self._open: dict[str, None] = {}  # an ordered set
        self._parked: set[str] = set()
        self._awaited: set[str] = set()
        """Groups of the round that its step must train."""
        self._version = -1
        self._done = 0
        """Groups completed since the round began."""
        self._room = batch
        """Groups that the current step still lacks."""

    def begin(self, version: int) -> Round:
        """Begin the next round under these weights: those of the last step, or the same as before (`again`).

        Raises:
            RuntimeError: a round is in progress.
        """
        if self.round is not None:
            raise RuntimeError("a round is under way; end it before the next begins")
        if version != self._version:
            self._room = self.batch
        self._version, self._done, self.again = version, 0, False
        waiting = sorted(self.deferred, key=self._version_at_issue.__getitem__)
        due = self._due()
        needed = max(self._room - len(self._complete), due)
        limit = math.inf
        if self.max_age is not None:
            limit = max(0, self.max_age * self.batch + self._room - len(self._version_at_issue))
        self.round = self._plan(needed, waiting, due, limit)
        self._awaited = set(waiting[:due])
        self._open = dict.fromkeys(self.round.resumed)
        self.deferred = [group_id for group_id in self.deferred if group_id not in self._open]
        return self.round

    @abstractmethod
    def _plan(self, needed: int, waiting: list[str], due: int, limit: float) -> Round:
        """Return the next round.

        Args:
            needed: groups that the step lacks.
            waiting: deferred groups, in order of issue.
            due: number of them, from the first on, that must be in the round.
            limit: largest number of new groups.
        """

    def _due(self) -> int:
        """Return how many of the deferred groups, from the earliest issued on, the current step must train.

        These are the ones that the next steps have no room for.
        """
        if self.max_age is None:
            return 0
        within = due_within(Counter(self._version_at_issue.values()), self._version, self.max_age)
        must = max((count - ahead * self.batch for ahead, count in enumerate(within)), default=0)
        first = sorted(self._version_at_issue, key=self._version_at_issue.__getitem__)[: max(0, must)]
        return sum(group_id not in self._complete for group_id in first)

    def _more(self, wanted: float) -> int:
        """Return how many groups to issue where so many are wanted; a rounding error of the factor must not add one."""
        return math.ceil(wanted * self.over_issue - 1e-9)

    def started(self, group_ids: Iterable[str]) -> None:
        """Record the names of the round's new groups, as they are issued."""
        for group_id in group_ids:
            self._version_at_issue[group_id] = self._version
            self._open[group_id] = None

    def completed(self, group_id: str) -> None:
        """Record a group whose samples all have their rewards, also one that was deferred while these were in flight.

        Raises:
            KeyError: the group is neither of this round nor deferred.
        """
        self._leave(group_id)
        self._complete.add(group_id)
        self._done += 1

    def works_on(self, group_id: str) -> bool:
        """Return whether a group is of the current round, and not complete."""
        return group_id in self._open

    def parked(self, group_id: str) -> None:
        """Record a group whose unfinished samples have all used up their budget.

        Raises:
            KeyError: the group is not of this round.
        """
        if group_id not in self._open:
            raise KeyError(f"group {group_id!r} cannot be parked: it is not of this round")
        self._parked.add(group_id)

    def dropped(self, group_id: str) -> None:
        """Forget a group that, instead of being complete, will not be trained (dynamic sampling).

        Raises:
            KeyError: the group is neither of this round nor deferred.
        """
        self._leave(group_id)
        del self._version_at_issue[group_id]

    def _leave(self, group_id: str) -> None:
        """Remove a group from the round, or from the deferred groups."""
        if group_id in self._open:
            del self._open[group_id]
            self._parked.discard(group_id)
        elif group_id in self.deferred:
            self.deferred.remove(group_id)
        else:
            raise KeyError(f"group {group_id!r} is neither of this round nor put off")

    def taken(self, group_id: str) -> None:
        """Record that training has taken a complete group.

        Raises:
            KeyError: the group is not complete, or was taken before.
        """
        self._complete.remove(group_id)
        del self._version_at_issue[group_id]
        self._room -= 1

    @property
    def over(self) -> bool:
        """Whether the current round should be ended."""
        return self.round is not None and (self._enough or len(self._parked) == len(self._open))

    @property
    def _enough(self) -> bool:
        assert self.round is not None
        # training that takes groups during the round may have filled the step with others that are due
        return self._room == 0 or (self._done >= self.round.needed and self._awaited.isdisjoint(self._open))

    def end(self) -> list[str]:
        """End the round and return its unfinished groups, which the caller must withdraw, keeping their tokens.

        Raises:
            RuntimeError: the round is not over.
        """
        if not self.over:
            raise RuntimeError("the round is not over: groups that it needs are not complete")
        self.again = not self._enough
        unfinished = list(self._open)
        self.deferred += unfinished
        self._open, self._parked, self.round = {}, set(), None
        return unfinished


class TailBatching(Rounds):
    """Rounds that over-issue groups, defer the slowest, and generate a whole batch of deferred ones in a tail round."""

    def __init__(self, batch: int, over_issue: float = 1.25, max_age: int | None = None) -> None:
        """Create rounds without groups.

        Args:
            batch: groups that are trained together.
            over_issue: ratio of the groups that a regular round issues to those that it needs.
            max_age: largest number of steps from a group's policy version at issue to the weights that train on it;
                None: no limit.

        Raises:
            ValueError: the batch is empty, fewer groups than a batch would be issued, or the age is negative.
        """
        super().__init__(batch, over_issue, max_age)

    def _plan(self, needed: int, waiting: list[str], due: int, limit: float) -> Round:
        if needed == 0:
            return Round(0, (), 0)
        if len(waiting) >= self.batch:
            return Round(0, tuple(waiting[:needed]), needed)
        new = int(min(self._more(needed - due), limit))
        resumed = tuple(waiting[: max(due, needed - new)])
        return Round(new, resumed, needed)


class PartialRollouts(Rounds):
    """Rounds in which each sample may produce a limited number of tokens and is then parked for the next round."""

    def __init__(self, batch: int, round_tokens: int, over_issue: float = 1.0, max_age: int | None = None) -> None:
        """Create rounds without groups.

        Args:
            batch: groups that are trained together.
            round_tokens: tokens that a sample may produce in a round.
            over_issue: ratio of the groups that are open when a round begins to those of a batch.
            max_age: see `TailBatching`.

        Raises:
            ValueError: the batch or the budget is empty, fewer groups than a batch would be open, or the age is
                negative.
        """
        super().__init__(batch, over_issue, max_age)
        if round_tokens < 1:
            raise ValueError(f"a round needs a budget of 1 token or more per sample, got {round_tokens}")
        self.round_tokens = round_tokens

    def _plan(self, needed: int, waiting: list[str], due: int, limit: float) -> Round:
        if needed == 0:
            return Round(0, (), 0, self.round_tokens)
        new = int(min(max(0, self._more(self.batch) - len(waiting)), limit))
        return Round(new, tuple(waiting), needed, self.round_tokens)


def taking(schedule: Schedule, rounds: Rounds) -> Schedule:
    """Return the schedule that decides which complete groups training may take.

    The age bound of the rounds, if any, replaces the schedule's own; compute `due` with its `max_staleness`.
    """
    return schedule if rounds.max_age is None else replace(schedule, max_staleness=rounds.max_age)
