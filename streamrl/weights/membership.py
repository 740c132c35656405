"""Who is in the group in which the trainer pushes weights, and what follows when a member is lost. Pure: no I/O.

One publish goes through these steps; every arrow to the left is one of at most `TRIES` tries:

    ask --> form --> pause --> send --> done
     ^  \\--------->/                      \\-> failed
     +---- a member was lost, or the group broke

ask     the site names the instances that could load weights now. Nobody: done at once
form    the group that stands has other members than these: it is left, and a new one formed
pause   all members pause generation
send    the trainer sends, all members load

A member is one process of an instance: a restarted instance is another member, so its group is always a new one. A
group in which anything went wrong does not stand any more, even if its members are the same in the next try. What does
*not* happen: a version is never counted as loaded by an instance that did not say so. A member that is lost when all
others have loaded the version costs no other try: it is served when it is back, as every instance is that comes later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from streamrl.protocol.controller_site import Member, WeightAnswer

TRIES = 3
"""Tries of one publish. Each needs another death or another break, and all instances stand still meanwhile."""


class PushStep(StrEnum):
    """What is to be done next."""

    ASK = "ask"
    FORM = "form"
    PAUSE = "pause"
    SEND = "send"
    DONE = "done"
    FAILED = "failed"


def first_ranks(members: Iterable[Member]) -> dict[str, int]:
    """Return the rank of each member's first worker; the trainer has rank 0."""
    ranks, rank = {}, 1
    for member in members:
        ranks[member.name] = rank
        rank += member.workers
    return ranks


def world_size(members: Iterable[Member]) -> int:
    """Return the number of ranks of a group, the trainer's included."""
    return 1 + sum(member.workers for member in members)


@dataclass
class PushedGroup:
    """The group that stands from one publish to the next."""

    members: tuple[Member, ...] = ()
    """Its members, in the order of their ranks; (): no group stands."""


@dataclass
class Push:
    """One publish into a group."""

    group: PushedGroup
    step: PushStep = PushStep.ASK
    members: tuple[Member, ...] = ()
    """Members of the present try, in the order of their ranks."""
    tries: int = 0
    """Tries that have failed."""
    applied: dict[str, tuple[float, float]] = field(default_factory=dict)
    """(start, end) of the loading, by instance; filled when the step is `done`."""
    why: str = ""
    """What went wrong in the last try."""

    def present(self, members: Iterable[Member]) -> None:
        """Begin a try with the instances that could load weights now."""
        self._expect(PushStep.ASK)
        self.members = tuple(sorted(members))
        if not self.members:
            self.step = PushStep.DONE
        elif self.members == self.group.members:
            self.step = PushStep.PAUSE
        else:
            self.group.members = ()  # it is left before the new one is formed
            self.step = PushStep.FORM

    def formed(self, answer: WeightAnswer, broken: str = "") -> None:
        """Record how the members met; `broken`: why the trainer itself could not."""
        self._expect(PushStep.FORM)
        if self._went_wrong(answer, broken):
            return
        self.group.members = self.members
        self.step = PushStep.PAUSE

    def paused(self, answer: WeightAnswer) -> None:
        """Record how the members paused."""
        self._expect(PushStep.PAUSE)
        if not self._went_wrong(answer, ""):
            self.step = PushStep.SEND

    def sent(self, answer: WeightAnswer, broken: str = "") -> None:
        """Record how the members loaded the version; `broken`: why the trainer could not send all of it."""
        self._expect(PushStep.SEND)
        if answer.done.keys() | answer.lost.keys() >= {member.name for member in self.members}:
            self.applied, self.step = dict(answer.done), PushStep.DONE
            self.why = _words(answer.lost)
            if broken or answer.lost:
                self.group.members = ()
        else:
            self._went_wrong(answer, broken)

    def _went_wrong(self, answer: WeightAnswer, broken: str) -> bool:
        """Return whether a step was not carried out by all members, and a new try is due, or none is left."""
        missing = [member.name for member in self.members if member.name not in answer.done]
        if not missing and not broken:
            return False
        self.group.members = ()
        self.why = _words(answer.lost) or _words(answer.failed) or broken or f"{missing[0]} did not answer"
        self.tries += 1
        self.step = PushStep.FAILED if self.tries == TRIES else PushStep.ASK
        return True

    def _expect(self, step: PushStep) -> None:
        if self.step is not step:
            raise ValueError(f"a publish at '{self.step}' cannot go on as at '{step}'")


def _words(causes: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in sorted(causes.items()))
