"""Weights that the trainer pushes to a site's instances: its calls, passed on to the instances that they concern.

The service says which instances could load weights, passes each call on, and answers once all instances have, or as
soon as one is lost: the trainer, which may be in the middle of a broadcast to it, then tries again without it. An
instance gets requests once it has loaded the version; one that comes later, or is heard again after it has missed a
version, is shown to the controller as stale, which has the trainer push to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from streamrl.generation.site.fleet_view import FleetView
from streamrl.generation.site.instance_life import Life
from streamrl.generation.site.instance_weights import InstanceWeights
from streamrl.generation.site.pending_answers import InstanceLost
from streamrl.protocol.controller_site import Member, WeightAnswer, WeightCall
from streamrl.protocol.message import kind_of
from streamrl.protocol.site_instance import TakeWeights, WeightsTaken
from streamrl.transport.deadlines import DeadlineExpired, never
from streamrl.weights.membership import first_ranks
from streamrl.weights.version import WeightVersion

log = logging.getLogger(__name__)

SIGN_OF_LIFE_S = 5.0
"""Seconds between two signs that a call is being carried out."""
LATER = 2.0
"""Times `deadlines.weights_s` that an instance has to answer: its own limit and the trainer's are reached before."""


@dataclass(frozen=True)
class _Lost:
    """A member from which no answer will come."""

    why: str
    ends: bool = False
    """Whether it counts as dead from now on, if it does not already."""


class PushedWeights:
    """The site's end of a weight path that pushes."""

    def __init__(
        self,
        fleet: FleetView,
        weights: InstanceWeights,
        answer: Callable[[WeightAnswer], None],
        loaded: Callable[[int], None],
        home: Callable[[float], float],
    ) -> None:
        """
        Args:
            fleet: the site's instances.
            weights: the version that they serve.
            answer: queues an answer to the controller.
            loaded: called with the number of each version that instances have loaded.
            home: converts unix seconds of this site's clock to the controller's.
        """
        self._fleet, self._weights = fleet, weights
        self._answer, self._loaded, self._home = answer, loaded, home

    async def carry_out(self, call: WeightCall) -> None:
        """Carry out a call of the trainer, and answer it."""
        if call.step == "members":
            self._answer(WeightAnswer(call=call.call, members=self._members(call.behind)))
            return
        async with self._weights.lock:  # no instance leaves meanwhile
            answer = await self._ask_all(call)
            changed = call.step == "load" and await self._settle(call.number, call.members, answer)
        if changed:
            await self._fleet.changed()  # before the answer, so that the controller knows who is current
        self._answer(answer)

    def _members(self, behind: bool) -> list[Member]:
        """Return the instances that could load weights now."""
        fleet = self._fleet
        names = [name for name in fleet.present if name in fleet.hub.peers]
        if behind:
            names = [name for name in names if fleet.lives[name].state is Life.STALE]
        names = [name for name in names if not self._weights.misses(name)]
        workers = {name: int(fleet.hub.peers[name].meta["world_size"]) for name in names}
        return [Member(name, fleet.lives[name].process, workers[name]) for name in names]

    async def _ask_all(self, call: WeightCall) -> WeightAnswer:
        """Have the members carry out a step; return when all have, or as soon as one is lost."""
        ranks = first_ranks(call.members)
        asked = {asyncio.ensure_future(self._ask(call, one, ranks[one.name])): one.name for one in call.members}
        done: dict[str, tuple[float, float]] = {}
        lost: dict[str, str] = {}
        failed: dict[str, str] = {}
        doomed: dict[str, str] = {}
        pending = set(asked)
        try:
            while pending and not lost:
                ended, pending = await asyncio.wait(
                    pending, timeout=SIGN_OF_LIFE_S, return_when=asyncio.FIRST_COMPLETED
                )
                if not ended:
                    self._answer(WeightAnswer(call=call.call, pending=True))
                for task in ended:
                    name, taken = asked[task], task.result()
                    if isinstance(taken, _Lost):
                        lost[name] = taken.why
                        if taken.ends:
                            doomed[name] = taken.why
                    elif taken.problem:
                        failed[name] = taken.problem
                    else:
                        done[name] = self._home(taken.started), self._home(taken.finished)
        finally:
            for task in pending:
                task.cancel()
        for member in call.members:
            life = self._fleet.lives.get(member.name)
            if member.name in doomed and life is not None and life.process == member.process:
                await self._fleet.died(life, doomed[member.name])
        return WeightAnswer(call=call.call, done=done, lost=lost, failed=failed)

    async def _ask(self, call: WeightCall, member: Member, first_rank: int) -> WeightsTaken | _Lost:
        """Have one member carry out a step; return its answer, or why it is lost."""
        fleet, name = self._fleet, member.name
        life = fleet.lives.get(name)
        if life is None or life.process != member.process or name not in fleet.present:
            return _Lost(f"{name} has left, or is another process by now")
        assert call.step != "members"
        if call.step == "pause":
            await self._weights.hold(name)
        order = TakeWeights(
            call=call.call, step=call.step, number=call.number, meeting=call.meeting, first_rank=first_rank
        )
        limit_s, progress = LATER * fleet.limits.weights_s, never
        if call.step == "pause" and fleet.context.run.schedule.on_update == "wait":
            # its requests end first, for as long as they produce tokens
            limit_s, progress = limit_s + fleet.limits.generation_s, partial(self._weights.since_token, name)
        try:
            answer = fleet.answers.ask(name, order, kind_of(WeightsTaken), limit_s, progress, call.call)
            taken: WeightsTaken = await answer
            return taken
        except InstanceLost:
            # a silent one may hold up the broadcast to all others, and gloo has no way to leave it behind
            return _Lost(f"{name} died, or fell silent", ends=call.step == "load")
        except DeadlineExpired as error:
            return _Lost(str(error), ends=True)

    async def _settle(self, number: int, members: Iterable[Member], answer: WeightAnswer) -> bool:
        """Let those that have loaded a version generate; return whether instances have joined or plans changed."""
        if not answer.done:
            return False
        self._weights.served = WeightVersion(number, None, "")
        self._loaded(number)
        for name in answer.done:
            await self._weights.unhold(name)
        processes = {member.name: member.process for member in members}
        return await self._weights.settle({name: processes[name] for name in answer.done})
