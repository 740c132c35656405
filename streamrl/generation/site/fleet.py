"""The instances of a site: started with the current weights, updated, restarted, and retired without losing work.

The target number of instances of each pool comes from outside (`scale`). The fleet writes which instances should run
to a file that the launcher follows (`run_dir/instance_files.py`). `instance_life.py` has an instance's states. One that
dies is restarted while others continue its requests from the token journal. One that falls silent is given up in the
same way: its requests continue elsewhere, and weight updates do not wait for it. If it is heard again it gets the
weights that it has missed, then requests; if the silence lasts, it counts as dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from scheduler.cost.decode import StepCurve
from scheduler.simulation.generation_simulator import SimulatedInstance
from streamrl.errors import ErrorCode, RunFailed
from streamrl.generation.site.dispatcher import Dispatcher
from streamrl.generation.site.instance_life import ALIVE, InstanceLife, Life
from streamrl.generation.site.instance_monitor import WATCH_S, InstanceWatch
from streamrl.generation.site.instance_weights import InstanceWeights
from streamrl.generation.site.pending_answers import Answers, InstanceLost
from streamrl.generation.site.step_curves import FleetCurves
from streamrl.generation.site.token_journal import TokenJournal
from streamrl.protocol.site_instance import Retire
from streamrl.rollouts.types import PartialSample
from streamrl.run_dir.instance_files import WantedInstance, read_started, read_wanted, write_wanted
from streamrl.run_dir.start_stages import waiting_for
from streamrl.runtime.device_turns import instance_start_s
from streamrl.runtime.process_context import RoleContext
from streamrl.runtime.process_plan import instance_name, possible_instances
from streamrl.transport.deadlines import DeadlineExpired, WaitRegistry
from streamrl.transport.endpoint import Hub
from streamrl.transport.wire import Arrays
from streamrl.weights.version import WeightVersion

log = logging.getLogger(__name__)

POLL_S = 0.02
"""Seconds between two checks whether a leaving instance has released its requests."""


class SiteFleet:
    """All instances of a site: starts, weight updates, silences, deaths, restarts and departures."""

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
            context: context of the site's service.
            hub: hub that the instances connect to.
            dispatcher: assigns requests to instances.
            waits: registry of waits for instances.
            journal: tokens that running requests have produced.
            ensure: makes sure that a version that was loaded before is still intact in the site's store.
            parked: called with each request whose budget turns out to be used up when its instance is lost.
            changed: called whenever an instance has joined, begins to leave, or has left.
        """
        self.context, self.hub, self.dispatcher, self.waits = context, hub, dispatcher, waits
        self.limits, self.recovery, self.journal = context.run.deadlines, context.run.recovery, journal
        self._startup_s = instance_start_s(context.cluster.hardware == "cuda", context.run)
        """Seconds until an instance has connected."""
        self.lives: dict[str, InstanceLife] = {}
        self._pools = {pool.name: pool for pool in context.cluster.sites[context.site].generation}
        self._wanted = {name: pool.replicas for name, pool in self._pools.items()}
        self._possible = possible_instances(context.cluster, context.run, context.site, context.run_dir)
        self._processes: dict[str, int] = {}
        """Number of each instance's newest process; instances that have left are included."""
        self.curves = FleetCurves(self._pools)
        """Step times measured by the instances that the run began with, later by the work of all instances."""
        self.weights = InstanceWeights(self, ensure)
        self.changed, self._parked = changed, parked
        self.watch = InstanceWatch(self)
        self._opened = False
        """Whether `open` has ended."""
        self._pausing: set[str] = set()
        """Instances that have died and are restarted after a pause."""
        self._causes: dict[str, str] = {}
        """Cause of each instance's latest death."""
        self._dead_processes: dict[str, int] = {}
        """Number of the newest process whose death has been handled, by instance."""
        self._unwritten = ""
        """Why it could not be written which instances should run; '': it is written."""
        self.answers = Answers(hub, waits)
        self._tasks: set[asyncio.Task[None]] = set()
        self._errors: asyncio.Queue[Exception] = asyncio.Queue()
        """Errors of the background tasks; `run` raises the first one."""

    @property
    def ready(self) -> list[str]:
        """Sorted names of the instances that get requests."""
        return sorted(name for name, life in self.lives.items() if life.state is Life.READY)

    @property
    def present(self) -> list[str]:
        """Sorted names of the instances that are connected and not about to leave; silent ones included."""
        there = (Life.STALE, Life.READY, Life.SUSPECT)
        return sorted(name for name, life in self.lives.items() if life.state in there and name in self.hub.peers)

    async def open(self) -> None:
        """Wait for the instances that the run begins with, or that an earlier service has left running.

        They get no requests before they have loaded weights that this service knows of. Of those that an earlier
        service has left, one is enough: those that die are restarted as later in the run, and come then.

        Raises:
            DeadlineExpired: some instances that the run begins with did not connect in time; they are named.
            RunFailed: an instance that the run begins with died; a restarted one would die of the same cause. Or of
                those that an earlier service has left none is left, and none may be restarted.
        """
        adopted = self._adopt()
        self._reconcile(bring_in=False)
        if adopted:
            await self._meet_adopted()
        else:
            await self._meet_first()
        self._opened = True

    async def _meet_first(self) -> None:
        """Wait for all instances that the run begins with."""
        names = set(self.lives)
        hellos = self.hub.wait_for(names, self._startup_s, lambda missing: self.context.say(waiting_for(missing)))
        coming = asyncio.ensure_future(hellos)
        try:
            while not (await asyncio.wait({coming}, timeout=WATCH_S))[0]:
                for name, words in self.ended().items():
                    words = words or f"{name} ended while it was starting"
                    raise RunFailed(words if "\n" in words else ErrorCode.INSTANCE.refer(words))
            await coming
        finally:
            coming.cancel()
        for name in sorted(names):
            self._met(self.lives[name])

    async def _meet_adopted(self) -> None:
        """Wait until an instance is there and no other is starting; those that pause before a restart come later."""
        for life in self.lives.values():
            self._begin(self._bring_in(life))
        said = ""
        while True:
            ended = self.ended()
            for life in list(self.lives.values()):
                if life.name in ended and life.can("died"):
                    await self.died(life, ended[life.name] or f"{life.name} has ended")
            if not self._errors.empty():
                raise self._errors.get_nowait()
            starting = [name for name, life in self.lives.items() if life.state is Life.STARTING]
            if self.present and not starting:
                return
            missing = sorted({*starting, *self._pausing})
            died = ", ".join(self._causes[name] for name in missing if name in self._causes)
            text = waiting_for(missing) + (f" ({died})" if died else "")  # the controller hears of no death yet
            if text != said:
                self.context.say(text)
                said = text
            await asyncio.sleep(POLL_S)

    def _met(self, life: InstanceLife) -> None:
        """Note that an instance has connected.

        Its measured step times count if the run, or this service, begins with it, or if none of its kind are known:
        those of one that comes later would change the plans in the middle of a step.
        """
        meta = self.hub.peers[life.name].meta
        if not (self._opened and self.curves.knows(life.pool)):
            self.curves.measured(life.pool, StepCurve.from_json(meta["curve"]), meta["doubts"])
        life.on("met")

    def _adopt(self) -> bool:
        """Take over the instances that an earlier service has left, alive or not; return whether there are any."""
        possible = {spec.name: spec for spec in self._possible}
        for one in read_wanted(self.context.run_dir) or []:
            spec = possible[one.name]
            self._processes[one.name] = one.process + one.paused
            if not one.leaving:
                self.lives[one.name] = InstanceLife(one.name, str(spec.pool), spec.index, self._processes[one.name])
        if self.lives:
            self._wanted = {
                pool: max(1, sum(life.pool == pool for life in self.lives.values())) for pool in self._wanted
            }
        return bool(self.lives)

    async def run(self) -> None:
        """Watch the instances until cancelled; raise the first error of any background task.

        Raises:
            RunFailed: no instance is left, and none may be restarted.
        """
        self._begin(self.watch.run())
        try:
            raise await self._errors.get()
        finally:
            for task in self._tasks:
                task.cancel()

    async def scale(self, replicas: Mapping[str, int], replace_dead: bool = False) -> None:
        """Set the target number of instances of pools; instances start and leave in the background.

        With `replace_dead`, those of the pools that are dead for good leave, and new ones may have their numbers.
        """
        self._wanted |= {pool: count for pool, count in replicas.items() if pool in self._pools}
        for life in self.lives.values():
            if replace_dead and life.pool in replicas and self._is_dead_for_good(life):
                self._begin(self._leave_dead(life))
        self._reconcile()
        await self.changed()

    def instances(self) -> list[SimulatedInstance]:
        """Return the instances that are present, with their step times."""
        return [self.simulated(name) for name in self.present]

    def simulated(self, name: str) -> SimulatedInstance:
        return self.curves.simulated(name, self.lives[name].pool, int(self.hub.peers[name].meta["slots"]))

    def states(self) -> dict[str, dict[str, Any]]:
        """Return the fields of every instance's `protocol.controller_site.InstanceState`, by name."""
        return {
            name: {
                "pool": life.pool,
                "life": str(life.state),
                "detail": self._causes.get(name, ""),
                "for_good": self._is_dead_for_good(life),
            }
            for name, life in self.lives.items()
        }

    def _is_dead_for_good(self, life: InstanceLife) -> bool:
        return life.state is Life.DEAD and life.name not in self._pausing

    async def send(
        self, name: str, kind: str, body: dict[str, Any] | None = None, arrays: Arrays | None = None
    ) -> None:
        """Send an instance a message; a no-op for one that has died meanwhile."""
        with contextlib.suppress(KeyError):
            await self.hub.send(name, kind, body, arrays)

    # -- starting and leaving

    def _reconcile(self, bring_in: bool = True) -> None:
        """Start or retire instances until each pool has its target number."""
        for pool, wanted in self._wanted.items():
            alive = sorted((life for life in self.lives.values() if life.pool == pool), key=lambda life: life.index)
            staying = [life for life in alive if life.state in ALIVE or life.name in self._pausing]
            for life in staying[wanted:]:
                self._pausing.discard(life.name)
                life.on("retired")
                self._begin(self._take_out(life))
            taken = {life.index for life in alive}
            free = [index for index in range(self._pools[pool].most_replicas) if index not in taken]
            # the index of an instance that is still leaving is reused only once it has left
            for index in free[: max(0, wanted - len(staying))]:
                name = instance_name(self.context.site, pool, index)
                self._processes[name] = self._processes.get(name, 0) + 1
                life = self.lives[name] = InstanceLife(name, pool, index, self._processes[name])
                if bring_in:
                    self._begin(self._bring_in(life))
        self._write()

    def _write(self) -> None:
        wanted = [
            WantedInstance(life.name, life.process, life.state is Life.DRAINING, life.name in self._pausing)
            for life in self.lives.values()
            if life.state is not Life.DEAD or life.name in self._pausing
        ]
        try:
            write_wanted(self.context.run_dir, wanted)
            self._unwritten = ""
        except OSError as error:  # a full disk ends no site: what runs goes on meanwhile
            problem = error.strerror or str(error)
            if not self._unwritten:
                self._begin(self._write_again())
            if problem != self._unwritten:
                log.warning("cannot write which instances should run, and will try again: %s", problem)
            self._unwritten = problem

    async def _write_again(self) -> None:
        while self._unwritten:
            await asyncio.sleep(WATCH_S)
            self._write()

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
        """Wait for a starting instance, give it the served weights, then requests."""
        process = life.process
        try:
            await self._await_hello(life)
        except InstanceLost:
            return  # handled where the loss was noticed
        except DeadlineExpired as error:
            if life.process == process and life.can("died"):
                await self.died(life, str(error))
            return
        await self.weights.catch_up(life)

    async def _await_hello(self, life: InstanceLife) -> None:
        """Wait for the hello of an instance's current process; that of an earlier process does not count.

        Raises:
            InstanceLost: the instance was retired, or died.
            DeadlineExpired: the process did not connect in time.
        """
        process = life.process
        async with self.waits.deadline(f"{life.name} to start", self._startup_s):
            while True:
                await self.hub.wait_for({life.name}, self._startup_s)
                if not (life.process == process and life.can("met")):
                    raise InstanceLost
                if self.hub.peers[life.name].meta.get("process") == process:
                    break
                self.hub.drop(life.name)
        self._met(life)

    async def admit(self, name: str) -> None:
        life = self.lives[name]
        life.on("current")
        self.dispatcher.leave(name)  # clears the hold of one that was silent
        self.watch.forget(name)
        one = self.simulated(name)
        await self.dispatcher.join(name, one.slots, one.curve, one.pool)
        log.info("%s is ready", name)

    async def _take_out(self, life: InstanceLife) -> None:
        """Have an instance release its requests, and end it once all its finished samples are acknowledged."""
        name = life.name
        async with self.weights.lock:  # it may be loading weights
            if self.dispatcher.knows(name):
                await self.dispatcher.hold(name, requeue=True, why="leaving")
        async with self.waits.deadline(f"{name} to release its requests", self.limits.generation_s):
            while self.dispatcher.works_on(name):
                await asyncio.sleep(POLL_S)
        self.dispatcher.leave(name)
        if name in self.hub.peers:
            with contextlib.suppress(InstanceLost):
                await self.answers.ask(name, Retire(), "bye", self.limits.generation_s)
        await self._left(life)

    async def _leave_dead(self, life: InstanceLife) -> None:
        """Free the number of an instance that is dead for good."""
        async with self.weights.lock:  # an update that began before its death may still count it
            if self.lives.get(life.name) is not life:
                return  # it has left for an earlier command
            life.on("retired")
        await self._left(life)

    async def _left(self, life: InstanceLife) -> None:
        life.on("left")
        del self.lives[life.name]
        self._causes.pop(life.name, None)  # a new one may get its number
        self.curves.forget(life.name)
        log.info("%s has left", life.name)
        self._reconcile()
        await self.changed()

    # -- silence, death and restart

    def ended(self) -> dict[str, str]:
        """Return the last words of each instance whose current process has ended, according to the launcher."""
        return {
            one.name: one.last_words
            for one in read_started(self.context.run_dir)
            if one.exit_code is not None and one.name in self.lives and one.process == self.lives[one.name].process
        }

    async def give_up(self, life: InstanceLife) -> None:
        """Stop waiting for a silent instance; its requests continue elsewhere if another instance is ready."""
        name = life.name
        waited_for = self.answers.give_up(name)
        if life.can("silent"):
            log.warning("%s is silent", name)
            life.on("silent")
            if self.dispatcher.knows(name):
                await self.dispatcher.hold(name, requeue=False, why="silent")
            await self.changed()
        if waited_for:
            life.missed = True
        if self.dispatcher.works_on(name) and self.ready:
            self._log_interrupted(name)
            for partial in await self.dispatcher.hand_over(name, self.journal.kept):
                await self._parked(partial)

    async def take_back(self, life: InstanceLife) -> None:
        """Readmit an instance that was silent: it gets the weights that it has missed, then requests."""
        log.warning("%s is heard again", life.name)
        life.on("heard")
        if life.state is Life.STALE:
            self._begin(self.weights.catch_up(life))
        else:
            await self.dispatcher.unhold(life.name, "silent")
        await self.changed()

    async def died(self, life: InstanceLife, why: str) -> None:
        """Continue a dead instance's requests elsewhere, and restart it if its budget allows it.

        Raises:
            RunFailed: the budget is used up, and no other instance is left.
        """
        name, leaving = life.name, life.state is Life.DRAINING
        handled = not life.can("died")
        if leaving:  # it stays so until it is taken out, and one that was only silent may come back and die
            handled = self._dead_processes.get(name) == life.process and name not in self.hub.peers
        if handled:
            return
        self._dead_processes[name] = life.process
        log.warning("%s has died: %s", name, why)
        self._log_interrupted(name)
        self._causes[name] = why = why.partition("; the end of ")[0]
        due = None if leaving else life.died(time.monotonic(), self.recovery)
        self.hub.drop(name)
        self.answers.give_up(name)
        self.weights.forget(name)
        for partial in await self.dispatcher.lost(name, self.journal.kept):
            await self._parked(partial)
        if leaving:
            return  # `_take_out` continues
        if due is None and not self._pausing and not any(other.state in ALIVE for other in self.lives.values()):
            died = f"{why}; it has died {len(life.deaths)} times"
            raise RunFailed(ErrorCode.INSTANCE.refer(f"{died}, and no instance is left at {self.context.site}"))
        if due is not None:
            self._pausing.add(name)
            self._begin(self._restart(life, due))
        self._write()
        await self.changed()

    def _log_interrupted(self, name: str) -> None:
        """Log a lost instance's requests, their tokens by its last report, and how many of these the journal has."""
        reported = self.hub.peers[name].state.get("produced", {}) if name in self.hub.peers else {}
        kept = {one: self.journal.kept(one) for one in self.dispatcher.works_on(name)}
        known = {one: len(part.completion_tokens) if part is not None else 0 for one, part in kept.items()}
        counts = len(known), sum(max(reported.get(one, 0), n) for one, n in known.items()), sum(known.values())
        log.warning("%s had %d requests with %d tokens, of which %d are in the journal", name, *counts)

    async def _restart(self, life: InstanceLife, due: float) -> None:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        if life.can("restarted"):  # else it was retired meanwhile
            self._pausing.discard(life.name)
            life.on("restarted")
            self._processes[life.name] = life.process
            self._write()
            await self._bring_in(life)
