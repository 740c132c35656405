"""What an instance makes of a new service; if it shares its GPU with the trainer, when it gives the GPU back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scheduler.cost.decode import StepCurve
from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.config.schedule import OnUpdate
from streamrl.generation.instance import instance_process
from streamrl.generation.instance.instance_process import InstanceProcess
from streamrl.generation.instance.running_requests import Worked
from streamrl.generation.instance.sample_parts import UNNAMED_VERSION
from streamrl.generation.site.pace import Stretches, WorkedCurve
from streamrl.machine.gpus import VISIBLE
from streamrl.protocol.message import TypedMessage, kind_of, wire
from streamrl.protocol.samples import request_to_wire
from streamrl.protocol.site_instance import (
    ApplyWeights,
    InstanceAsleep,
    SleepInstance,
    TakeWeights,
    WeightsApplied,
    WeightsMissed,
)
from streamrl.rollouts.types import PartialSample, SampleRequest
from streamrl.runtime.device_turns import DeviceTurns
from streamrl.runtime.process_context import Addresses, RoleContext
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Hub
from tests.waiting import holds, scaled, until

CLUSTER = ClusterConfig.model_validate({"hardware": "cuda", "sites": {"here": {"trainer": {}, "generation": [{}]}}})
RUN = RunConfig.model_validate({"schedule": {"name": "colocated"}})
APART = RunConfig.model_validate({"schedule": {"name": "async", "on_update": "wait"}})
"""Trainer and instance have GPUs of their own, and running requests end before weights are loaded."""
NAME, SERVICE = "here-regular-0", "service-here"


class StandIn:
    """An engine whose requests run until they are released."""

    caches_prefixes = False
    busy_since = None
    version, line = UNNAMED_VERSION, 0

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Future[PartialSample]] = {}
        self.did: list[str] = []

    @property
    def begun(self) -> frozenset[str]:
        return frozenset(self._running)

    @property
    def running(self) -> int:
        return len(self._running)

    async def generate(self, request: SampleRequest, route: str) -> PartialSample:
        self._running[request.sample_id] = released = asyncio.get_running_loop().create_future()
        return await released

    async def release(self, sample_id: str) -> None:
        none = np.zeros(0, np.int32)
        partial = PartialSample(sample_id, none, none.astype(np.float32), none, 1.0, 1.0)
        self._running.pop(sample_id).set_result(partial)

    async def sleep(self) -> None:
        assert not self.running
        self.did.append("sleep")

    async def wake_up(self) -> None:
        self.did.append("wake up")

    async def wake_for_update(self) -> None:
        self.did.append("take memory")

    async def pause(self, on_update: OnUpdate, version: int) -> None:
        self.version = version
        self.did.append("pause")
        await until(lambda: on_update != "wait" or not self.running)

    async def resume(self) -> None:
        self.did.append(f"resume with {self.version}")

    async def start_weight_update(self) -> None: ...
    async def update_weights(self, info: dict[str, Any]) -> None: ...
    async def finish_weight_update(self, number: int) -> None: ...
    async def measure_canary(self) -> None: ...
    async def teach_drafter(self) -> None: ...

    def worked(self) -> Worked:
        return Worked()

    def produced(self) -> dict[str, int]:
        return {}

    def progress(self, known: dict[str, int]) -> list[Any]:
        return []


class Site:
    """The site of one instance: its service, which may be replaced, and its trainer's turn on the GPU."""

    def __init__(self, folder: Path, run: RunConfig = RUN) -> None:
        self.engine, self.address = StandIn(), f"ipc://{folder}/service"
        self.stored = {3}
        """Versions in the site's store."""
        addresses = Addresses("", "", {"here": self.address})
        self.instance = InstanceProcess(RoleContext(NAME, "here", folder, CLUSTER, run, addresses, False), "regular")
        self.instance.engine = self.engine  # type: ignore[assignment]
        self.instance.worked = WorkedCurve(StepCurve((1,), (0.01,)), (1,))
        self.instance.stretches = Stretches(self.instance.worked.start, Worked())
        self.trainer = DeviceTurns(folder, ["0"], WaitRegistry("trainer-0"))

    async def service(self) -> Hub:
        """A new service, once the instance has said hello to it."""
        hub = Hub(SERVICE, WaitRegistry(SERVICE)).bind(self.address)
        await hub.wait_for({NAME}, scaled(30))
        return hub

    async def tell(self, service: Hub, order: TypedMessage, arrays: Any = None) -> None:
        await service.send(NAME, *wire(order), arrays)

    async def generate(self, service: Hub) -> None:
        """The instance runs a request."""
        order, arrays = request_to_wire(SampleRequest("g.0", "g", np.arange(4, dtype=np.int32), 1, 0.0), "regular")
        await self.tell(service, order, arrays)
        await until(lambda: self.engine.running)

    async def answers(self, service: Hub, *kinds: type[TypedMessage]) -> None:
        """The next messages of the instance are these."""
        for kind in kinds:
            delivery = await asyncio.wait_for(service.receive(), scaled(30))
            delivery.ack()
            assert delivery.kind == kind_of(kind)


def play(
    folder: Path, monkeypatch: pytest.MonkeyPatch, body: Callable[[Site], Awaitable[None]], run: RunConfig = RUN
) -> None:
    """An instance serves, with its GPU to itself."""

    async def connect(context: object, link: Any, hub: str, address: str) -> None:
        await link.connect(address)

    monkeypatch.setenv(VISIBLE, "0")
    monkeypatch.setattr(instance_process, "connect_inside", connect)

    async def started() -> None:
        site = Site(folder, run)
        store = SimpleNamespace(has=lambda number: number in site.stored)
        monkeypatch.setattr(instance_process, "WeightStore", lambda folder: store)
        turns = site.instance.turns
        assert (turns is not None) == (run is RUN)
        if turns:
            await turns.take(scaled(5))
        serving = asyncio.create_task(site.instance._serve())
        try:
            await body(site)
        finally:
            assert not serving.done(), serving.exception()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            site.trainer.give_back()
            if turns:
                turns.give_back()

    asyncio.run(started())


def test_the_trainer_of_a_run_that_goes_back_gets_the_gpu_of_an_instance_that_was_generating(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(site: Site) -> None:
        service = await site.service()
        await site.generate(service)
        waiting = asyncio.create_task(site.trainer.take(scaled(60)))  # as it starts, before it connects to anybody
        await holds(lambda: not waiting.done(), 0.2)
        await service.close()
        service = await site.service()
        await waiting
        assert site.engine.did == ["sleep"] and not site.engine.running

        await site.tell(service, ApplyWeights(number=3, content_hash=""))
        await holds(lambda: site.engine.did == ["sleep"], 0.2)
        site.trainer.give_back()
        await site.answers(service, WeightsApplied)
        assert site.engine.did == ["sleep", "take memory", "wake up"]
        await service.close()

    play(tmp_path, monkeypatch, body)


def test_a_clock_that_is_set_back_while_weights_are_loaded_makes_no_load_end_before_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(site: Site) -> None:
        service = await site.service()
        push = TakeWeights(call="c", step="pause", number=3)
        for order in (ApplyWeights(number=3, content_hash=""), push):
            times = iter([5000.0])
            monkeypatch.setattr(site.instance, "_clock", lambda times=times: next(times, 1400.0))
            await site.tell(service, order)
            delivery = await asyncio.wait_for(service.receive(), scaled(30))
            delivery.ack()
            assert delivery.body["finished"] >= delivery.body["started"] == 5000.0
        await service.close()

    play(tmp_path, monkeypatch, body)


def test_an_instance_that_is_told_twice_to_sleep_answers_twice_and_sleeps_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(site: Site) -> None:
        service = await site.service()
        for _ in range(2):
            await site.tell(service, SleepInstance())
            await site.answers(service, InstanceAsleep)
        assert site.engine.did == ["sleep"]
        await site.trainer.take(scaled(5))
        await service.close()

    play(tmp_path, monkeypatch, body)


def test_weights_that_a_restarted_service_no_longer_has_when_requests_have_ended_are_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(site: Site) -> None:
        service = await site.service()
        await site.generate(service)
        await site.tell(service, ApplyWeights(number=3, content_hash=""))
        await until(lambda: site.engine.did == ["pause"])
        assert site.instance._doing() == "updating"
        await service.close()
        site.stored.clear()
        service = await site.service()  # the running request is given up, and the pause is over
        await site.answers(service, WeightsMissed)
        assert site.engine.did == ["pause", f"resume with {UNNAMED_VERSION}"]
        assert site.instance._doing() == "idle" and site.instance.version == UNNAMED_VERSION

        site.stored.add(2)
        await site.tell(service, ApplyWeights(number=2, content_hash=""))
        await site.answers(service, WeightsApplied)
        assert site.engine.did[2:] == ["pause", "resume with 2"] and site.instance.version == 2
        await service.close()

    play(tmp_path, monkeypatch, body, APART)


def test_weights_that_are_gone_once_the_trainer_has_left_the_gpu_are_missed_by_an_instance_that_sleeps_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(site: Site) -> None:
        service = await site.service()
        await site.tell(service, SleepInstance())
        await site.answers(service, InstanceAsleep)
        await site.trainer.take(scaled(5))
        await site.tell(service, ApplyWeights(number=3, content_hash=""))
        await holds(lambda: site.engine.did == ["sleep"], 0.2)
        site.stored.clear()
        site.trainer.give_back()
        await site.answers(service, WeightsMissed)
        assert site.engine.did == ["sleep"] and site.instance._doing() == "asleep"
        await site.trainer.take(scaled(5))
        await service.close()

    play(tmp_path, monkeypatch, body)


def test_weights_of_a_new_service_are_of_another_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run may have gone back to a checkpoint: what it has under a number from then on are other weights."""

    async def body(site: Site) -> None:
        for line in (0, 1):
            service = await site.service()
            for _ in range(2):
                await site.tell(service, ApplyWeights(number=3, content_hash=""))
                await site.answers(service, WeightsApplied)
                assert site.engine.line == line
            await service.close()

    play(tmp_path, monkeypatch, body, APART)


def test_a_standstill_of_the_machine_is_none_of_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(instance_process, "time", SimpleNamespace(monotonic=lambda: now, time=time.time))
    site = Site(tmp_path, APART)

    def stalled_s(passed_s: float) -> float:
        nonlocal now
        now += passed_s
        found: float = site.instance._state()["stalled_s"]
        return found

    async def body() -> None:
        assert stalled_s(50.0) == 0.0
        running = asyncio.create_task(site.engine.generate(SampleRequest("g.0", "g", np.arange(4), 1, 0.0), "regular"))
        await until(lambda: site.engine.running)
        assert stalled_s(300.0) <= 2.0
        before = stalled_s(1.0)
        for beat in range(1, 70):
            assert stalled_s(1.0) == pytest.approx(before + beat)
        await site.engine.release("g.0")
        await running
        assert stalled_s(1.0) == 0.0

    asyncio.run(body())
