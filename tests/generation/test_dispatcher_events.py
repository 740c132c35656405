"""A dispatcher among instances that fall silent, die, load weights and return, in any order that they may."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scheduler.cost.decode import StepCurve
from scheduler.cost.length_forecast import Forecast
from scheduler.dispatch.baselines import LeastLoaded
from scheduler.dispatch.policy import Assignment, TokenProgress
from scheduler.dispatch.registry import POLICIES as ALL
from scheduler.dispatch.registry import make_policy, objective_of
from streamrl.generation.site.dispatcher import Dispatcher
from streamrl.rollouts.types import PartialSample, SampleRequest
from streamrl.transport.wire import Arrays
from tests.generation.dispatching import Scripted, dispatcher, requests

LIMIT = 64
EVENTS = 200
ROOT = Path(__file__).parents[2]
RESTLESS = "restless"
POLICIES = ("skew-aware", "least-loaded", "group-probe", "longest-first", RESTLESS)
KEPT = "kept.completion_tokens"


def part(sample_id: str, tokens: int) -> PartialSample:
    return PartialSample(
        sample_id, np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.float32), np.zeros(tokens, np.int32), 0.0, 0.0
    )


class Restless(LeastLoaded):
    """Least-loaded dispatch that moves running requests at random."""

    def __init__(self, random: random.Random) -> None:
        super().__init__()
        self.random = random

    def decide(self, produced: TokenProgress | None = None) -> list[Assignment]:
        decisions = super().decide(produced)
        for target in list(self.instances.values()):
            others = [request for one in self.instances.values() if one is not target for request in one.running]
            if target.free > 0 and others and self.random.random() < 0.2:
                moved = self.random.choice(others)
                decisions.append(self.start(self.where[moved].running[moved], target))
        return decisions


@dataclass
class Instance:
    """An instance that produces tokens when it is its turn, and reads its messages late."""

    joined: tuple[int, StepCurve | None, str]
    """Its slots, curve and pool."""
    running: dict[str, list[int | None]] = field(default_factory=dict)
    """Tokens of each request, and the tokens at which it is parked."""
    unread: list[tuple[str, dict[str, Any], Arrays]] = field(default_factory=list)
    silent: bool = False
    suspect: bool = False
    loads: bool = False
    slowness: float = 1.0


class World:
    """A dispatcher, its instances, and requests of known lengths."""

    def __init__(self, policy: str, seed: int, slow_sends: bool = False) -> None:
        self.random = random.Random(seed)
        objective = objective_of(self.random.choice(["sync", "stream"]))
        self.policy = Restless(self.random) if policy == RESTLESS else make_policy(policy, LIMIT, 4, objective)
        self.dispatcher = Dispatcher(self.policy, self.send, self.produced)
        self.instances: dict[str, Instance] = {}
        self.lengths: dict[str, int] = {}
        self.noted: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.slow_sends = slow_sends
        self.sent: list[tuple[str, str, str]] = []
        """(instance, kind, request) of every message."""
        self.throttled = False
        self.used: set[str] | None = None
        """Instances of the last `use`."""

    def produced(self, instance: str, sample_id: str) -> float:
        one = self.instances.get(instance)
        return float(one.running[sample_id][0] or 0) if one and sample_id in one.running else 0.0

    async def send(self, instance: str, kind: str, body: dict[str, Any], arrays: Arrays) -> None:
        self.sent.append((instance, kind, body["sample_id"]))
        if (one := self.instances.get(instance)) is not None and kind != "release":
            assert not one.suspect and not one.loads and (self.used is None or instance in self.used)
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
        curve = self.random.choice([None, StepCurve((1, 8), (0.01 * factor, 0.02 * factor), 0, 1e-5)])
        joined = self.random.randint(1, 6), curve, self.random.choice(["regular", "tail"])
        self.instances[name] = Instance(joined)
        await self.dispatcher.join(name, *joined)

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
        for name, one in list(self.instances.items()):
            one.silent = False
            missed, one.loads = one.loads, False
            if missed:
                await self.dispatcher.unhold(name, "weights")
            if one.suspect and not self.dispatcher.owes(name):
                one.suspect = False
                if missed:  # it is admitted as one that is new
                    one.slowness = 1.0
                    self.dispatcher.leave(name)
                    await self.dispatcher.join(name, *one.joined)
                else:
                    await self.dispatcher.unhold(name, "silent")

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
                one.slowness = self.random.choice([1.0, 2.0])
                await self.dispatcher.slow(name, one.slowness)

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
            await self.throttle(self.random.random() < 0.4)
        elif chance < 0.38:
            await self.dispatcher.park(self.random.sample(sorted(self.lengths), min(len(self.lengths), 3)))
        elif chance < 0.44:
            await self.dispatcher.resume(sorted(self.dispatcher.parked), self.random.choice([None, 5, 20]))
        elif chance < 0.47 and names:
            await self.use(self.random.sample(names, max(1, len(names) - 1)))
        else:
            await self.work(0.7)

    async def work(self, chance: float) -> None:
        for name in list(self.instances):
            if self.random.random() < chance and name in self.instances:
                await self.read(name)
            if self.random.random() < chance and name in self.instances:
                await self.generate(name)

    async def throttle(self, on: bool) -> None:
        self.throttled = on
        await self.dispatcher.throttle(on)

    async def use(self, names: list[str]) -> None:
        self.used = set(names)
        await self.dispatcher.use(names)

    def check(self) -> None:
        """The policy knows what waits, and of what runs all that keeps its slot: neither more nor less.

        What each instance works on agrees with where each request is. Something runs while anything waits.
        """
        known = self.dispatcher
        assert {sample_id: name for name in known._work for sample_id in known.works_on(name)} == known._at
        waiting = [name for name in known.requests if name not in known._at and name not in known.parked]
        assert self.policy.waiting == len(waiting)
        stays = {
            one: at for one, at in known._at.items() if one not in known._releasing and at in self.policy.instances
        }
        moves = {sample_id: target for sample_id, (target, _) in known._moving.items()}
        assert {sample_id: one.name for sample_id, one in self.policy.where.items()} == stays | moves
        for name, instance in self.policy.instances.items():
            assert instance.free >= 0 and instance.slowness == self.instances[name].slowness
        assert self.throttled or not waiting or not self.policy.instances or self.policy.where

    async def play(self) -> None:
        for _ in range(EVENTS):
            await self.event()
            self.check()
        await self.end()

    async def play_together(self) -> None:
        """Play as `play` does, but orders, messages, troubles and weights come while others are handled."""
        for _ in range(EVENTS):
            await asyncio.gather(self.order(), self.work(0.7), self.change(), self.load())
            self.check()
        self.slow_sends = False
        await self.end()

    async def order(self) -> None:
        match self.random.choice(["submit", "throttle", "park", "resume", "use", "abandon"]):
            case "submit" if len(self.lengths) < 200:
                await self.submit()
            case "throttle":
                await self.throttle(self.random.random() < 0.2)
            case "park":
                await self.dispatcher.park(self.random.sample(sorted(self.lengths), min(len(self.lengths), 5)))
            case "resume":
                await self.dispatcher.resume(sorted(self.dispatcher.parked), self.random.choice([None, 5, 20]))
            case "use" if self.instances:
                names = list(self.instances)
                await self.use(self.random.sample(names, max(1, len(names) - 1)))
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

    async def load(self) -> None:
        """Let an instance begin or end a load of weights, even if it falls silent or dies meanwhile."""
        name = self.random.choice([*self.instances, ""])
        if name and not (one := self.instances[name]).suspect:
            one.loads = not one.loads
            if one.loads:
                await self.dispatcher.hold(name, requeue=self.random.random() < 0.5, why="weights")
            else:
                await self.dispatcher.unhold(name, "weights")

    async def end(self) -> None:
        """Let everything end well."""
        await self.throttle(False)
        await self.join()
        for _ in range(3000):
            if self.finished.keys() == self.lengths.keys():
                break
            await self.use(list(self.instances))
            await self.return_all()
            await self.dispatcher.resume(sorted(self.dispatcher.parked))
            await self.work(1.0)
            self.check()
        assert self.finished.keys() == self.lengths.keys() and not self.dispatcher.requests
        await self.return_all()
        for name, one in self.instances.items():
            while one.unread:
                await self.read(name)
            assert not one.running and not self.dispatcher.owes(name) and not self.dispatcher.works_on(name)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_whatever_happens_to_its_instances(policy: str) -> None:
    for seed in range(8):
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
@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_while_messages_are_sent_no_request_is_lost_or_runs_twice(policy: str, seed: int) -> None:
    asyncio.run(World(policy, seed, slow_sends=True).play_together())


def digests() -> str:
    """What is sent in one play of every policy."""
    found = []
    for policy in dict.fromkeys([*POLICIES, *ALL]):
        world = World(policy, 1)
        asyncio.run(world.play())
        found.append(f"{policy} {hashlib.sha256(repr(world.sent).encode()).hexdigest()}")
    return "\n".join(found)


def test_no_decision_depends_on_the_order_of_a_set() -> None:
    """Strings have other hashes in every process, and sets of them another order."""
    command = [sys.executable, "-c", f"from {__name__} import digests; print(digests())"]
    plays = [
        subprocess.run(
            command, env=os.environ | {"PYTHONHASHSEED": seed}, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert plays[0].count("\n") >= len(ALL) and plays[0] == plays[1]
