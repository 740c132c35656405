"""A dispatcher among instances that fall silent, die, load weights and return, in any order that they may."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from scheduler.cost.decode import StepCurve
from scheduler.cost.length_forecast import Forecast
from scheduler.dispatch.registry import make_policy, objective_of
from streamrl.generation.site.dispatcher import Dispatcher
from streamrl.rollouts.types import PartialSample, SampleRequest
from streamrl.transport.wire import Arrays
from tests.generation.dispatching import Scripted, dispatcher, requests

LIMIT = 64
EVENTS = 200
POLICIES = ("skew-aware", "least-loaded", "group-probe", "longest-first")
KEPT = "kept.completion_tokens"


def part(sample_id: str, tokens: int) -> PartialSample:
    return PartialSample(
        sample_id, np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.float32), np.zeros(tokens, np.int32), 0.0, 0.0
    )


@dataclass
class Instance:
    """An instance that produces tokens when it is its turn, and reads its messages late."""

    running: dict[str, list[int | None]] = field(default_factory=dict)
    """Tokens of each request, and the tokens at which it is parked."""
    unread: list[tuple[str, dict[str, Any], Arrays]] = field(default_factory=list)
    silent: bool = False
    suspect: bool = False
    loads: bool = False


class World:
    """A dispatcher, its instances, and requests of known lengths."""

    def __init__(self, policy: str, seed: int, slow_sends: bool = False) -> None:
        self.random = random.Random(seed)
        self.policy = make_policy(policy, LIMIT, 4, objective_of(self.random.choice(["sync", "stream"])))
        self.dispatcher = Dispatcher(self.policy, self.send, self.produced)
        self.instances: dict[str, Instance] = {}
        self.lengths: dict[str, int] = {}
        self.noted: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.slow_sends = slow_sends

    def produced(self, instance: str, sample_id: str) -> float:
        one = self.instances.get(instance)
        return float(one.running[sample_id][0] or 0) if one and sample_id in one.running else 0.0

    async def send(self, instance: str, kind: str, body: dict[str, Any], arrays: Arrays) -> None:
        for _ in range(self.random.randint(0, 3) if self.slow_sends else 0):
            await asyncio.sleep(0)
        if instance in self.instances:
            self.instances[instance].unread.append((kind, body, arrays))

    def kept(self, sample_id: str) -> PartialSample | None:
        return part(sample_id, self.noted[sample_id]) if self.noted[sample_id] else None

    async def released(self, name: str, sample_id: str, tokens: int) -> None:
        if self.dispatcher.has(name, sample_id):
            self.noted[sample_id] = max(self.noted[sample_id], tokens)
        assert self.dispatcher.may_return(name, part(sample_id, tokens))
        await self.dispatcher.released(part(sample_id, tokens), name)

    async def read(self, name: str) -> None:
        one = self.instances[name]
        if one.silent or not one.unread:
            return
        kind, body, arrays = one.unread.pop(0)
        sample_id = body["sample_id"]
        if kind != "release":
            had, pause_at = len(arrays.get(KEPT, ())), body.get("pause_at")
            assert sample_id not in one.running and had < self.lengths[sample_id]
            assert pause_at is None or had < pause_at
            one.running[sample_id] = [had, pause_at]
        elif sample_id in one.running:
            await self.released(name, sample_id, one.running.pop(sample_id)[0] or 0)

    async def generate(self, name: str) -> None:
        one = self.instances[name]
        for sample_id in [] if one.silent else list(one.running):
            had, pause_at = one.running[sample_id]
            tokens = min((had or 0) + self.random.randint(0, 6), self.lengths[sample_id], pause_at or LIMIT)
            one.running[sample_id][0] = tokens
            if tokens == self.lengths[sample_id]:
                del one.running[sample_id]
                self.finished[sample_id] += 1
                await self.dispatcher.finished(sample_id, tokens, name)
            elif tokens == pause_at:
                del one.running[sample_id]
                await self.released(name, sample_id, tokens)
            elif self.dispatcher.has(name, sample_id) and self.random.random() < 0.5:
                self.noted[sample_id] = max(self.noted[sample_id], tokens)

    async def join(self) -> None:
        name, factor = f"instance-{self.random.random()}", self.random.choice([1, 10])
        self.instances[name] = Instance()
        curve = self.random.choice([None, StepCurve((1, 8), (0.01 * factor, 0.02 * factor), 0, 1e-5)])
        await self.dispatcher.join(name, self.random.randint(1, 6), curve, self.random.choice(["regular", "tail"]))

    async def submit(self) -> None:
        group, requests = f"g{len(self.lengths)}", []
        for n in range(self.random.randint(1, 4)):
            self.lengths[f"{group}.{n}"] = self.random.randint(1, LIMIT)
            budget = self.random.choice([None, None, self.random.randint(1, 20)])
            prompt = np.arange(5, dtype=np.int32)
            requests.append(SampleRequest(f"{group}.{n}", group, prompt, n, 0.0, None, budget))
        forecast = self.random.choice([None, Forecast.exactly(self.random.randint(1, LIMIT)), Forecast.lognormal(3, 1)])
        await self.dispatcher.submit([(requests, forecast)])

    async def return_all(self) -> None:
        """Let instances be heard again, and get requests as soon as they owe none and have loaded their weights."""
        for name, one in self.instances.items():
            one.silent = False
            if one.suspect and not self.dispatcher.owes(name):
                one.suspect = False
                await self.dispatcher.unhold(name, "silent")
            if one.loads:
                one.loads = False
                await self.dispatcher.unhold(name, "weights")

    async def trouble(self, name: str) -> None:
        """Let one instance fall silent, have its requests handed over, load weights, or die."""
        one, ready = self.instances[name], [other for other in self.instances.values() if not other.suspect]
        match self.random.choice(["silent", "hand over", "weights", "dead", "slow"]):
            case "silent" if not one.suspect:
                one.silent = one.suspect = True
                await self.dispatcher.hold(name, requeue=False, why="silent")
            case "hand over" if one.suspect and ready:
                await self.dispatcher.hand_over(name, self.kept)
            case "weights" if not one.loads:
                one.loads = True
                await self.dispatcher.hold(name, requeue=self.random.random() < 0.5, why="weights")
            case "dead":
                del self.instances[name]
                await self.dispatcher.lost(name, self.kept)
            case "slow":
                await self.dispatcher.slow(name, self.random.choice([1.0, 2.0]))

    async def event(self) -> None:
        chance = self.random.random()
        names = list(self.instances)
        if chance < 0.05 and len(names) < 4:
            await self.join()
        elif chance < 0.1:
            await self.submit()
        elif chance < 0.2 and names:
            await self.trouble(self.random.choice(names))
        elif chance < 0.3:
            await self.return_all()
        elif chance < 0.33:
            await self.dispatcher.throttle(self.random.random() < 0.4)
        elif chance < 0.38:
            await self.dispatcher.park(self.random.sample(sorted(self.lengths), min(len(self.lengths), 3)))
        elif chance < 0.44:
            await self.dispatcher.resume(list(self.dispatcher.parked), self.random.choice([None, 5, 20]))
        elif chance < 0.47 and names:
            await self.dispatcher.use(self.random.sample(names, max(1, len(names) - 1)))
        else:
            await self.work(0.7)

    async def work(self, chance: float) -> None:
        for name in list(self.instances):
            if self.random.random() < chance and name in self.instances:
                await self.read(name)
            if self.random.random() < chance and name in self.instances:
                await self.generate(name)

    def check(self) -> None:
        """The policy knows what waits, and has no request at an instance that has not got it. What each instance works
        on agrees with where each request is."""
        known = self.dispatcher
        assert {sample_id: name for name in known._work for sample_id in known.works_on(name)} == known._at
        waiting = [name for name in known.requests if name not in known._at and name not in known.parked]
        assert self.policy.waiting == len(waiting)
        for sample_id, instance in self.policy.where.items():
            moves_to, _ = known._moving.get(sample_id, ("", ""))
            assert instance.name in (known._at.get(sample_id), moves_to)

    async def play(self) -> None:
        for _ in range(EVENTS):
            await self.event()
            self.check()
        await self.end()

    async def play_together(self) -> None:
        """Play as `play` does, but orders, messages of instances and troubles come while others are handled."""
        for _ in range(EVENTS):
            await asyncio.gather(self.order(), self.work(0.7), self.change())
            self.check()
        self.slow_sends = False
        await self.end()

    async def order(self) -> None:
        match self.random.choice(["submit", "throttle", "park", "resume", "use", "abandon"]):
            case "submit" if len(self.lengths) < 200:
                await self.submit()
            case "throttle":
                await self.dispatcher.throttle(self.random.random() < 0.2)
            case "park":
                await self.dispatcher.park(self.random.sample(sorted(self.lengths), min(len(self.lengths), 5)))
            case "resume":
                await self.dispatcher.resume(list(self.dispatcher.parked), self.random.choice([None, 5, 20]))
            case "use" if self.instances:
                names = list(self.instances)
                await self.dispatcher.use(self.random.sample(names, max(1, len(names) - 1)))
            case "abandon" if self.random.random() < 0.3 and self.dispatcher.requests:
                gone = self.random.sample(sorted(self.dispatcher.requests), 1)
                self.finished.update(gone)
                await self.dispatcher.abandon(gone)

    async def change(self) -> None:
        chance = self.random.random()
        if chance < 0.15 and len(self.instances) < 5:
            await self.join()
        elif chance < 0.5 and self.instances:
            await self.trouble(self.random.choice(list(self.instances)))
        elif chance < 0.8:
            await self.return_all()

    async def end(self) -> None:
        """Let everything end well."""
        await self.dispatcher.throttle(False)
        await self.join()
        for _ in range(3000):
            if self.finished.keys() == self.lengths.keys():
                break
            await self.dispatcher.use(self.instances)
            await self.return_all()
            await self.dispatcher.resume(list(self.dispatcher.parked))
            await self.work(1.0)
            self.check()
        assert self.finished.keys() == self.lengths.keys() and not self.dispatcher.requests


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_whatever_happens_to_its_instances(policy: str) -> None:
    for seed in range(12):
        asyncio.run(World(policy, seed).play())


def test_a_request_may_be_returned_if_it_was_ordered_or_its_budget_is_used_up_or_it_is_another_s() -> None:
    work, _ = dispatcher(Scripted())

    async def body() -> None:
        await work.submit([([replace(one, pause_at=4) for one in requests("g.0", "g.1")], None)])
        assert not work.may_return("a", part("g.0", 3))
        assert work.may_return("a", part("g.0", 4))
        assert work.may_return("b", part("g.0", 3)) and work.may_return("a", part("unknown", 3))
        await work.park(["g.1"])
        assert work.may_return("a", part("g.1", 3))

    asyncio.run(body())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_while_messages_are_sent_no_request_is_lost_or_runs_twice(policy: str, seed: int) -> None:
    asyncio.run(World(policy, seed, slow_sends=True).play_together())
