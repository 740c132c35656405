"""A site's requests from arrival to finished sample: asks the dispatch policy where, and tells the instances.

    generate -> instance            a request, with what another instance has produced of it
    release  -> instance            take it off; the answer is `released` with its tokens, and it goes on elsewhere

The policy decides; here is only who has what. A request that ends while it is being moved has simply ended.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any

from scheduler.forecast import Forecast
from scheduler.policy import DispatchPolicy, Progress, Request
from streamrl.generation.messages import request_to_wire
from streamrl.rollouts.types import PartialSample, SampleRequest
from streamrl.transport.wire import Arrays

Send = Callable[[str, str, dict[str, Any], Arrays], Awaitable[None]]
"""(instance, kind, body, arrays)."""


class Dispatcher:
    """See the module's text."""

    def __init__(self, policy: DispatchPolicy, send: Send, produced: Progress) -> None:
        """
        Args:
            policy: its instances have joined.
            send: brings a message to an instance.
            produced: tokens that a running request has produced, as far as its instance has told.
        """
        self.policy = policy
        self.requests: dict[str, SampleRequest] = {}
        """Requests without a finished sample, by sample id."""
        self.moves = 0
        """Running requests that went to another instance, since the start."""
        self._send = send
        self._told = produced
        self._at: dict[str, str] = {}  # sample -> instance that works on it
        self._moving: dict[str, tuple[str, str]] = {}  # sample -> (instance, route) it goes to

    async def submit(self, groups: Iterable[tuple[list[SampleRequest], Forecast | None]]) -> None:
        """Takes groups that are to be placed together, each with its requests and its forecast."""
        new = []
        for requests, forecast in groups:
            for request in requests:
                self.requests[request.sample_id] = request
                new.append(Request(request.sample_id, request.group_id, forecast, len(request.prompt_tokens)))
        self.policy.submit(new)
        await self._dispatch()

    async def finished(self, sample_id: str, length: int) -> None:
        """A sample has come."""
        self.requests.pop(sample_id, None)
        self._moving.pop(sample_id, None)
        self._at.pop(sample_id, None)
        self.policy.finished(sample_id, length)
        await self._dispatch()

    async def released(self, partial: PartialSample) -> None:
        """An instance has taken a request off; it goes on where the policy wanted it."""
        target = self._moving.pop(partial.sample_id, None)
        if target is None:
            return
        instance, route = target
        request = replace(self.requests[partial.sample_id], kept=partial)
        self.requests[partial.sample_id] = request
        self.moves += 1
        await self._start(request, instance, route)

    async def _dispatch(self) -> None:
        for decision in self.policy.decide(self._produced):
            sample_id = decision.request_id
            if not decision.moved:
                await self._start(self.requests[sample_id], decision.instance, decision.route)
                continue
            under_way = sample_id in self._moving
            self._moving[sample_id] = (decision.instance, decision.route)
            if not under_way:
                await self._send(self._at[sample_id], "release", {"sample_id": sample_id}, {})

    async def _start(self, request: SampleRequest, instance: str, route: str) -> None:
        self._at[request.sample_id] = instance
        body, arrays = request_to_wire(request)
        await self._send(instance, "generate", body | {"route": route}, arrays)

    def _produced(self, sample_id: str) -> float:
        kept = self.requests[sample_id].kept
        return max(self._told(sample_id), len(kept.completion_tokens) if kept else 0)
