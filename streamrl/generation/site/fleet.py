"""The instances of a site: brought in with the weights that are served, updated, and taken out with nothing lost.

How many each pool is to have is told from outside (`scale`); which instances that makes stands in a file that the
launcher follows (`run_dir/instance_files.py`). An instance's life is in `instance_life.py`: one that dies is started
again, while others go on with what it had, from the token journal. One that falls silent is given up in the same way:
its requests go on elsewhere, and nobody waits for it to load weights. If it is heard again it gets the weights that it
has missed, then requests; if not, it is taken for dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.cost.decode import StepCurve
from scheduler.simulation.generation_simulator import SimulatedInstance
from streamrl.errors import RunFailed
from streamrl.generation.site.dispatcher import Dispatcher
from streamrl.generation.site.instance_life import ALIVE, InstanceLife, Life
from streamrl.generation.site.instance_monitor import WATCH_S, InstanceWatch
from streamrl.generation.site.pending_answers import Answers, InstanceLost
from streamrl.generation.site.step_curves import FleetCurves, differ
from streamrl.generation.site.token_journal import TokenJournal
from streamrl.protocol.message import kind_of
from streamrl.protocol.site_instance import ApplyWeights, InstanceAsleep, Retire, SleepInstance, WeightsApplied
from streamrl.rollouts.types import PartialSample
from streamrl.run_dir.instance_files import WantedInstance, read_started, read_wanted, write_wanted
from streamrl.run_dir.start_stages import waiting_for
from streamrl.runtime.process_context import RoleContext
from streamrl.runtime.process_plan import instance_name, possible_instances
from streamrl.runtime.restart_budget import RestartBudget
from streamrl.transport.deadlines import DeadlineExpired, WaitRegistry
from streamrl.transport.endpoint import Delivery, Hub
from streamrl.transport.wire import Arrays
from streamrl.weights.assembly import path_of
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
        journal: TokenJournal,
        ensure: Callable[[WeightVersion], Awaitable[None]],
        changed: Callable[[], Awaitable[None]],
        parked: Callable[[PartialSample], Awaitable[None]],
    ) -> None:
        """
        Args:
            context: the service's.
            hub: that the instances connect to.
            dispatcher: gives them their requests.
            waits: where waits for them are registered.
            journal: what their running requests have produced.
            ensure: sees to it that a version that was loaded before is still whole in the site's store.
            parked: told of a request that has used up its budget of tokens, as an instance's death has shown.
            changed: told whenever an instance has come, or begins to leave, or has left.
        """
        self.context, self.hub, self.dispatcher, self.waits = context, hub, dispatcher, waits
        self.limits, self.recovery, self.journal = context.run.deadlines, context.run.recovery, journal
        self.budget = RestartBudget.of(context.run.recovery)
        self.lives: dict[str, InstanceLife] = {}
        self._pools = {pool.name: pool for pool in context.cluster.sites[context.site].generation}
        self._wanted = {name: pool.replicas for name, pool in self._pools.items()}
        self._possible = possible_instances(context.cluster, context.run, context.site, context.run_dir)
        self._weights_fetched = path_of(context).fetched
        self._processes: dict[str, int] = {}
        """Number of each instance's newest process, of those that are gone, too."""
        self._curves = FleetCurves(self._pools)
        """As the instances that the run began with have measured them, then as the work of all says."""
        self._ensure, self._changed, self._parked = ensure, changed, parked
        self._served: WeightVersion | None = None
        self._asleep = False
        self._loads: defaultdict[str, set[int]] = defaultdict(set)
        """Versions that each instance was told to load, and has not answered for."""
        self.watch = InstanceWatch(self)
        self._causes: dict[str, str] = {}
        """Of what instances have died, the newest time."""
        self._loading = asyncio.Lock()
        """Nobody comes or goes while weights are loaded."""
        self.answers = Answers(hub, waits)
        self._tasks: set[asyncio.Task[None]] = set()
        self._errors: asyncio.Queue[Exception] = asyncio.Queue()
        """Of what comes and goes."""

    @property
    def ready(self) -> list[str]:
        """Names of the instances that get requests, in order."""
        return sorted(name for name, life in self.lives.items() if life.state is Life.READY)

    @property
    def present(self) -> list[str]:
        """Those that have come and not gone, heard or not, in order."""
        there = (Life.STALE, Life.READY, Life.SUSPECT)
        return sorted(name for name, life in self.lives.items() if life.state in there)

    async def open(self) -> None:
        """Waits for the instances that the run begins with, or that a service before this one has left. They get no
        requests before they have loaded weights that this service knows of.

        Raises:
            DeadlineExpired: naming those that have not come.
            RunFailed: one that the run begins with has died: the next one would die of the same.
        """
        adopted = self._adopt()
        self._reconcile(bring_in=False)
        names = set(self.lives)
        coming = asyncio.ensure_future(self.hub.wait_for(names, self.limits.startup_s, self._say_missing))
        try:
            while not (await asyncio.wait({coming}, timeout=WATCH_S))[0]:
                for name, words in self.ended().items():
                    if not adopted:
                        raise RunFailed(words or f"{name} ended while it was starting")
                    for event in ("died", "restarted"):
                        self.lives[name].on(event)
                    self._processes[name] = self.lives[name].process
                    self._write()
            await coming
        finally:
            coming.cancel()
        for name in sorted(names):
            self._curves.measured(self.lives[name].pool, StepCurve.from_json(self.hub.peers[name].meta["curve"]))
            self.lives[name].on("met")
            if not self._weights_fetched:
                await self._let_in(name)  # the trainer brings their weights

    def _say_missing(self, names: list[str]) -> None:
        self.context.say(waiting_for(names))

    def _adopt(self) -> bool:
        """Takes over the instances that a service before this one has left, whether they still live or not; whether
        there are any."""
        possible = {spec.name: spec for spec in self._possible}
        for one in read_wanted(self.context.run_dir) or []:
            spec = possible[one.name]
            self._processes[one.name] = one.process
            if not one.leaving:
                self.lives[one.name] = InstanceLife(one.name, str(spec.pool), spec.index, one.process)
        if self.lives:
            self._wanted = {
                pool: max(1, sum(life.pool == pool for life in self.lives.values())) for pool in self._wanted
            }
        return bool(self.lives)

    async def run(self) -> None:
        """Watches the instances until cancelled; what goes wrong while they come and go is raised here.

        Raises:
            RunFailed: no instance is left, and none can be started again.
        """
        self._begin(self.watch.run())
        try:
            raise await self._errors.get()
        finally:
            for task in self._tasks:
                task.cancel()

    def being_loaded(self) -> set[int]:
        """Versions that instances may be in the middle of: an old one if it has been silent since."""
        return set().union(*self._loads.values())

    async def scale(self, replicas: Mapping[str, int]) -> None:
        """From now on pools are to have so many instances; that they are is reached in time."""
        self._wanted |= {pool: count for pool, count in replicas.items() if pool in self._pools}
        self._reconcile()
        await self._changed()

    def instances(self) -> list[SimulatedInstance]:
        """Those that are there, with their step times."""
        return [self._simulated(name) for name in self.present]

    def _simulated(self, name: str) -> SimulatedInstance:
        return self._curves.simulated(name, self.lives[name].pool, int(self.hub.peers[name].meta["slots"]))

    def told(self) -> dict[str, dict[str, Any]]:
        """Every instance's pool, where it is in its life, and of what it has died last, by name."""
        return {
            name: {"pool": life.pool, "life": str(life.state), "detail": self._causes.get(name, "")}
            for name, life in self.lives.items()
        }

    async def send(
        self, name: str, kind: str, body: dict[str, Any] | None = None, arrays: Arrays | None = None
    ) -> None:
        """Sends an instance a message; one that has died meanwhile gets nothing."""
        with contextlib.suppress(KeyError):
            await self.hub.send(name, kind, body, arrays)

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
        there = [life for life in self.lives.values() if life.state is not Life.DEAD]
        wanted = [WantedInstance(life.name, life.process, life.state is Life.DRAINING) for life in there]
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
        process = life.process
        try:
            await self._met(life)
        except InstanceLost:
            return  # whoever noticed has seen to it
        except DeadlineExpired as error:
            if life.process == process and life.can("died"):
                await self.died(life, str(error))
            return
        await self._catch_up(life)

    async def _catch_up(self, life: InstanceLife) -> None:
        """A stale instance gets the weights that are served, then requests."""
        process = life.process
        async with self._loading:
            if not (life.process == process and life.can("current")):
                return  # it has died, was retired, or has got weights with the others, meanwhile
            if self._served is None:
                return  # it is let in with the first weights
            await self._ensure(self._served)
            if await self._update(life.name, self._served) is None:
                return  # whoever noticed has seen to it
            if self._asleep and not await self._sleeps(life.name):
                return
            if life.process == process and life.can("current"):
                await self._let_in(life.name)
        await self._changed()

    async def _met(self, life: InstanceLife) -> None:
        """Waits for an instance's present process; the hello of one before is not meant.

        Raises:
            InstanceLost: it was retired, or died.
            DeadlineExpired: it did not come.
        """
        process = life.process
        async with self.waits.deadline(f"{life.name} to start", self.limits.startup_s):
            while True:
                await self.hub.wait_for({life.name}, self.limits.startup_s)
                if not (life.process == process and life.can("met")):
                    raise InstanceLost
                if self.hub.peers[life.name].meta.get("process") == process:
                    break
                self.hub.drop(life.name)
        life.on("met")

    async def _let_in(self, name: str) -> None:
        life = self.lives[name]
        life.on("current")
        self.dispatcher.leave(name)  # one that was silent is held
        self.watch.forget(name)
        one = self._simulated(name)
        await self.dispatcher.join(name, one.slots, one.curve, one.pool)
        log.info("%s is ready", name)

    async def _take_out(self, life: InstanceLife) -> None:
        """An instance gives back what it works on, and ends once all that it has finished is safe."""
        name = life.name
        async with self._loading:  # it may be in the middle of that
            if self.dispatcher.knows(name):
                await self.dispatcher.hold(name, requeue=True, why="leaving")
        async with self.waits.deadline(f"{name} to give back its requests", self.limits.generation_s):
            while self.dispatcher.works_on(name):
                await asyncio.sleep(POLL_S)
        await self.dispatcher.retire(name)
        if name in self.hub.peers:
            with contextlib.suppress(InstanceLost):
                await self.answers.ask(name, Retire(), "bye", self.limits.generation_s)
        life.on("left")
        del self.lives[name]
        log.info("%s has left", name)
        self._reconcile()
        await self._changed()

    # -- dying, and coming back

    def ended(self) -> dict[str, str]:
        """Instances whose present process has ended, as the launcher says, with its last words."""
        return {
            one.name: one.last_words
            for one in read_started(self.context.run_dir)
            if one.exit_code is not None and one.name in self.lives and one.process == self.lives[one.name].process
        }

    async def give_up(self, life: InstanceLife) -> None:
        """An instance is silent: nobody waits for it, and what it had goes on elsewhere if there is anybody else."""
        name = life.name
        waited_for = self.answers.give_up(name)
        if life.can("silent"):
            log.warning("%s is silent", name)
            life.on("silent")
            if self.dispatcher.knows(name):
                await self.dispatcher.hold(name, requeue=False, why="silent")
            await self._changed()
        if waited_for and self._weights_fetched:  # there the trainer brings weights, to those it knows of
            life.missed = True
        if self.dispatcher.works_on(name) and any(other != name for other in self.ready):
            self._log_interrupted(name)
            for partial in await self.dispatcher.hand_over(name, self.journal.kept):
                await self._parked(partial)

    async def take_back(self, life: InstanceLife) -> None:
        """An instance that was silent is heard again; it gets the weights that it has missed, then requests."""
        log.warning("%s is heard again", life.name)
        life.on("heard")
        if life.state is Life.STALE:
            self._begin(self._catch_up(life))
        else:
            await self.dispatcher.unhold(life.name, "silent")
        await self._changed()

    async def died(self, life: InstanceLife, why: str) -> None:
        """What it had goes on elsewhere; it is started again if its budget allows it.

        Raises:
            RunFailed: it does not, and no other instance is left.
        """
        name, leaving = life.name, life.state is Life.DRAINING
        if not leaving and not life.can("died"):
            return  # somebody else has noticed
        log.warning("%s has died: %s", name, why)
        self._log_interrupted(name)
        self._causes[name] = why = why.partition("; the end of ")[0]
        due = None if leaving else life.died(time.monotonic(), self.budget)
        self.hub.drop(name)
        self.answers.give_up(name)
        self._loads.pop(name, None)
        for partial in await self.dispatcher.lost(name, self.journal.kept):
            await self._parked(partial)
        if leaving:
            return  # `_take_out` goes on
        if due is None and not any(other.state in ALIVE for other in self.lives.values()):
            raise RunFailed(
                f"{why}; it has died {len(life.deaths)} times, and no instance is left at {self.context.site}"
            )
        self._write()
        if due is not None:
            self._begin(self._restart(life, due))
        await self._changed()

    def _log_interrupted(self, name: str) -> None:
        """Of a lost instance: its requests, their tokens as it has last told (in a heartbeat or to the journal), and
        how many of them the journal has."""
        told = self.hub.peers[name].state.get("produced", {}) if name in self.hub.peers else {}
        kept = {one: self.journal.kept(one) for one in self.dispatcher.works_on(name)}
        known = {one: len(part.completion_tokens) if part is not None else 0 for one, part in kept.items()}
        counts = len(known), sum(max(told.get(one, 0), n) for one, n in known.items()), sum(known.values())
        log.warning("%s had %d requests with %d tokens, of which %d are in the journal", name, *counts)

    async def _restart(self, life: InstanceLife, due: float) -> None:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        if life.can("restarted"):
            life.on("restarted")
            self._processes[life.name] = life.process
            self._write()
            await self._bring_in(life)

    # -- weights and sleep

    async def update(self, version: WeightVersion) -> dict[str, Loaded]:
        """All instances load a version from the site's store, one after the other if updates are rolling.

        Returns:
            When each stood still.
        """
        async with self._loading:
            names = self.present
            processes = {name: self.lives[name].process for name in names}
            self._served = version
            if self.context.run.schedule.rolling:
                spans = [await self._update(name, version) for name in names]
            else:
                spans = await asyncio.gather(*(self._update(name, version) for name in names))
            self._asleep = False
            loaded = {name: span for name, span in zip(names, spans, strict=True) if span is not None}
            lives = [self.lives[name] for name in loaded if self.lives[name].process == processes[name]]
            stale = [life for life in lives if life.can("current")]
            refined = self._refine()
            for life in stale:
                await self._let_in(life.name)
        if stale or refined:
            await self._changed()
        return loaded

    def _refine(self) -> bool:
        """From new weights on, plans go by the step times that the instances' work has shown; whether any differ from
        those before. (Between, they stay: all plans of a step go by the same.)"""
        known = [name for name in self.present if self.dispatcher.knows(name)]
        for name in known:
            if (told := self.hub.peers[name].state.get("curve")) is not None:
                self._curves.worked(name, self.lives[name].pool, StepCurve.from_json(told))
        changed = False
        for name in known:
            before, now = self.dispatcher.curve_of(name), self._simulated(name).curve
            if before is None or differ(before, now):
                self.dispatcher.measured(name, now)
                changed = True
                steps = ", ".join(f"{1e3 * s:.1f} ms at {b}" for b, s in zip(now.batches, now.seconds, strict=True))
                log.info("%s is planned for by the step times of its work: %s", name, steps)
        return changed

    async def _update(self, name: str, version: WeightVersion) -> Loaded | None:
        """Has one instance load a version, and does with its requests what the run says (`schedule.on_update`). None:
        it died over it, or is silent."""
        if self.lives[name].state is Life.SUSPECT:
            self.lives[name].missed = True
            return None
        on_update = self.context.run.schedule.on_update
        # one that has not been let in has nothing to hold
        held = on_update in ("wait", "abort_and_requeue") and self.dispatcher.knows(name)
        if held:
            await self.dispatcher.hold(name, requeue=on_update == "abort_and_requeue", why="weights")
        try:
            loaded = await self._load(name, version)
        except InstanceLost:
            return None
        except DeadlineExpired as error:
            await self.died(self.lives[name], str(error))
            return None
        if held:
            await self.dispatcher.unhold(name, "weights")
        return loaded

    async def told_of_weights(self, delivery: Delivery) -> None:
        """An instance has loaded a version, or has not found it in the site's store: which is no wonder if the version
        is an old one, that it was to load while it stood still."""
        name, number = delivery.peer, delivery.body.number
        self._loads[name].discard(number)
        if self._served is None or number != self._served.number:
            return
        if isinstance(delivery.body, WeightsApplied):
            self.answers.take(delivery)
        elif self.answers.give_up(name):
            await self.died(self.lives[name], f"{name} has not found version {number} of the weights")

    async def _load(self, name: str, version: WeightVersion) -> Loaded:
        waits_for_requests = self.context.run.schedule.on_update == "wait"
        limit_s = self.limits.weights_s + (self.limits.generation_s if waits_for_requests else 0)
        order = ApplyWeights(number=version.number, content_hash=version.content_hash)
        self._loads[name].add(version.number)
        answer: WeightsApplied = await self.answers.ask(name, order, kind_of(WeightsApplied), limit_s)
        return Loaded(answer.started, answer.finished)

    async def sleep(self) -> None:
        """All instances free their devices for training; new weights wake them up."""
        async with self._loading:
            await asyncio.gather(*(self._sleeps(name) for name in self.present))
            self._asleep = True

    async def _sleeps(self, name: str) -> bool:
        """Has one instance free its devices. False: it died over it, or is silent."""
        if self.lives[name].state is Life.SUSPECT:
            self.lives[name].missed = True
            return False
        try:
            await self.answers.ask(name, SleepInstance(), kind_of(InstanceAsleep), self.limits.weights_s)
        except InstanceLost:
            return False
        except DeadlineExpired as error:
            await self.died(self.lives[name], str(error))
            return False
        return True
