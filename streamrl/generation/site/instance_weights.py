"""Weights of a site's instances: loaded when there is a new version or one was missed, and freed for training."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from streamrl.generation.site.fleet_view import FleetView
from streamrl.generation.site.instance_life import InstanceLife, Life
from streamrl.generation.site.pending_answers import InstanceLost
from streamrl.generation.site.step_curves import differ
from streamrl.protocol.instance_reports import curve_of
from streamrl.protocol.message import kind_of
from streamrl.protocol.site_instance import ApplyWeights, InstanceAsleep, SleepInstance, WeightsApplied
from streamrl.run_dir.instance_files import read_started
from streamrl.transport.deadlines import DeadlineExpired, never
from streamrl.transport.endpoint import Delivery
from streamrl.weights.site_relay import NotPublished
from streamrl.weights.version import WeightVersion

log = logging.getLogger(__name__)


class InstanceWeights:
    """The version that a site serves, the instances' loads of it, and their sleep."""

    def __init__(self, fleet: FleetView, ensure: Callable[[WeightVersion], Awaitable[None]]) -> None:
        """
        Args:
            fleet: the site's instances.
            ensure: makes sure that a version that was loaded before is still intact in the site's store.
        """
        self.fleet, self._ensure = fleet, ensure
        self._fetched = fleet.context.run.weights.path.fetched
        self.served: WeightVersion | None = None
        self._asleep = False
        self._loads: defaultdict[str, set[int]] = defaultdict(set)
        """Versions that each instance was ordered to load and has not reported on."""
        self._ending: dict[str, int] = {}
        """Processes that count as dead, and may have a version mapped until they have ended: their numbers, by name."""
        self.lock = asyncio.Lock()
        """Held while weights are loaded, so that no instance joins or leaves meanwhile."""

    def being_loaded(self) -> set[int]:
        """Return the versions that instances may still be loading; an instance that fell silent may load an old one."""
        return set().union(*self._loads.values())

    def holders(self) -> list[str]:
        """Return the sorted names of the instances that may hold the memory of an older version than the served one.

        They may still be loading it, or were loading when they were declared dead and have not ended yet.
        """
        if self._ending:
            started = read_started(self.fleet.context.run_dir)
            running = {(one.name, one.process) for one in started if one.exit_code is None}
            self._ending = {name: process for name, process in self._ending.items() if (name, process) in running}
        served = set() if self.served is None else {self.served.number}
        return sorted({*self._ending, *(name for name, numbers in self._loads.items() if numbers - served)})

    def forget(self, name: str) -> None:
        """Forget what a dead instance was loading; its process may not have ended yet."""
        if self._loads.pop(name, None):
            self._ending[name] = self.fleet.lives[name].process

    async def catch_up(self, life: InstanceLife) -> None:
        """Give a stale instance the served weights, then requests."""
        process = life.process
        async with self.lock:
            if not (life.process == process and life.can("current")):
                return  # meanwhile it has died, was retired, or has loaded the weights together with the others
            if self._fetched:
                if self.served is None:
                    return  # it joins with the first weights
                if self._asleep:  # the trainer has the devices: it joins with the next weights
                    await self._put_to_sleep(life.name)  # one that was silent may still have a part of them
                    return
                if await self._restored(self.served, life.name):
                    if await self._update(life.name, self.served) is None:
                        return  # handled where the loss was noticed
                    if life.process == process and life.can("current"):
                        await self.fleet.admit(life.name)
        await self.fleet.changed()  # where the trainer pushes weights, it is shown as stale, and gets them

    async def _restored(self, version: WeightVersion, name: str) -> bool:
        """Return whether a version is intact, maybe again; if not, an instance waits for the next `update`."""
        try:
            await self._ensure(version)
        except NotPublished as error:  # a newer one is, or will be
            log.warning("%s gets no requests before the next weights: %s", name, error)
            return False
        return True

    async def update(self, version: WeightVersion) -> dict[str, WeightsApplied]:
        """Have all instances load a version from the site's store, one after the other if updates are rolling.

        Returns:
            The answer of each instance, with the time for which it paused, by name.
        """
        async with self.lock:
            names = self.fleet.present
            processes = {name: self.fleet.lives[name].process for name in names}
            self.served = version
            if self.fleet.context.run.schedule.rolling:
                spans = [await self._update(name, version) for name in names]
            else:
                spans = await asyncio.gather(*(self._update(name, version) for name in names))
            self._asleep = False
            loaded = {name: span for name, span in zip(names, spans, strict=True) if span is not None}
            changed = await self.settle({name: processes[name] for name in loaded})
        if changed:
            await self.fleet.changed()
        return loaded

    async def settle(self, loaded: Mapping[str, int]) -> bool:
        """Give requests to the processes, by instance, that have loaded the served version.

        Returns:
            Whether any of them has joined, or plans have changed.
        """
        lives = [self.fleet.lives[name] for name in loaded if name in self.fleet.lives]
        stale = [life for life in lives if life.process == loaded[life.name] and life.can("current")]
        refined = self._refine()
        for life in stale:
            await self.fleet.admit(life.name)
        return bool(stale) or refined

    def _refine(self) -> bool:
        """Plan with the step times that the instances' work has shown; return whether any of them changed.

        This happens only with new weights, so that all plans of a step use the same step times.
        """
        known = [name for name in self.fleet.present if self.fleet.dispatcher.knows(name)]
        doubtful = [self.fleet.simulated(name).doubtful for name in known]
        for name in known:
            state = self.fleet.hub.peers[name].state
            if (reported := state.get("curve")) is None:
                continue
            try:
                curve = curve_of(reported)
            except ValueError as error:  # what was known of it still holds
                self.fleet.hub.refusals.count("unreadable", name, error)
                continue
            self.fleet.curves.worked(name, self.fleet.lives[name].pool, curve, state.get("doubtful", False))
        # the controller gives a site that is doubtful work of its own, so it hears when that ends
        changed = doubtful != [self.fleet.simulated(name).doubtful for name in known]
        for name in known:
            before, now = self.fleet.dispatcher.curve_of(name), self.fleet.simulated(name).curve
            if before is None or differ(before, now):
                self.fleet.dispatcher.measured(name, now)
                changed = True
                steps = ", ".join(f"{1e3 * s:.1f} ms at {b}" for b, s in zip(now.batches, now.seconds, strict=True))
                log.info("plans for %s now use the step times measured during its work: %s", name, steps)
        return changed

    async def _update(self, name: str, version: WeightVersion) -> WeightsApplied | None:
        """Have one instance load a version, treating its requests as `schedule.on_update` says.

        Returns:
            Its answer, with the time for which it paused; None: it died meanwhile, or is silent.
        """
        if self.misses(name):
            return None
        await self.hold(name)
        limits = self.fleet.limits
        self._loads[name].add(version.number)
        order = ApplyWeights(number=version.number, content_hash=version.content_hash)
        limit_s, progress = limits.weights_s, never
        if self.fleet.context.run.schedule.on_update == "wait":
            # its requests end first, for as long as they produce tokens
            limit_s, progress = limit_s + limits.generation_s, partial(self.since_token, name)
        answer = self.fleet.answers.ask(name, order, kind_of(WeightsApplied), limit_s, progress)
        loaded: WeightsApplied | None = await self._answered(name, answer)
        if loaded is not None:
            await self.unhold(name)
        return loaded

    async def hold(self, name: str) -> None:
        """Keep requests from an instance that is about to load weights, where `schedule.on_update` wants it."""
        on_update = self.fleet.context.run.schedule.on_update
        # an instance that has not joined has nothing to hold
        if on_update in ("wait", "abort_and_requeue") and self.fleet.dispatcher.knows(name):
            await self.fleet.dispatcher.hold(name, requeue=on_update == "abort_and_requeue", why="weights")

    async def unhold(self, name: str) -> None:
        """End `hold`; a no-op for an instance that was not held."""
        await self.fleet.dispatcher.unhold(name, "weights")

    def since_token(self, name: str) -> float:
        """Return the seconds since an instance has produced a token, by its last heartbeat.

        inf: it runs nothing, or is not there any more.
        """
        if (peer := self.fleet.hub.peers.get(name)) is None:
            return math.inf
        state = peer.state
        return state.get("stalled_s", 0.0) + self.fleet.hub.silent_for(name) if state.get("running") else math.inf

    async def on_message(self, delivery: Delivery) -> None:
        """Handle an instance's report that it has loaded a version, or did not find it in the site's store.

        A missing version is an error only if it is the one being served: an instance that stood still for a while may
        look for an older one, which the store no longer has.
        """
        name, number = delivery.peer, delivery.body.number
        self._loads[name].discard(number)
        if self.served is None or number != self.served.number:
            return
        if isinstance(delivery.body, WeightsApplied):
            self.fleet.answers.take(delivery)
        elif self.fleet.answers.give_up(name):
            await self.fleet.died(
                self.fleet.lives[name], f"{name} did not find weight version {number} in the site's store"
            )

    async def sleep(self) -> None:
        """Have all instances free their devices for training; new weights wake them up."""
        async with self.lock:
            await asyncio.gather(*(self._put_to_sleep(name) for name in self.fleet.present))
            self._asleep = True

    async def _put_to_sleep(self, name: str) -> bool:
        """Have one instance free its devices. Return False if it died meanwhile or is silent."""
        if self.misses(name):
            return False
        limit_s = self.fleet.limits.weights_s
        answer = self.fleet.answers.ask(name, SleepInstance(), kind_of(InstanceAsleep), limit_s)
        return await self._answered(name, answer) is not None

    def misses(self, name: str) -> bool:
        """Return whether an instance is silent, so that it misses what the others get now."""
        life = self.fleet.lives[name]
        life.missed |= life.state is Life.SUSPECT
        return life.state is Life.SUSPECT

    async def _answered(self, name: str, answer: Awaitable[Any]) -> Any:
        """Return an instance's answer to a command, or None if it died or fell silent meanwhile."""
        try:
            return await answer
        except InstanceLost:
            return None
        except DeadlineExpired as error:
            await self.fleet.died(self.fleet.lives[name], str(error))
            return None
