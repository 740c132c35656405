"""Instances that have missed weights, or their site's sleep: what they are told once they are heard again."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

from streamrl.config.run import RunConfig
from streamrl.generation.site.instance_life import InstanceLife, Life
from streamrl.generation.site.instance_weights import InstanceWeights
from streamrl.generation.site.pending_answers import Answers
from streamrl.protocol.message import kind_of
from streamrl.protocol.site_instance import ApplyWeights, InstanceAsleep, SleepInstance, WeightsApplied
from streamrl.transport.deadlines import WaitRegistry
from streamrl.weights.site_relay import NotPublished
from streamrl.weights.version import WeightVersion

UPDATED = ["a apply_weights", "b apply_weights", "b joins"]


class Fleet:
    """The site's instances a and b, both ready, and what is done with them; each answers what it is told at once."""

    def __init__(self) -> None:
        run = RunConfig.model_validate({"schedule": {"name": "colocated"}})
        self.context, self.limits = SimpleNamespace(run=run), run.deadlines
        self.lives = {name: InstanceLife(name, "pool", n, 1, Life.READY) for n, name in enumerate("ab")}
        self.hub = SimpleNamespace(peers=dict.fromkeys("ab"), send=self._send)
        self.answers = Answers(self.hub, WaitRegistry("service"))  # type: ignore[arg-type]
        self.dispatcher = SimpleNamespace(knows=lambda name: False, unhold=self._unhold)
        self.happened: list[str] = []
        self.replaced = False
        """Whether the served version is damaged, and the trainer's site has a newer one in its place."""
        ready: Any = self
        self.weights = InstanceWeights(ready, self._ensure)

    @property
    def present(self) -> list[str]:
        return sorted(self.lives)

    async def _send(self, name: str, kind: str, body: dict[str, Any]) -> None:
        self.happened.append(f"{name} {kind}")
        number = body.get("number", 0)
        answer = {
            kind_of(SleepInstance): InstanceAsleep(),
            kind_of(ApplyWeights): WeightsApplied(number=number, started=1.0, finished=2.0),
        }[kind]
        delivery: Any = SimpleNamespace(kind=kind_of(answer), peer=name, body=answer)
        asyncio.get_running_loop().call_soon(self.answers.take, delivery)

    async def _unhold(self, name: str, why: str) -> None: ...
    async def _ensure(self, version: WeightVersion) -> None:
        if self.replaced:
            raise NotPublished("a newer one has replaced it", (version.number + 1,))

    async def changed(self) -> None:
        self.happened.append("the controller hears")

    async def admit(self, name: str) -> None:
        self.lives[name].on("current")
        self.happened.append(f"{name} joins")


def test_one_that_was_silent_when_its_site_fell_asleep_leaves_its_devices_once_it_is_heard() -> None:
    async def body() -> None:
        fleet = Fleet()
        await fleet.weights.update(WeightVersion(3, None, ""))
        silent = fleet.lives["b"]
        silent.on("silent")
        fleet.happened.clear()
        await fleet.weights.sleep()
        assert fleet.happened == ["a sleep"]
        silent.on("heard")
        await fleet.weights.catch_up(silent)
        assert fleet.happened == ["a sleep", "b sleep"] and silent.state is Life.STALE
        fleet.happened.clear()
        await fleet.weights.update(WeightVersion(4, None, ""))
        assert sorted(fleet.happened) == [*UPDATED, "the controller hears"]
        assert silent.state is Life.READY

    asyncio.run(body())


def test_one_that_is_not_there_any_more_shows_no_progress() -> None:
    assert Fleet().weights.since_token("c") == math.inf


def test_one_whose_weights_are_damaged_and_were_replaced_by_newer_ones_joins_with_these() -> None:
    async def body() -> None:
        fleet = Fleet()
        await fleet.weights.update(WeightVersion(3, None, ""))
        fleet.lives["b"] = life = InstanceLife("b", "pool", 1, 2, Life.STALE)  # a new process
        fleet.replaced = True
        fleet.happened.clear()
        await fleet.weights.catch_up(life)
        assert life.can("current") and fleet.happened == ["the controller hears"]
        fleet.happened.clear()
        await fleet.weights.update(WeightVersion(4, None, ""))
        assert life.state is Life.READY and sorted(fleet.happened) == [*UPDATED, "the controller hears"]

    asyncio.run(body())
