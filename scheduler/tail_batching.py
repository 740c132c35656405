"""Tail batching: rounds that do not wait for their stragglers, and rounds of stragglers only.

A regular round issues more groups than a batch needs and ends as soon as enough are complete. What is unfinished is
put off, with the tokens that it has; when a whole batch has come together, a tail round goes on with exactly these and
waits for all. So most rounds are short, and the long ones keep every instance busy. Nothing is dropped: training sees
every length, the long ones later and, since tokens are kept, from more than one weight version.

Source of the idea: RollPacker (arXiv 2509.21009), which also issues more samples per group, and generates what it
has put off again from the start.

The object decides; it has no clock and does no I/O. Its caller starts the groups of a `Round`, says which are complete,
and, when the round is over, withdraws the others:

    planner = TailBatching(batch=32, over_issue=1.25)
    current = planner.begin()                  # 40 new groups, over when 32 are complete
    planner.started(new_ids)                   # the caller's names for the 40
    planner.completed(group_id)  ...  planner.over
    planner.end()                              # the 8 that are put off
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


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
    """The round is over when so many groups are complete."""


class TailBatching:
    """See the module."""

    def __init__(self, batch: int, over_issue: float = 1.25) -> None:
        """
        Args:
            batch: groups that are trained together.
            over_issue: groups that a regular round issues, by those that it needs.

        Raises:
            ValueError: the batch is empty, or fewer groups than a batch would be issued.
        """
        if batch < 1 or not over_issue >= 1:
            raise ValueError(
                f"tail batching needs a batch and an over-issue factor of 1 or more: {batch}, {over_issue}"
            )
        self.batch, self.over_issue = batch, over_issue
        self.put_off: list[str] = []
        """Groups that wait for a tail round, oldest first."""
        self.round: Round | None = None
        """The round that is under way."""
        self._open: dict[str, None] = {}  # a set in order
        self._early: int = 0
        """Groups that were complete beyond what the last round needed; the next needs so many fewer."""
        self._complete = 0

    def begin(self) -> Round:
        """The next round.

        Raises:
            RuntimeError: one is under way.
        """
        if self.round is not None:
            raise RuntimeError("a round is under way; end it before the next begins")
        needed = max(0, self.batch - self._early)
        self._complete = 0
        if len(self.put_off) >= self.batch:
            resumed = tuple(self.put_off[:needed])
            del self.put_off[:needed]
            self.round = Round(True, 0, resumed, needed)
        else:
            self.round = Round(False, math.ceil(needed * self.over_issue), (), needed)
        self._early -= self.batch - needed
        self._open = dict.fromkeys(self.round.resumed)
        return self.round

    def started(self, group_ids: Iterable[str]) -> None:
        """Names of the round's new groups, as they are issued."""
        self._open.update(dict.fromkeys(group_ids))

    def completed(self, group_id: str) -> None:
        """All samples of a group are there: of the round's, or of one that was put off while its last rewards were on
        their way.

        Raises:
            KeyError: it is neither.
        """
        if group_id in self._open:
            del self._open[group_id]
            self._complete += 1
        elif group_id in self.put_off:
            self.put_off.remove(group_id)
            self._early += 1
        else:
            raise KeyError(f"group {group_id!r} is neither of this round nor put off")

    @property
    def over(self) -> bool:
        """Whether the round under way has all that it needs."""
        return self.round is not None and self._complete >= self.round.needed

    def end(self) -> list[str]:
        """Ends the round: the groups that the caller has to withdraw, keeping their tokens.

        Raises:
            RuntimeError: it is not over.
        """
        if self.round is None or not self.over:
            raise RuntimeError("the round is not over: groups that it needs are not complete")
        self._early += self._complete - self.round.needed
        unfinished = list(self._open)
        self.put_off += unfinished
        self._open, self.round = {}, None
        return unfinished
