"""The dispatcher: what the policy decides reaches the instances, and moved requests keep their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from scheduler.cost import StepCurve
from scheduler.forecast import Forecast
from scheduler.planned import SkewAware
from scheduler.policy import REGULAR, TAIL, Assignment, Fleet, Progress, Request
from streamrl.generation.dispatcher import Dispatcher
from streamrl.generation.messages import request_from_wire
from streamrl.rollouts.types import PartialSample, SampleRequest
from streamrl.transport.wire import Arrays

Sent = list[tuple[str, str, dict[str, Any], Arrays]]


class Scripted(Fleet):
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

    def finished(self, request_id: str, length: float | None = None) -> None:
        self.ended.append((request_id, length))
        super().finished(request_id, length)

    def decide(self, produced: Progress | None = None) -> list[Assignment]:
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
    return [SampleRequest(name, name[0], np.arange(5, dtype=np.int32), 1, 1, 0.0) for name in names]


def part(name: str, tokens: int) -> PartialSample:
    ids = np.arange(tokens, dtype=np.int32)
    return PartialSample(name, ids, ids.astype(np.float32), np.zeros(tokens, np.int32), 1.0, 2.0)


def dispatcher(policy: Any, told: dict[str, int] | None = None) -> tuple[Dispatcher, Sent]:
    sent: Sent = []

    async def send(instance: str, kind: str, body: dict[str, Any], arrays: Arrays) -> None:
        sent.append((instance, kind, body, arrays))

    return Dispatcher(policy, send, lambda name: (told or {}).get(name, 0)), sent


def test_a_moved_request_goes_on_with_its_tokens() -> None:
    policy = Scripted()
    told: dict[str, int] = {}
    work, sent = dispatcher(policy, told)

    async def body() -> None:
        await work.submit([(requests("g.0", "g.1"), None)])
        assert [(to, kind, b["sample_id"], b["route"]) for to, kind, b, _ in sent] == [
            ("a", "generate", "g.0", REGULAR),
            ("a", "generate", "g.1", REGULAR),
        ]
        sent.clear()
        told["g.1"] = 3
        policy.to_move = [("g.1", "b")]
        await work.finished("g.0", 7)
        assert policy.ended == [("g.0", 7)] and policy.seen == {"g.1": 3}
        assert sent == [("a", "release", {"sample_id": "g.1"}, {})]
        sent.clear()
        await work.released(part("g.1", 4))
        (to, kind, b, arrays) = sent.pop()
        assert (to, kind, b["route"]) == ("b", "generate", TAIL)
        again = request_from_wire(b, arrays)
        assert again.kept is not None and again.kept.completion_tokens.tolist() == [0, 1, 2, 3]
        assert (again.kept.t_dispatched, again.prompt_tokens.tolist()) == (1.0, [0, 1, 2, 3, 4])
        assert work.moves == 1
        await work.submit([])
        assert policy.seen == {"g.1": 4}  # what it had produced elsewhere counts until its instance tells more
        await work.finished("g.1", 9)
        assert not work.requests

    asyncio.run(body())


def test_a_request_that_ends_while_it_is_moved_has_ended() -> None:
    policy = Scripted()
    work, sent = dispatcher(policy)

    async def body() -> None:
        await work.submit([(requests("g.0", "g.1"), None)])
        policy.to_move = [("g.1", "b")]
        await work.finished("g.0", 1)
        await work.finished("g.1", 1)
        sent.clear()
        await work.released(part("g.1", 2))  # crossed on the way: of no use any more
        assert not sent and not work.requests and work.moves == 0

    asyncio.run(body())


def test_a_second_move_before_the_first_is_done_changes_the_target_only() -> None:
    policy = Scripted()
    work, sent = dispatcher(policy)

    async def body() -> None:
        await work.submit([(requests("g.0", "g.1", "g.2"), None)])
        sent.clear()
        policy.to_move = [("g.2", "b")]
        await work.finished("g.0", 1)
        policy.to_move = [("g.2", "c")]
        await work.finished("g.1", 1)
        assert [(to, kind) for to, kind, _, _ in sent] == [("a", "release")]
        await work.released(part("g.2", 2))
        assert [(to, kind) for to, kind, _, _ in sent] == [("a", "release"), ("c", "generate")]

    asyncio.run(body())


@pytest.mark.parametrize("known", [True, False], ids=["forecasts", "none"])
def test_a_batch_is_planned_as_a_whole(known: bool) -> None:
    """One long group among short ones: with forecasts it gets an instance of its own, whatever its place."""
    policy = SkewAware(longest=1000)
    steep = StepCurve((1, 2, 32), (0.01, 0.02, 0.32))  # every request more costs as much again
    for name in ("a", "b"):
        policy.join(name, 32, steep)
    work, sent = dispatcher(policy)

    async def body() -> None:
        long, short = Forecast((1000.0,) * 16), Forecast((10.0,) * 16)
        await work.submit([(requests(f"{g}.0"), (long if g == 3 else short) if known else None) for g in range(8)])

    asyncio.run(body())
    at = {b["sample_id"]: to for to, _, b, _ in sent}
    beside = sum(where == at["3.0"] for where in at.values()) - 1
    assert len(at) == 8
    assert (beside == 0) if known else (beside == 3)
