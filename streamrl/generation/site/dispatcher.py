"""A site's requests from arrival to finished sample: asks the dispatch policy where, and tells the instances.

    generate -> instance            a request, with what has been produced of it
    release  -> instance            take it off; the answer is `released` with its tokens

A request is taken off for one of these reasons, and what follows differs:

    moved       the policy wants it elsewhere: it goes on there
    parked      its round is over, or it has used its budget of tokens: it waits here, with its tokens, for `resume`
    requeued    its instance loads new weights, or leaves: the policy places it anew

What a dead instance had goes on from what is known of its tokens (`lost`), and so does what a silent one has
(`hand_over`). A silent one may be back: it is told to give back what it had, and until it has (`owes`) it had better
get nothing new; what it says of those requests meanwhile is not listened to, unless it is the finished sample.

The policy decides; here is only who has what. A request that ends while it is taken off has simply ended.

While it is throttled, because finished samples cannot leave the site as fast as they come, the policy is not asked:
nothing is started that waits. What runs goes on, and what is on its way to another instance goes on there; what is
parked, resumed or requeued meanwhile waits with its tokens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any

from scheduler.cost.decode import StepCurve
from scheduler.cost.length_forecast import Forecast
from scheduler.dispatch.policy import DispatchPolicy, Request
from streamrl.protocol.message import wire
from streamrl.protocol.samples import request_to_wire
from streamrl.protocol.site_instance import Release
from streamrl.rollouts.types import PartialSample, SampleRequest
from streamrl.transport.wire import Arrays

Send = Callable[[str, str, dict[str, Any], Arrays], Awaitable[None]]
"""(instance, kind, body, arrays)."""
Told = Callable[[str, str], float]
"""(instance, sample) -> tokens."""


class Dispatcher:
    """See the module's text."""

    def __init__(self, policy: DispatchPolicy, send: Send, produced: Told) -> None:
        """
        Args:
            policy: places requests.
            send: brings a message to an instance.
            produced: tokens that an instance's running request has produced, as far as the instance has told.
        """
        self.policy = policy
        self.requests: dict[str, SampleRequest] = {}
        """Requests without a finished sample, parked ones included, by sample id."""
        self.parked: set[str] = set()
        """Requests that wait for `resume`; some may still be on their way back from their instance."""
        self.moves = 0
        """Running requests that went to another instance, since the start."""
        self._send = send
        self._told = produced
        self._forecasts: dict[str, Forecast | None] = {}
        self._at: dict[str, str] = {}  # sample -> instance that works on it
        self._handed_over: dict[str, set[str]] = {}
        """Requests that go on elsewhere although their instance may still be at work on them, by instance."""
        self._moving: dict[str, tuple[str, str]] = {}  # sample -> (instance, route) it goes to
        self._joined: dict[str, tuple[int, StepCurve | None, str]] = {}  # how each instance joined
        self._held: dict[str, set[str]] = {}
        """Instances that get nothing new, and why."""
        self._unused: set[str] = set()
        self._slow: dict[str, float] = {}
        """Instances that are slower than they have said, and by which factor."""
        self._throttled = False

    async def join(self, instance: str, slots: int, curve: StepCurve | None, pool: str) -> None:
        """An instance is ready for work."""
        self._joined[instance] = (slots, curve, pool)
        self._slow.pop(instance, None)
        if instance in self._unused:
            self._held[instance] = {"unused"}
            return
        self.policy.join(instance, slots, curve, pool)
        await self._dispatch()

    async def hold(self, instance: str, requeue: bool, why: str) -> None:
        """An instance gets no more requests until `unhold`.

        Args:
            instance: which.
            requeue: what it has running is taken off and placed anew; else it stays there and may end.
            why: a word; it is held until every reason has gone.
        """
        reasons = self._held.setdefault(instance, set())
        first = not reasons
        reasons.add(why)
        waiting = []
        for sample_id in self.policy.leave(instance) if first else ():
            if sample_id in self._moving:  # on its way here: placed anew once it has come back from where it was
                del self._moving[sample_id]
            elif sample_id not in self._at:  # a policy may have planned it for this instance
                waiting.append(sample_id)
        if requeue:
            for sample_id in sorted(name for name, at in self._at.items() if at == instance):
                if sample_id not in self._moving and sample_id not in self.parked:  # those are coming back already
                    await self._send(instance, *wire(Release(sample_id=sample_id)), {})
        await self._place(waiting)

    async def unhold(self, instance: str, why: str) -> None:
        """A reason for which an instance was held has gone; of one that has left meanwhile it is no news."""
        reasons = self._held.get(instance, set())
        reasons.discard(why)
        if not reasons and self._held.pop(instance, None) is not None:
            self.policy.join(instance, *self._joined[instance])
            self.policy.slow(instance, self._slow.get(instance, 1.0))
            await self._dispatch()

    async def slow(self, instance: str, factor: float) -> None:
        """An instance's steps take `factor` times as long as it has said when it joined; 1: not any more."""
        self._slow[instance] = factor
        self.policy.slow(instance, factor)
        await self._dispatch()

    def curve_of(self, instance: str) -> StepCurve | None:
        """Step times by which an instance that has joined is planned for."""
        return self._joined[instance][1]

    def measured(self, instance: str, curve: StepCurve) -> None:
        """An instance's steps take as long as this curve says, in place of the one that it has joined with. What comes
        next is planned by it; what is planned stays."""
        slots, _, pool = self._joined[instance]
        self._joined[instance] = slots, curve, pool
        self.policy.measured(instance, curve)

    def knows(self, instance: str) -> bool:
        """Whether an instance has joined, held or not."""
        return instance in self._joined

    def works_on(self, instance: str) -> list[str]:
        """Requests that an instance has, those included that it is to give back."""
        return [sample_id for sample_id, at in self._at.items() if at == instance]

    def has(self, instance: str, sample_id: str) -> bool:
        """Whether an instance is the one that works on a request."""
        return self._at.get(sample_id) == instance

    def owes(self, instance: str) -> int:
        """Requests that were handed over to others, and that the instance has not given up yet."""
        return len(self._handed_over.get(instance, ()))

    async def lost(self, instance: str, kept: Callable[[str], PartialSample | None]) -> list[PartialSample]:
        """An instance is gone, whatever it had: its requests go on elsewhere, from what is known of their tokens.

        Args:
            instance: which.
            kept: tokens of a request, as far as they are known.

        Returns:
            Requests that are parked because what is known uses up their budget, as `released` tells of others.
        """
        if instance in self._joined:
            await self.hold(instance, requeue=False, why="lost")
        parked = await self._go_on_elsewhere(self.works_on(instance), kept)
        self.leave(instance)
        return parked

    async def hand_over(self, instance: str, kept: Callable[[str], PartialSample | None]) -> list[PartialSample]:
        """The requests of an instance that is held, and may never answer, go on elsewhere; should it still be there,
        it gives them up. As `lost` otherwise."""
        had = self.works_on(instance)
        self._handed_over.setdefault(instance, set()).update(had)
        for sample_id in had:
            await self._send(instance, *wire(Release(sample_id=sample_id)), {})
        return await self._go_on_elsewhere(had, kept)

    async def _go_on_elsewhere(
        self, had: Iterable[str], kept: Callable[[str], PartialSample | None]
    ) -> list[PartialSample]:
        parked, waiting = [], []
        for sample_id in sorted(had):
            del self._at[sample_id]
            target, request = self._moving.pop(sample_id, None), self.requests[sample_id]
            found = max((kept(sample_id), request.kept), key=lambda one: len(one.completion_tokens) if one else -1)
            self.requests[sample_id] = replace(request, kept=found)
            if sample_id in self.parked:
                continue
            if found is not None and request.pause_at is not None and len(found.completion_tokens) >= request.pause_at:
                self.parked.add(sample_id)
                self.policy.withdraw({sample_id})
                parked.append(found)
            elif target is not None:
                await self._start(sample_id, *target)
            else:
                waiting.append(sample_id)
        await self._place(waiting)
        return parked

    async def retire(self, instance: str) -> None:
        """An instance that was held, and has nothing left, is gone."""
        self._unused.discard(instance)
        self.leave(instance)

    def leave(self, instance: str) -> None:
        """An instance has to join again before it gets requests; what it works on stays its own."""
        self._held.pop(instance, None)
        self._joined.pop(instance, None)
        self._handed_over.pop(instance, None)

    async def use(self, instances: Iterable[str]) -> None:
        """From now on only these get requests; what others have running is placed anew."""
        unused = self._joined.keys() - set(instances)
        for instance in sorted(unused - self._unused):
            await self.hold(instance, requeue=True, why="unused")
        back, self._unused = self._unused - unused, set(unused)
        for instance in sorted(back):
            await self.unhold(instance, "unused")

    async def throttle(self, on: bool) -> None:
        """From now on nothing new is started (see the module's text); when it is off again, what waits is, at once."""
        self._throttled = on
        await self._dispatch()

    async def submit(self, groups: Iterable[tuple[list[SampleRequest], Forecast | None]]) -> None:
        """Takes groups that are to be placed together, each with its requests and its forecast."""
        new = []
        for requests, forecast in groups:
            for request in requests:
                self.requests[request.sample_id] = request
                self._forecasts[request.sample_id] = forecast
                new.append(request.sample_id)
        await self._place(new)

    async def park(self, sample_ids: Iterable[str]) -> None:
        """Takes requests off, whether they run or wait; those that have ended are left alone."""
        wanted = {sample_id for sample_id in sample_ids if sample_id in self.requests} - self.parked
        self.parked |= wanted
        self.policy.withdraw(wanted)
        for sample_id in sorted(wanted & self._at.keys()):
            self._moving.pop(sample_id, None)
            await self._send(self._at[sample_id], *wire(Release(sample_id=sample_id)), {})
        await self._dispatch()

    async def resume(self, sample_ids: Iterable[str], budget: int | None = None) -> None:
        """Parked requests go on, from the tokens that they have.

        Args:
            sample_ids: those that have ended meanwhile are left alone.
            budget: new tokens after which they are parked again.
        """
        wanted = [sample_id for sample_id in sample_ids if sample_id in self.parked]
        for sample_id in wanted:
            request = self.requests[sample_id]
            has = len(request.kept.completion_tokens) if request.kept else 0
            self.requests[sample_id] = replace(request, pause_at=None if budget is None else has + budget)
            self.parked.discard(sample_id)
        # what is still on its way back is placed when it has come
        await self._place([sample_id for sample_id in wanted if sample_id not in self._at])

    async def finished(self, sample_id: str, length: int, instance: str) -> None:
        """A sample has come, of an instance that may have been taken for dead: then nobody else is to go on with it."""
        self._handed_over.get(instance, set()).discard(sample_id)
        if (at := self._at.get(sample_id, instance)) != instance:
            await self._send(at, *wire(Release(sample_id=sample_id)), {})
        if sample_id not in self._at:  # it waits to be placed
            self.policy.withdraw({sample_id})
        self.requests.pop(sample_id, None)
        self._forecasts.pop(sample_id, None)
        self.parked.discard(sample_id)
        self._moving.pop(sample_id, None)
        self._at.pop(sample_id, None)
        self.policy.finished(sample_id, length)
        await self._dispatch()

    async def released(self, partial: PartialSample, instance: str) -> bool:
        """An instance has taken a request off, with what it has produced.

        Returns:
            Whether it is parked because it has used its budget: whoever gave the budget may want to know.
        """
        sample_id = partial.sample_id
        self._handed_over.get(instance, set()).discard(sample_id)
        request = self.requests.get(sample_id)
        if request is None or not self.has(instance, sample_id):
            return False
        self._at.pop(sample_id, None)
        self.requests[sample_id] = replace(request, kept=partial)
        if sample_id in self.parked:
            return False
        if request.pause_at is not None and len(partial.completion_tokens) >= request.pause_at:
            self._moving.pop(sample_id, None)
            self.parked.add(sample_id)
            self.policy.withdraw({sample_id})
            await self._dispatch()
            return True
        if (target := self._moving.pop(sample_id, None)) is not None:
            self.moves += 1
            await self._start(sample_id, *target)
        else:
            await self._place([sample_id])
        return False

    async def _place(self, sample_ids: Iterable[str]) -> None:
        requests = [self.requests[sample_id] for sample_id in sample_ids]
        self.policy.submit(
            [Request(r.sample_id, r.group_id, self._forecasts[r.sample_id], len(r.prompt_tokens)) for r in requests]
        )
        await self._dispatch()

    async def _dispatch(self) -> None:
        if self._throttled:
            return
        for decision in self.policy.decide(self._produced):
            sample_id = decision.request_id
            if not decision.moved:
                await self._start(sample_id, decision.instance, decision.route)
                continue
            under_way = sample_id in self._moving
            self._moving[sample_id] = (decision.instance, decision.route)
            if not under_way:
                await self._send(self._at[sample_id], *wire(Release(sample_id=sample_id)), {})

    async def _start(self, sample_id: str, instance: str, route: str) -> None:
        self._at[sample_id] = instance
        message, arrays = request_to_wire(self.requests[sample_id], route)
        await self._send(instance, *wire(message), arrays)

    def _produced(self, sample_id: str) -> float:
        kept = self.requests[sample_id].kept
        told = self._told(self._at[sample_id], sample_id) if sample_id in self._at else 0
        return max(told, len(kept.completion_tokens) if kept else 0)
