"""Rounds that do not wait for their stragglers: tail batching and partial rollouts.

Both issue groups in rounds. What is unfinished when a round is over is put off with the tokens that it has, and goes on
in a later round. Nothing is dropped: training sees every length, the long ones later and, since tokens are kept, from
more than one weight version.

`TailBatching`: a regular round issues more groups than a batch needs and ends as soon as enough are complete; when a
whole batch has been put off, a tail round goes on with exactly these and waits for all. Source of the idea: RollPacker
(arXiv 2509.21009), which generates what it has put off again from the start.

`PartialRollouts`: a sample may produce `round_tokens` per round and is then parked; every round resumes all that is
parked and adds new groups. Sources: Kimi k1.5 (arXiv 2501.12599, partial rollouts), APRIL (arXiv 2509.18521, which
over-issues and recycles what is unfinished).

A round is over when as many groups are complete as the step under way lacks, or when nothing of it can go on: all is
parked or dropped. In the second case (`again`) the next round begins at once, under the same weights.

Age. With `max_age` no group is trained more than so many steps after the version that it was issued under. It is the
schedules' rule (`schedules.py`): new groups are limited to what (max_age + 1) batches hold, and a round resumes, and
waits for, the groups that are due first as far as the steps after this one have no place for them. Its other half is
training's: complete groups are taken by (issued under, completion), where `taking(schedule, rounds)` allows it.

The objects decide; they have no clock and do no I/O. A caller starts the groups of a `Round`, tells what becomes of
them, and withdraws what is unfinished when the round is over:

    planner = TailBatching(batch=32, over_issue=1.25)
    current = planner.begin(version=0)         # 40 new groups, over when 32 are complete
    planner.started(new_ids)                   # the caller's names for the 40
    planner.completed(group_id)  ...  planner.over
    planner.end()                              # the 8 that are put off
    planner.taken(group_id)  ...               # as training takes them: 32 until the next version
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from scheduler.schedule.schedules import Schedule, due_within


@dataclass(frozen=True)
class Round:
    """What is to be generated."""

    tail: bool
    """A round of groups that were put off only."""
    new: int
    """New groups to issue."""
    resumed: tuple[str, ...]
    """Groups to go on with, from the tokens that they have."""
    needed: int
    """The round is over when so many groups are complete (and those that are due)."""
    budget: int | None = None
    """New tokens that each sample may produce in this round; None: as many as it wants."""


class Rounds(Protocol):
    """What a controller and the simulator need of either kind."""

    @property
    def batch(self) -> int:
        """Groups of an optimizer step."""

    @property
    def max_age(self) -> int | None:
        """Most steps between the weights that a group is issued under and those that train on it; None: any."""

    @property
    def round(self) -> Round | None:
        """The round that is under way."""

    @property
    def again(self) -> bool:
        """The last round has ended without what its step needs: begin another under the same weights."""

    @property
    def over(self) -> bool:
        """Whether the round under way is to be ended."""

    def begin(self, version: int) -> Round:
        """The next round, under these weights: those of the last step, or the same again (`again`)."""

    def started(self, group_ids: Iterable[str]) -> None:
        """Names of the round's new groups, as they are issued."""

    def completed(self, group_id: str) -> None:
        """All samples of a group have their rewards."""

    def parked(self, group_id: str) -> None:
        """Every sample of a group that has not ended has used up its budget."""

    def dropped(self, group_id: str) -> None:
        """Instead of `completed`: a group will not be trained (dynamic sampling)."""

    def taken(self, group_id: str) -> None:
        """Training has taken a complete group."""

    def end(self) -> list[str]:
        """Ends the round: the groups that the caller has to withdraw, keeping their tokens."""


def taking(schedule: Schedule, rounds: Rounds) -> Schedule:
    """The schedule to ask, with `due` for its `max_staleness`, which complete group training may take: the age bound
    takes the place of the schedule's own."""
    return schedule if rounds.max_age is None else replace(schedule, max_staleness=rounds.max_age)


class _Bookkeeping(ABC):
    """What both kinds share: where every group is, and which are due."""

    def __init__(self, batch: int, over_issue: float, max_age: int | None) -> None:
        if batch < 1 or not 1 <= over_issue < math.inf:
            raise ValueError(f"rounds need a batch and an over-issue factor of 1 or more: {batch}, {over_issue}")
        if max_age is not None and max_age < 0:
            raise ValueError(f"the age bound of rounds must not be negative, got {max_age}")
        self.batch, self.over_issue, self.max_age = batch, over_issue, max_age
        self.put_off: list[str] = []
        """Groups that wait for a later round, in the order in which they were put off."""
        self.round: Round | None = None
        """The round that is under way."""
        self.again = False
        """See `Rounds`."""
        self._issued_under: dict[str, int] = {}
        """Version by group, of all that training has not taken, in order of issue."""
        self._complete: set[str] = set()
        self._open: dict[str, None] = {}  # sets in order
        self._parked: set[str] = set()
        self._awaited: set[str] = set()
        """Groups of the round that its step must train."""
        self._version = -1
        self._done = 0
        """Groups completed since the round began."""
        self._room = batch
        """Groups that the step under way still lacks."""

    def begin(self, version: int) -> Round:
        """See `Rounds`.

        Raises:
            RuntimeError: one is under way.
        """
        if self.round is not None:
            raise RuntimeError("a round is under way; end it before the next begins")
        if version != self._version:
            self._room = self.batch
        self._version, self._done, self.again = version, 0, False
        waiting = sorted(self.put_off, key=self._issued_under.__getitem__)
        due = self._due()
        needed = max(self._room - len(self._complete), due)
        limit = math.inf
        if self.max_age is not None:
            limit = max(0, self.max_age * self.batch + self._room - len(self._issued_under))
        self.round = self._plan(needed, waiting, due, limit)
        self._awaited = set(waiting[:due])
        self._open = dict.fromkeys(self.round.resumed)
        self.put_off = [group_id for group_id in self.put_off if group_id not in self._open]
        return self.round

    @abstractmethod
    def _plan(self, needed: int, waiting: list[str], due: int, limit: float) -> Round:
        """The round.

        Args:
            needed: groups that the step lacks.
            waiting: what is put off, by issue.
            due: the first so many of them must be in it.
            limit: most new groups.
        """

    def _due(self) -> int:
        """How many of the groups that are put off the step under way must train, the earliest issued ones: those that
        the next steps have no place for."""
        if self.max_age is None:
            return 0
        within = due_within(self._issued_under.values(), self._version, self.max_age)
        must = max((count - ahead * self.batch for ahead, count in enumerate(within)), default=0)
        first = sorted(self._issued_under, key=self._issued_under.__getitem__)[: max(0, must)]
        return sum(group_id not in self._complete for group_id in first)

    def _more(self, wanted: float) -> int:
        """Groups to issue where so many are wanted; no group more for a rounding error of the factor."""
        return math.ceil(wanted * self.over_issue - 1e-9)

    def started(self, group_ids: Iterable[str]) -> None:
        """See `Rounds`."""
        for group_id in group_ids:
            self._issued_under[group_id] = self._version
            self._open[group_id] = None

    def completed(self, group_id: str) -> None:
        """See `Rounds`; also of a group that was put off while its last rewards were on their way.

        Raises:
            KeyError: the group is neither of this round nor put off.
        """
        self._leave(group_id)
        self._complete.add(group_id)
        self._done += 1

    def parked(self, group_id: str) -> None:
        """See `Rounds`.

        Raises:
            KeyError: the group is not of this round.
        """
        if group_id not in self._open:
            raise KeyError(f"group {group_id!r} cannot be parked: it is not of this round")
        self._parked.add(group_id)

    def dropped(self, group_id: str) -> None:
        """See `Rounds`.

        Raises:
            KeyError: the group is neither of this round nor put off.
        """
        self._leave(group_id)
        del self._issued_under[group_id]

    def _leave(self, group_id: str) -> None:
        """Takes a group out of the round, or out of what is put off."""
        if group_id in self._open:
            del self._open[group_id]
            self._parked.discard(group_id)
        elif group_id in self.put_off:
            self.put_off.remove(group_id)
        else:
            raise KeyError(f"group {group_id!r} is neither of this round nor put off")

    def taken(self, group_id: str) -> None:
        """See `Rounds`.

        Raises:
            KeyError: the group is not complete, or was taken before.
        """
        self._complete.remove(group_id)
        del self._issued_under[group_id]
        self._room -= 1

    @property
    def over(self) -> bool:
        """See `Rounds`."""
        return self.round is not None and (self._enough or len(self._parked) == len(self._open))

    @property
    def _enough(self) -> bool:
        assert self.round is not None
        # training that takes groups while the round runs may have filled the step with others that are due
        return self._room == 0 or (self._done >= self.round.needed and self._awaited.isdisjoint(self._open))

    def end(self) -> list[str]:
        """See `Rounds`.

        Raises:
            RuntimeError: it is not over.
        """
        if not self.over:
            raise RuntimeError("the round is not over: groups that it needs are not complete")
        self.again = not self._enough
        unfinished = list(self._open)
        self.put_off += unfinished
        self._open, self._parked, self.round = {}, set(), None
        return unfinished


class TailBatching(_Bookkeeping):
    """See the module."""

    def __init__(self, batch: int, over_issue: float = 1.25, max_age: int | None = None) -> None:
        """
        Args:
            batch: groups that are trained together.
            over_issue: groups that a regular round issues, by those that it needs.
            max_age: see `Rounds`.

        Raises:
            ValueError: the batch is empty, fewer groups than a batch would be issued, or the age is negative.
        """
        super().__init__(batch, over_issue, max_age)

    def _plan(self, needed: int, waiting: list[str], due: int, limit: float) -> Round:
        if needed == 0:
            return Round(False, 0, (), 0)
        if len(waiting) >= self.batch:
            return Round(True, 0, tuple(waiting[:needed]), needed)
        new = int(min(self._more(needed - due), limit))
        resumed = tuple(waiting[: max(due, needed - new)])
        return Round(new == 0, new, resumed, needed)


class PartialRollouts(_Bookkeeping):
    """See the module."""

    def __init__(self, batch: int, round_tokens: int, over_issue: float = 1.0, max_age: int | None = None) -> None:
        """
        Args:
            batch: groups that are trained together.
            round_tokens: that a sample may produce in a round.
            over_issue: groups that are open when a round begins, by those of a batch.
            max_age: see `Rounds`.

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
            return Round(False, 0, (), 0, self.round_tokens)
        new = int(min(max(0, self._more(self.batch) - len(waiting)), limit))
        return Round(new == 0, new, tuple(waiting), needed, self.round_tokens)
