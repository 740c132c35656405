"""What tests of the dispatcher share: a scripted policy, requests, and a dispatcher whose messages are kept."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from scheduler.dispatch.policy import TAIL, Assignment, DispatchPolicy, Request, TokenProgress
from streamrl.generation.site.dispatcher import Dispatcher
from streamrl.rollouts.types import PartialSample, SampleRequest
from streamrl.transport.wire import Arrays

Sent = list[tuple[str, str, dict[str, Any], Arrays]]


class Scripted(DispatchPolicy):
    """Places everything on 'a'; then moves what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.new: list[Request] = []
        self.to_move: list[tuple[str, str]] = []
        self.ended: list[tuple[str, float | None]] = []
        self.seen: dict[str, float] = {}
        self.join("a", 8)
        self.join("b", 8)
        self.join("c", 8)

    @property
    def waiting(self) -> int:
        return len(self.new)

    def submit(self, requests: Iterable[Request]) -> None:
        self.new.extend(requests)

    def withdraw(self, request_ids: AbstractSet[str]) -> None:
        self.new = [request for request in self.new if request.request_id not in request_ids]
        super().withdraw(request_ids)

    def finished(self, request_id: str, length: float | None = None) -> None:
        self.ended.append((request_id, length))
        super().finished(request_id, length)

    def decide(self, produced: TokenProgress | None = None) -> list[Assignment]:
        assert produced is not None
        self.seen = {request_id: produced(request_id) for request_id in self.where}
        decisions = [self.start(request, self.instances["a"]) for request in self.new]
        self.new = []
        for request_id, target in self.to_move:
            request = self.where[request_id].running[request_id]
            decisions.append(self.start(request, self.instances[target], TAIL))
        self.to_move = []
        return decisions


def requests(*names: str) -> list[SampleRequest]:
    return [SampleRequest(name, name[0], np.arange(5, dtype=np.int32), 1, 0.0) for name in names]


def part(name: str, tokens: int) -> PartialSample:
    ids = np.arange(tokens, dtype=np.int32)
    return PartialSample(name, ids, ids.astype(np.float32), np.zeros(tokens, np.int32), 1.0, 2.0)


def dispatcher(policy: Any, told: dict[str, int] | None = None) -> tuple[Dispatcher, Sent]:
    sent: Sent = []

    async def send(instance: str, kind: str, body: dict[str, Any], arrays: Arrays) -> None:
        sent.append((instance, kind, body, arrays))

    return Dispatcher(policy, send, lambda _, name: (told or {}).get(name, 0)), sent


async def give_back(work: Dispatcher, partial: PartialSample) -> bool:
    """Whoever has a request takes it off."""
    return await work.released(partial, owner(work, partial.sample_id))


async def end(work: Dispatcher, sample_id: str, length: int) -> None:
    """Whoever has a request finishes it."""
    await work.finished(sample_id, length, owner(work, sample_id))


def owner(work: Dispatcher, sample_id: str) -> str:
    return next((name for name in "abcd" if work.has(name, sample_id)), "")
