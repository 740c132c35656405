"""A site's store with room for two versions, and an instance that falls silent while it loads one of them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.errors import is_final
from streamrl.generation.site import site_weights, version_room
from streamrl.generation.site.instance_life import InstanceLife, Life
from streamrl.generation.site.service import GenerationService
from streamrl.protocol.controller_site import LoadWeights, WeightsReady
from streamrl.protocol.message import TypedMessage, kind_of
from streamrl.protocol.site_instance import ApplyWeights, WeightsApplied, WeightsMissed
from streamrl.run_dir.instance_files import StartedProcess, write_started
from streamrl.runtime.process_context import Addresses, RoleContext
from streamrl.transport.deadlines import DeadlineExpired
from streamrl.weights.version_store import NoRoom
from tests.tiny_model import save_tiny_model
from tests.waiting import holds, scaled, until
from tests.weights.world import Policy, World, in_world

POOL = {"name": "one", "replicas": 2}
CLUSTER = ClusterConfig.model_validate({"hardware": "cpu", "sites": {"here": {"trainer": {}, "generation": [POOL]}}})


class Site:
    """A service with the instances a, which loads what it is told at once, and b, which falls silent over version 1."""

    def __init__(self, service: GenerationService, world: World, patch: pytest.MonkeyPatch) -> None:
        self.service, self.world, self.policy, self.store = service, world, Policy(), service.weights.store
        self.versions = 2.5
        """Versions that the file system of the store has room for."""
        self.mapped: dict[int, np.ndarray] = {}
        """What b has mapped, by the file's inode."""
        self.loaded: list[int] = []
        """Versions that a has loaded."""
        self.reports: list[TypedMessage] = []
        self.b = InstanceLife("b", "one", 1, 1, Life.READY)
        service.fleet.lives = {"a": InstanceLife("a", "one", 0, 1, Life.READY), "b": self.b}
        peers: Any = {name: SimpleNamespace(state={}, meta={}) for name in "ab"}
        patch.setattr(service.hub, "peers", peers)
        patch.setattr(service.hub, "send", self._send)
        patch.setattr(service.hub, "drop", peers.pop)
        patch.setattr(service.fleet, "changed", AsyncMock())
        patch.setattr(service.reports, "put", self.reports.append)
        patch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=self._free()))

    def _free(self) -> int:
        """Bytes that are free: memory of a deleted file is so once nobody maps it."""
        files = {one.st_ino: one.st_size for one in map(Path.stat, self.store.directory.glob("*.bin"))}
        held = files | {inode: one.nbytes for inode, one in self.mapped.items()}
        return int(self.versions * self.policy.version()[0].nbytes) - sum(held.values())

    async def _send(self, name: str, kind: str, body: dict[str, Any]) -> None:
        if kind != kind_of(ApplyWeights):
            return
        if name == "b":
            inode = (self.store.directory / f"version_{body['number']}.bin").stat().st_ino
            self.mapped[inode] = self.store.open(body["number"])[1]
            asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(self.service.fleet.give_up(self.b)))
        else:
            self.loaded.append(body["number"])
            asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(self.says("a", body["number"])))

    async def says(self, name: str, number: int, kind: Any = WeightsApplied) -> None:
        """An instance reports that it has loaded a version, or has not found it."""
        body = WeightsApplied(number, 1.0, 2.0) if kind is WeightsApplied else kind(number)
        delivery: Any = SimpleNamespace(kind=kind_of(body), peer=name, body=body)
        await self.service.fleet.weights.on_message(delivery)

    async def update(self) -> None:
        """The trainer publishes a version, and the controller has the site load it."""
        version, buffer = self.policy.step()
        await self.world.publisher.publish(version, buffer)
        await self.service._update_weights(LoadWeights(version.version.number, version.version.content_hash, None))

    @property
    def waits(self) -> str:
        """What the service waits for."""
        return "; ".join(one["waiting_for"] for one in self.service.waits.snapshot())


def at_a_site(folder: Path, work: Callable[[Site], Awaitable[None]], **deadlines: float) -> None:
    values = {"model": {"path": str(save_tiny_model(folder / "model"))}, "deadlines": deadlines}
    context = RoleContext(
        "service-here", "here", folder, CLUSTER, RunConfig.model_validate(values), Addresses("", "", {}), False
    )

    @asynccontextmanager
    async def site(world: World) -> AsyncIterator[Site]:
        relay = await world.relay("site", "raw")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(site_weights, "make_relay", lambda *_: relay)
            patch.setattr(version_room, "LET_GO_S", 0.0)
            service = GenerationService(context)
            try:
                yield Site(service, world, patch)
            finally:
                for task in service.fleet._tasks:
                    task.cancel()
                for part in (service.controller, service.weights, service.hub):
                    await part.close()
                service.journal.close()

    async def body(world: World) -> None:
        async with site(world) as there:
            await there.update()
            await there.update()
            assert there.b.state is Life.SUSPECT and there.loaded == [1, 2]
            await work(there)

    in_world(folder, body)


@pytest.mark.parametrize("report", [WeightsApplied, WeightsMissed])
def test_a_version_that_does_not_fit_waits_until_a_silent_instance_is_heard(report: Any, tmp_path: Path) -> None:
    async def work(site: Site) -> None:
        third = asyncio.create_task(site.update())
        await until(lambda: "b to load an older weight version" in site.waits or third.done(), 10)
        assert not third.done() and "no room for weights in" in site.waits
        site.mapped.clear()
        await site.says("b", 1, report)
        await asyncio.wait_for(third, scaled(10))
        assert site.loaded == [1, 2, 3] and isinstance(site.reports[-1], WeightsReady)
        await site.update()
        assert site.loaded == [1, 2, 3, 4]

    at_a_site(tmp_path, work)


def test_a_version_that_does_not_fit_waits_until_a_silent_instance_has_ended(tmp_path: Path) -> None:
    def process(exit_code: int | None) -> None:
        write_started(tmp_path, [StartedProcess("b", "instance", 1, exit_code=exit_code)])

    async def work(site: Site) -> None:
        third = asyncio.create_task(site.update())
        await until(lambda: "b to load an older weight version" in site.waits or third.done(), 10)
        process(None)
        await site.service.fleet.died(site.b, "b was silent for 60 s")
        await holds(lambda: "b to load an older weight version, or to end" in site.waits, 0.3)
        site.mapped.clear()
        process(-9)
        await asyncio.wait_for(third, scaled(10))
        assert site.loaded == [1, 2, 3]

    at_a_site(tmp_path, work)


def test_a_version_that_fits_waits_for_no_silent_instance(tmp_path: Path) -> None:
    async def work(site: Site) -> None:
        site.versions = 3.5
        for _ in range(3):
            await site.update()
        assert site.loaded == [1, 2, 3, 4, 5] and site.b.state is Life.SUSPECT

    at_a_site(tmp_path, work)


def test_a_version_that_does_not_fit_waits_until_an_older_one_has_been_passed_on(tmp_path: Path) -> None:
    async def work(site: Site) -> None:
        coding = ["weights 1 to be compressed"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                site.service.weights, "_publisher", SimpleNamespace(holders=lambda: coding, publish=AsyncMock())
            )
            await site.says("b", 1)  # its memory is now the publisher's
            third = asyncio.create_task(site.update())
            await until(lambda: "weights 1 to be compressed: no room for weights" in site.waits or third.done(), 10)
            await holds(lambda: not third.done(), 0.3)
            site.mapped.clear()
            coding.clear()
            await asyncio.wait_for(third, scaled(10))
        assert site.loaded == [1, 2, 3]

    at_a_site(tmp_path, work)


def test_an_instance_that_keeps_an_old_version_for_too_long_is_named(tmp_path: Path) -> None:
    async def work(site: Site) -> None:
        with pytest.raises(DeadlineExpired, match=r"b to load an older weight version, or to end: no room for weights"):
            await site.update()

    at_a_site(tmp_path, work, heartbeat_s=scaled(0.2), weights_s=scaled(0.2))


def test_no_room_is_final_where_no_instance_keeps_an_old_version(tmp_path: Path) -> None:
    async def work(site: Site) -> None:
        await site.says("b", 1)
        site.mapped.clear()
        site.versions = 1.5
        with pytest.raises(NoRoom) as found:
            await site.update()
        assert is_final(found.value)

    at_a_site(tmp_path, work)


def test_what_an_instance_loaded_late_is_deleted_where_the_next_version_needs_its_room(tmp_path: Path) -> None:
    async def work(site: Site) -> None:
        assert site.store.has(1)
        await site.says("b", 1)
        site.mapped.clear()
        await site.update()
        assert site.loaded == [1, 2, 3] and not site.store.has(1)

    at_a_site(tmp_path, work)
