"""A site's requests, from arrival to finished sample: the dispatch policy chooses their instances.

    generate -> instance            a request, with the tokens it has already produced
    release  -> instance            preempt the request; the answer is `released` with its tokens

A request is preempted for one of three reasons, which decide what happens next:

    moved       the policy wants it on another instance, where it continues
    parked      its round is over, or its token budget is used up: it waits here, with its tokens, for `resume`
    requeued    its instance loads new weights or leaves: the policy places it again

Requests of a dead instance continue elsewhere from the tokens that are known (`lost`), and so do those of a silent one
(`hand_over`). A silent instance may come back: it is ordered to release what it had, and should get nothing new until
it has (`owes`). Until then everything it reports about those requests is ignored, except a finished sample.

The policy decides; this module only records which instance has which request. A request that ends while it is being
preempted has simply ended.

While dispatch is throttled, because finished samples leave the site more slowly than they are produced, the policy is
not consulted and no waiting request starts. Running requests continue, and a request already moving to another
instance continues there; requests that are parked, resumed or requeued meanwhile wait with their tokens.

A step's requests are so many messages that other work must go on between them: sending pauses now and then, also where
an instance has no credit. So each method changes all that it knows first, then sends. What has been decided but not
sent yet may be out of date by then, and is left out: the policy then has the request elsewhere, or not at all.
"""

from __future__ import annotations

import asyncio
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

SENT_TOGETHER = 256
"""Messages that are sent before other work goes on."""

Send = Callable[[str, str, dict[str, Any], Arrays], Awaitable[None]]
"""Sends a message: (instance, kind, body, arrays)."""
ProducedTokens = Callable[[str, str], float]
"""Tokens that an instance has reported for a sample: (instance, sample) -> tokens."""


class Dispatcher:
    """The requests of a site: which instance works on each, and which ones wait or are parked."""

    def __init__(self, policy: DispatchPolicy, send: Send, produced: ProducedTokens) -> None:
        self.policy = policy
        self.requests: dict[str, SampleRequest] = {}
        """Requests without a finished sample, parked ones included, by sample id."""
        self.parked: set[str] = set()
        """Requests that wait for `resume`; their instance may not have returned them yet."""
        self.moves = 0
        """Running requests that were moved to another instance since the start."""
        self._send_now = send
        self._sent = 0
        self._reported = produced
        self._forecasts: dict[str, Forecast | None] = {}
        self._turns: dict[str, tuple[str, int]] = {}
        """Instance that has the KV cache of a request that is a turn ('': none), and the tokens that it has."""
        self._at: dict[str, str] = {}
        """Instance that works on a request, by sample."""
        self._work: dict[str, dict[str, None]] = {}
        """The samples of `_at` by instance, in the order in which they came, so that nothing has to search all."""
        self._handed_over: dict[str, set[str]] = {}
        """Requests that continue elsewhere although this instance may still be working on them, by instance."""
        self._releasing: set[str] = set()
        """Requests that their instance was ordered to release."""
        self._moving: dict[str, tuple[str, str]] = {}
        """(instance, route) that a request is moving to, by sample."""
        self._joined: dict[str, tuple[int, StepCurve | None, str]] = {}
        """(slots, curve, pool) of each instance that has joined."""
        self._held: dict[str, set[str]] = {}
        """Reasons for which an instance gets no new requests, by instance."""
        self._allowed: set[str] | None = None
        """Instances of the last call of `use`, also those that have not joined; None: all get requests."""
        self._slow: dict[str, float] = {}
        """Factor by which steps take longer than the instance's curve says, by instance."""
        self._throttled = False

    async def join(self, instance: str, slots: int, curve: StepCurve | None, pool: str) -> None:
        """Add an instance that is ready for work."""
        self._joined[instance] = (slots, curve, pool)
        self._slow.pop(instance, None)
        if self._allowed is not None and instance not in self._allowed:
            self._held[instance] = {"unused"}
            return
        self._add_to_policy(instance)
        await self._dispatch()

    def _add_to_policy(self, instance: str) -> None:
        """Let the policy give an instance requests, beside those that go on there and keep their slots."""
        self.policy.join(instance, *self._joined[instance])
        self.policy.slow(instance, self._slow.get(instance, 1.0))
        for sample_id in self.works_on(instance):
            if sample_id not in self._releasing:  # those are placed when released
                self.policy.start(self._known_to_policy(sample_id), self.policy.instances[instance])

    async def hold(self, instance: str, requeue: bool, why: str) -> None:
        """Give an instance no more requests until `unhold`.

        Args:
            instance: name of the instance.
            requeue: whether its running requests are preempted and placed again; otherwise they continue there.
            why: reason, in a word; the instance is held until every reason has been removed.
        """
        orders = self._hold(instance, requeue, why)
        await self._order_releases(orders)
        await self._dispatch()

    def _hold(self, instance: str, requeue: bool, why: str) -> list[tuple[str, str]]:
        """Hold an instance as `hold` does; return the orders for `_order_releases`."""
        reasons = self._held.setdefault(instance, set())
        first = not reasons
        reasons.add(why)
        waiting = []
        for sample_id in self.policy.leave(instance) if first else ():
            if sample_id in self._moving:  # moving here: placed again once its old instance has released it
                del self._moving[sample_id]
            elif sample_id not in self._at:  # a policy may have planned it for this instance
                waiting.append(sample_id)
        self._queue(waiting)
        return self._to_release(self.works_on(instance) if requeue else ())

    async def unhold(self, instance: str, why: str) -> None:
        """Remove a reason for holding an instance; a no-op for one that has left meanwhile."""
        if self._unhold(instance, why):
            await self._dispatch()

    def _unhold(self, instance: str, why: str) -> bool:
        """Remove a reason for holding an instance; return whether it was the last one."""
        reasons = self._held.get(instance, set())
        reasons.discard(why)
        if reasons or self._held.pop(instance, None) is None:
            return False
        self._add_to_policy(instance)
        return True

    async def slow(self, instance: str, factor: float) -> None:
        """Record that an instance's steps take `factor` times as long as its curve says; 1 ends this."""
        self._slow[instance] = factor
        self.policy.slow(instance, factor)
        await self._dispatch()

    def curve_of(self, instance: str) -> StepCurve | None:
        """Return the step times used in plans for an instance that has joined."""
        return self._joined[instance][1]

    def measured(self, instance: str, curve: StepCurve) -> None:
        """Replace an instance's step curve. Only later plans use it; existing plans stay."""
        slots, _, pool = self._joined[instance]
        self._joined[instance] = slots, curve, pool
        self.policy.measured(instance, curve)

    def knows(self, instance: str) -> bool:
        """Return whether an instance has joined, held or not."""
        return instance in self._joined

    def works_on(self, instance: str) -> list[str]:
        """Return the requests that an instance has, including those it was ordered to release."""
        return list(self._work.get(instance, ()))

    def has(self, instance: str, sample_id: str) -> bool:
        """Return whether a request is assigned to an instance."""
        return self._at.get(sample_id) == instance

    def may_return(self, instance: str, partial: PartialSample) -> bool:
        """Return whether an instance may release a request: it was ordered to, or the request's budget is used up.

        It may also release what is not assigned to it any more.
        """
        sample_id = partial.sample_id
        return not self.has(instance, sample_id) or sample_id in self._releasing or self._is_used_up(partial)

    def owes(self, instance: str) -> int:
        """Return the number of requests that were handed over to others and not yet released by the instance."""
        return len(self._handed_over.get(instance, ()))

    async def lost(self, instance: str, kept: Callable[[str], PartialSample | None]) -> list[PartialSample]:
        """Continue a dead instance's requests elsewhere, from the tokens that are known.

        Args:
            instance: name of the instance.
            kept: returns the known tokens of a request.

        Returns:
            Requests that are now parked because their known tokens use up their budget (see `released`).
        """
        if instance in self._joined:
            await self.hold(instance, requeue=False, why="lost")
        parked, moving = self._continue_elsewhere(self.works_on(instance), kept)
        await self._start_decided(moving)
        await self._dispatch()
        self.leave(instance)
        return parked

    async def hand_over(self, instance: str, kept: Callable[[str], PartialSample | None]) -> list[PartialSample]:
        """Continue a silent instance's requests elsewhere, and order it to release them should it come back.

        The instance must be held. Arguments and result are those of `lost`.
        """
        had = self.works_on(instance)
        self._handed_over.setdefault(instance, set()).update(had)
        parked, moving = self._continue_elsewhere(had, kept)
        for sample_id in had:
            if sample_id in self._handed_over.get(instance, ()):  # it may have come back meanwhile
                await self._tell_to_release(instance, sample_id)
        await self._start_decided(moving)
        await self._dispatch()
        return parked

    def _continue_elsewhere(
        self, had: Iterable[str], kept: Callable[[str], PartialSample | None]
    ) -> tuple[list[PartialSample], list[tuple[str, str, str]]]:
        """Queue requests that their instance has lost; return those that are now parked, and (request, instance, route)
        of those that were moving already.
        """
        parked, moving, waiting = [], [], []
        for sample_id in sorted(had):
            self._unassign(sample_id)
            target, request = self._moving.pop(sample_id, None), self.requests[sample_id]
            found = max((kept(sample_id), request.kept), key=lambda one: len(one.completion_tokens) if one else -1)
            self.requests[sample_id] = replace(request, kept=found)
            if sample_id in self.parked:
                continue
            if found is not None and self._park_if_used_up(found):
                parked.append(found)
            elif target is not None:
                moving.append((sample_id, *target))
            else:
                waiting.append(sample_id)
        self._queue(waiting)
        return parked, moving

    def leave(self, instance: str) -> None:
        """Require an instance to join again before it gets requests; it keeps what it works on."""
        self._held.pop(instance, None)
        self._joined.pop(instance, None)
        self._handed_over.pop(instance, None)

    async def use(self, instances: Iterable[str]) -> None:
        """Give requests to these instances only, also to those that join later; those of others are placed again."""
        allowed = self._allowed = set(instances)
        unused = sorted(self._joined.keys() - allowed)
        orders = [order for instance in unused for order in self._hold(instance, True, "unused")]
        for instance in sorted(allowed):
            self._unhold(instance, "unused")
        await self._order_releases(orders)
        await self._dispatch()

    async def throttle(self, on: bool) -> None:
        """Stop starting requests, or start the waiting ones again; running requests continue either way."""
        self._throttled = on
        await self._dispatch()

    async def submit(self, groups: Iterable[tuple[list[SampleRequest], Forecast | None]]) -> None:
        """Place groups together, each given by its requests and its forecast."""
        new = {
            request.sample_id: (replace(request, expected=forecast.mean) if forecast else request, forecast)
            for requests, forecast in groups
            for request in requests
        }
        self.requests |= {sample_id: request for sample_id, (request, _) in new.items()}
        self._forecasts |= {sample_id: forecast for sample_id, (_, forecast) in new.items()}
        await self._place(new)

    async def submit_turn(self, request: SampleRequest, forecast: Forecast | None, home: str, cached: int) -> None:
        """Place a turn of an episode.

        Args:
            request: the turn.
            forecast: forecast of the turn's length.
            home: instance that has the KV cache of the turn that it extends; '': none has.
            cached: prompt tokens that `home` need not prefill.
        """
        self._turns[request.sample_id] = home, cached
        await self.submit([([request], forecast)])

    async def park(self, sample_ids: Iterable[str]) -> None:
        """Preempt and park requests, whether they run or wait; those that have ended are ignored."""
        wanted = {sample_id for sample_id in sample_ids if sample_id in self.requests} - self.parked
        self.parked |= wanted
        self.policy.withdraw(wanted)
        for sample_id in wanted:
            self._moving.pop(sample_id, None)
        await self._order_releases(self._to_release(wanted & self._at.keys()))
        await self._dispatch()

    async def abandon(self, sample_ids: Iterable[str]) -> None:
        """Stop requests that nobody waits for any more; what instances still report of them is ignored."""
        wanted = {sample_id for sample_id in sample_ids if sample_id in self.requests}
        self.policy.withdraw(wanted)
        running = [(self._at[sample_id], sample_id) for sample_id in sorted(wanted & self._at.keys())]
        for sample_id in wanted:
            self._forget(sample_id)
        for instance, sample_id in running:
            await self._tell_to_release(instance, sample_id)
        await self._dispatch()

    async def resume(self, sample_ids: Iterable[str], budget: int | None = None) -> None:
        """Continue parked requests from the tokens that they have.

        Args:
            sample_ids: requests to continue; those that have ended meanwhile are ignored.
            budget: new tokens after which they are parked again.
        """
        wanted = [sample_id for sample_id in sample_ids if sample_id in self.parked]
        for sample_id in wanted:
            request = self.requests[sample_id]
            has = len(request.kept.completion_tokens) if request.kept else 0
            self.requests[sample_id] = replace(request, pause_at=None if budget is None else has + budget)
            self.parked.discard(sample_id)
        # a request that its instance has not yet released is placed when it has been
        await self._place([sample_id for sample_id in wanted if sample_id not in self._at])

    async def finished(self, sample_id: str, length: int, instance: str) -> None:
        """Record a finished sample. If its instance had been given up, stop the one that continues the request."""
        self._handed_over.get(instance, set()).discard(sample_id)
        at = self._at.get(sample_id)
        if at is None:  # it waits in the policy's queue
            self.policy.withdraw({sample_id})
        self._forget(sample_id)
        self.policy.finished(sample_id, length)
        if at not in (None, instance):
            await self._tell_to_release(at, sample_id)
        await self._dispatch()

    def _forget(self, sample_id: str) -> None:
        for known in (self.requests, self._forecasts, self._turns, self._moving):
            known.pop(sample_id, None)
        self.parked.discard(sample_id)
        self._unassign(sample_id)

    def _unassign(self, sample_id: str) -> None:
        """Record that no instance works on a request any more."""
        if (instance := self._at.pop(sample_id, None)) is not None:
            del (work := self._work[instance])[sample_id]
            if not work:
                del self._work[instance]
        self._releasing.discard(sample_id)

    async def released(self, partial: PartialSample, instance: str) -> bool:
        """Record that an instance has released a request, with what it has produced.

        Returns:
            Whether it is now parked because its budget is used up; the controller, which set the budget, is notified.
        """
        sample_id = partial.sample_id
        self._handed_over.get(instance, set()).discard(sample_id)
        request = self.requests.get(sample_id)
        if request is None or not self.has(instance, sample_id):
            return False
        self._unassign(sample_id)
        self.requests[sample_id] = replace(request, kept=partial)
        if sample_id in self.parked:
            return False
        target = self._moving.pop(sample_id, None)
        if self._park_if_used_up(partial):
            await self._dispatch()
            return True
        if target is not None:
            self.moves += 1
            await self._start(sample_id, *target)
        else:
            await self._place([sample_id])
        return False

    def _park_if_used_up(self, partial: PartialSample) -> bool:
        """Park a request whose tokens use up its budget; return whether they do."""
        if not self._is_used_up(partial):
            return False
        self.parked.add(partial.sample_id)
        self.policy.withdraw({partial.sample_id})
        return True

    def _is_used_up(self, partial: PartialSample) -> bool:
        pause_at = self.requests[partial.sample_id].pause_at
        return pause_at is not None and len(partial.completion_tokens) >= pause_at

    async def _place(self, sample_ids: Iterable[str]) -> None:
        self._queue(sample_ids)
        await self._dispatch()

    def _queue(self, sample_ids: Iterable[str]) -> None:
        self.policy.submit([self._known_to_policy(sample_id) for sample_id in sample_ids])

    def _known_to_policy(self, sample_id: str) -> Request:
        request = self.requests[sample_id]
        prompt, forecast = len(request.prompt_tokens), self._forecasts[sample_id]
        if (turn := self._turns.get(sample_id)) is None:
            return Request(sample_id, request.group_id, forecast, prompt)
        return Request(sample_id, request.group_id, forecast, prompt, True, *turn)

    async def _dispatch(self) -> None:
        if self._throttled:
            return
        starts, moved = [], []
        for decision in self.policy.decide(self._produced):
            sample_id, target = decision.request_id, (decision.instance, decision.route)
            if sample_id not in self._at:  # one that moves may not have been sent yet
                starts.append((sample_id, *target))
                continue
            self._moving[sample_id] = target
            moved.append(sample_id)
        orders = self._to_release(moved)
        await self._start_decided(starts)
        await self._order_releases(orders)

    def _to_release(self, sample_ids: Iterable[str]) -> list[tuple[str, str]]:
        """Note that requests are to be released; return (instance, request) of the new ones, for `_order_releases`."""
        new = [sample_id for sample_id in sorted(sample_ids) if sample_id not in self._releasing]
        orders = [(self._at[sample_id], sample_id) for sample_id in new]
        self._releasing.update(sample_id for _, sample_id in orders)
        return orders

    async def _order_releases(self, orders: Iterable[tuple[str, str]]) -> None:
        """Order instances to release requests that they still have."""
        for instance, sample_id in orders:
            if self.has(instance, sample_id) and sample_id in self._releasing:
                await self._tell_to_release(instance, sample_id)

    async def _tell_to_release(self, instance: str, sample_id: str) -> None:
        await self._send(instance, *wire(Release(sample_id=sample_id)), {})

    async def _start_decided(self, decided: Iterable[tuple[str, str, str]]) -> None:
        """Start requests, given by (request, instance, route), unless they have ended or were placed anew meanwhile."""
        for sample_id, instance, route in decided:
            placed = self.policy.where.get(sample_id)
            if placed is not None and placed.name == instance and sample_id not in self._at:
                await self._start(sample_id, instance, route)

    async def _start(self, sample_id: str, instance: str, route: str) -> None:
        self._at[sample_id] = instance
        self._work.setdefault(instance, {})[sample_id] = None
        if sample_id in self._turns:
            self._turns[sample_id] = "", 0  # should it be placed again, its home's cache is of no use any more
        message, arrays = request_to_wire(self.requests[sample_id], route)
        await self._send(instance, *wire(message), arrays)

    async def _send(self, instance: str, kind: str, body: dict[str, Any], arrays: Arrays) -> None:
        """Send a message, and let other work go on now and then."""
        await self._send_now(instance, kind, body, arrays)
        self._sent += 1
        if self._sent % SENT_TOGETHER == 0:
            await asyncio.sleep(0)

    def _produced(self, sample_id: str) -> float:
        kept = self.requests[sample_id].kept
        reported = self._reported(self._at[sample_id], sample_id) if sample_id in self._at else 0
        return max(reported, len(kept.completion_tokens) if kept else 0)
