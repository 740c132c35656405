"""The instances of a site: brought in with the weights that are served, updated, and taken out with nothing lost.

How many each pool is to have is told from outside (`scale`); which instances that makes stands in a file that the
launcher follows (`launch/instances.py`). An instance's life is in `life_cycle.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.cost import StepCurve
from scheduler.simulator import SimulatedInstance
from streamrl.generation.dispatcher import Dispatcher
from streamrl.generation.life_cycle import ALIVE, InstanceLife, Life
from streamrl.launch.context import RoleContext
from streamrl.launch.instances import WantedInstance, write_wanted
from streamrl.launch.plan import instance_name
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Delivery, Hub
from streamrl.weights.version import WeightVersion

log = logging.getLogger(__name__)

POLL_S = 0.02
"""While an instance gives back what it works on."""


@dataclass(frozen=True)
class Loaded:
    """When an instance stood still for new weights; unix seconds of this site's clock."""

    started: float
    finished: float


class SiteFleet:
    """See the module's text."""

    def __init__(
        self,
        context: RoleContext,
        hub: Hub,
        dispatcher: Dispatcher,
        waits: WaitRegistry,
        changed: Callable[[], Awaitable[None]],
    ) -> None:
        """
        Args:
            context: the service's.
            hub: that the instances connect to.
            dispatcher: gives them their requests.
            waits: where waits for them are registered.
            changed: told whenever an instance has come, or begins to leave, or has left.
        """
        self.context, self.hub, self.dispatcher, self.waits = context, hub, dispatcher, waits
        self.limits = context.run.deadlines
        self.lives: dict[str, InstanceLife] = {}
        self._pools = {pool.name: pool for pool in context.cluster.sites[context.site].generation}
        self._wanted = {name: pool.replicas for name, pool in self._pools.items()}
        self._processes: dict[str, int] = {}
        """Number of each instance's newest process, of those that are gone, too."""
        self._curves: list[tuple[str, StepCurve]] = []
        """(pool, step times as measured) of the instances that the run began with: nothing else disturbed them."""
        self._changed = changed
        self._served: WeightVersion | None = None
        self._asleep = False
        self._loading = asyncio.Lock()
        """Nobody comes or goes while weights are loaded."""
        self._answers: dict[tuple[str, str], asyncio.Future[dict[str, Any]]] = {}
        """Expected of an instance: (kind, instance)."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._errors: asyncio.Queue[Exception] = asyncio.Queue()
        """Of what comes and goes."""

    @property
    def ready(self) -> list[str]:
        """Names of the instances that get requests, in order."""
        return sorted(name for name, life in self.lives.items() if life.state is Life.READY)

    async def open(self) -> None:
        """Waits for the instances that the run begins with.

        Raises:
            DeadlineExpired: naming those that have not come.
        """
        self._reconcile(bring_in=False)
        names = set(self.lives)
        await self.hub.wait_for(names, self.limits.startup_s)
        for name in sorted(names):
            self._curves.append((self.lives[name].pool, StepCurve.from_json(self.hub.peers[name].meta["curve"])))
        for name in sorted(names):
            self.lives[name].on("met")
            await self._let_in(name)

    async def run(self) -> None:
        """Until cancelled; what goes wrong while instances come and go is raised here."""
        try:
            raise await self._errors.get()
        finally:
            for task in self._tasks:
                task.cancel()

    async def scale(self, replicas: Mapping[str, int]) -> None:
        """From now on pools are to have so many instances; that they are is reached in time."""
        self._wanted |= {pool: count for pool, count in replicas.items() if pool in self._pools}
        self._reconcile()
        await self._changed()

    def instances(self) -> list[SimulatedInstance]:
        """Those that get requests, with their step times: like ones have the same, their mean, so that plans do not
        take noise for a difference."""
        return [self._simulated(name) for name in self.ready]

    def _simulated(self, name: str) -> SimulatedInstance:
        meta, pool = self.hub.peers[name].meta, self.lives[name].pool
        alike = StepCurve.mean([curve for other, curve in self._curves if self._kind(other) == self._kind(pool)])
        return SimulatedInstance(name, alike, int(meta["slots"]), pool)

    def _kind(self, pool: str) -> tuple[str, int, int]:
        found = self._pools[pool]
        return found.gpu, found.gpus_per_replica, found.threads

    def told(self) -> dict[str, dict[str, Any]]:
        """Every instance's pool and where it is in its life, by name."""
        return {name: {"pool": life.pool, "life": str(life.state)} for name, life in self.lives.items()}

    # -- coming and going

    def _reconcile(self, bring_in: bool = True) -> None:
        """Begins what brings each pool to the number that is wanted of it."""
        for pool, wanted in self._wanted.items():
            alive = sorted((life for life in self.lives.values() if life.pool == pool), key=lambda life: life.index)
            staying = [life for life in alive if life.state in ALIVE]
            for life in staying[wanted:]:
                life.on("retired")
                self._begin(self._take_out(life))
            taken = {life.index for life in alive}
            free = [index for index in range(self._pools[pool].most_replicas) if index not in taken]
            # places of instances that are still leaving are filled once they have left
            for index in free[: max(0, wanted - len(staying))]:
                name = instance_name(self.context.site, pool, index)
                self._processes[name] = self._processes.get(name, 0) + 1
                life = self.lives[name] = InstanceLife(name, pool, index, self._processes[name])
                if bring_in:
                    self._begin(self._bring_in(life))
        self._write()

    def _write(self) -> None:
        wanted = [WantedInstance(i.name, i.process, i.state is Life.DRAINING) for i in self.lives.values()]
        write_wanted(self.context.run_dir, wanted)

    def _begin(self, work: Awaitable[None]) -> None:
        async def watched() -> None:
            try:
                await work
            except Exception as error:
                self._errors.put_nowait(error)

        task = asyncio.create_task(watched())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bring_in(self, life: InstanceLife) -> None:
        """An instance that is being started gets the weights that are served, then requests."""
        await self.hub.wait_for({life.name}, self.limits.startup_s)
        if not life.can("met"):
            return  # it was retired meanwhile
        life.on("met")
        async with self._loading:
            if not life.can("current"):
                return
            if self._served is not None:
                await self._load(life.name, self._served)
                if self._asleep:
                    await self._ask(life.name, "sleep", {}, "asleep", self.limits.weights_s)
            if life.can("current"):
                await self._let_in(life.name)
        await self._changed()

    async def _let_in(self, name: str) -> None:
        life = self.lives[name]
        life.on("current")
        one = self._simulated(name)
        await self.dispatcher.join(name, one.slots, one.curve, one.pool)
        log.info("%s is ready", name)

    async def _take_out(self, life: InstanceLife) -> None:
        """An instance gives back what it works on, and ends once all that it has finished is safe."""
        name = life.name
        async with self._loading:  # it may be in the middle of that
            if self.dispatcher.knows(name):
                await self.dispatcher.hold(name, requeue=True)
        async with self.waits.deadline(f"{name} to give back its requests", self.limits.generation_s):
            while self.dispatcher.works_on(name):
                await asyncio.sleep(POLL_S)
        if self.dispatcher.knows(name):
            await self.dispatcher.retire(name)
        if name in self.hub.peers:
            await self._ask(name, "retire", {}, "bye", self.limits.generation_s)
        life.on("left")
        del self.lives[name]
        log.info("%s has left", name)
        self._reconcile()
        await self._changed()

    # -- weights and sleep

    async def update(self, version: WeightVersion) -> dict[str, Loaded]:
        """All instances load a version from the site's store, one after the other if updates are rolling.

        Returns:
            When each stood still.
        """
        async with self._loading:
            names = self.ready
            self._served = version
            if self.context.run.schedule.rolling:
                spans = [await self._update(name, version) for name in names]
            else:
                spans = await asyncio.gather(*(self._update(name, version) for name in names))
            self._asleep = False
        return dict(zip(names, spans, strict=True))

    async def _update(self, name: str, version: WeightVersion) -> Loaded:
        """Has one instance load a version, and does with its requests what the run says (`schedule.on_update`)."""
        on_update = self.context.run.schedule.on_update
        held = on_update in ("wait", "abort_and_requeue")
        if held:
            await self.dispatcher.hold(name, requeue=on_update == "abort_and_requeue")
        loaded = await self._load(name, version)
        if held:
            await self.dispatcher.unhold(name)
        return loaded

    async def _load(self, name: str, version: WeightVersion) -> Loaded:
        waits_for_requests = self.context.run.schedule.on_update == "wait"
        limit_s = self.limits.weights_s + (self.limits.generation_s if waits_for_requests else 0)
        body = {"number": version.number, "content_hash": version.content_hash}
        answer = await self._ask(name, "apply_weights", body, "applied", limit_s)
        return Loaded(float(answer["started"]), float(answer["finished"]))

    async def sleep(self) -> None:
        """All instances free their devices for training; new weights wake them up."""
        async with self._loading:
            limit_s = self.limits.weights_s
            await asyncio.gather(*(self._ask(name, "sleep", {}, "asleep", limit_s) for name in self.ready))
            self._asleep = True

    async def _ask(self, name: str, kind: str, body: dict[str, Any], answer: str, limit_s: float) -> dict[str, Any]:
        """Sends an instance a command and waits for its answer."""
        future = self._answers[answer, name] = asyncio.get_running_loop().create_future()
        await self.hub.send(name, kind, body)
        async with self.waits.deadline(f"{name} to answer {kind} with {answer}", limit_s):
            return await future

    def answered(self, delivery: Delivery) -> bool:
        """An instance's message; whether it was an answer that is waited for."""
        future = self._answers.pop((delivery.kind, delivery.peer), None)
        if future is not None and not future.done():
            future.set_result(delivery.body)
        return future is not None
