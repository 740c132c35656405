"""The generation services of all sites behind one interface: dispatch of groups, weight updates, shared devices.

`scheduler/sites/site_dispatch.py` decides which site generates a group. Sites take new weights independently: a site
that is still loading a version when the next one is made gets the newest version afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from scheduler.simulation.generation_simulator import SimulatedInstance
from scheduler.sites.site_candidates import SiteLoad
from scheduler.sites.site_dispatch import SiteDispatch, SiteGroup
from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.controller.given_work import GivenWork, parking, resuming, sendable
from streamrl.controller.group_source import SampleDraw
from streamrl.controller.site_heartbeats import SiteHeartbeats
from streamrl.controller.site_limits import LONGEST_S
from streamrl.controller.step_times import Traffic
from streamrl.controller.version_spread import VersionSpread
from streamrl.machine.model_files import resolve_model
from streamrl.machine.router_shape import router_shape
from streamrl.protocol.controller_site import (
    InstanceState,
    LoadWeights,
    ScalePools,
    Sleep,
    Use,
    WeightsReady,
)
from streamrl.protocol.controller_trainer import PublishDone
from streamrl.protocol.message import TypedMessage, wire
from streamrl.protocol.samples import fleet_from_wire, groups_to_wire
from streamrl.rollouts.types import Group
from streamrl.run_dir.remote_site import ABSENT_AFTER_S
from streamrl.runtime.device_turns import instance_start_s
from streamrl.transport.deadlines import WaitRegistry, never
from streamrl.transport.endpoint import Hub
from streamrl.transport.wire import Arrays

WEIGHTS, SLEEP, RETURN = "weights", "sleep", "return"
"""Names of waits; those for weights and for a return are followed by the service's name."""
RETURN_S = 300.0
"""Fewest seconds for the service of the trainer's site to restart."""
LATER = 2
"""Factor by which the controller waits longer for a site than the site's own limits allow: the service replaces an
instance that does not load a version, or does not leave its device, in time, and the others go on."""
BYTES_PER_TOKEN = 12.0
"""Bytes of a token on a link: id, log-probability and weight version, 4 bytes each, before compression; with router
replay its experts come on top."""


class Services:
    """The generation services of all sites, as the controller uses them."""

    def __init__(
        self, hub: Hub, waits: WaitRegistry, sites: Mapping[str, str], cluster: ClusterConfig, run: RunConfig
    ) -> None:
        """Begin without any service connected; `sites` has the site of each service, by the service's name."""
        self.names = list(sites)
        self._sites, self._cluster = dict(sites), cluster
        self._hub, self._waits = hub, waits
        # it reports once its instances have started
        self._return_s = max(RETURN_S, instance_start_s(cluster.hardware == "cuda", run))
        self._rolling = run.schedule.rolling
        self._weights_s = self._update_s = run.deadlines.weights_s
        if run.schedule.on_update == "wait":
            self._update_s += run.deadlines.generation_s
        self._versions = VersionSpread(self._sites, cluster)
        self._fleets: dict[str, list[SimulatedInstance]] = {}
        """Instances of each service's site, as the service last reported them."""
        self._lives: dict[str, dict[str, str]] = {}
        """State of each instance, by service, as the service last reported it."""
        self.reports = 0
        """Number of these reports so far."""
        self._wrong_with_fleet: Callable[[str, object], str | None] = lambda name, fleet: None
        self._using: list[str] | None = None
        """Instances of the last call of `use`; None: all generate."""
        self.train_tokens_s: float | None = None
        """The trainer's rate in the last step, which services get with new groups; None before the first."""
        self.excluded: dict[str, str] = {}
        """Services that are no longer used (`site_trust.py`), and why."""
        self.alone: dict[str, str] = {}
        """Samples that were given again, with their groups: they are work of their own."""
        self.heartbeats = SiteHeartbeats(hub, self._sites, cluster, self.excluded)
        """What the services tell of themselves."""
        self._asleep: set[str] = set()
        """Services whose instances have left their devices to the trainer."""
        self._traffic = Traffic()
        self._carried: dict[str, int] = {}
        """Bytes to and from each service since the start, without weights, at the last count."""
        experts = router_shape(Path(resolve_model(run.model.path))).row_bytes if run.algorithm.router_replay else 0
        self._dispatch = SiteDispatch(run.sampling.max_tokens, BYTES_PER_TOKEN + experts, run.dispatch.price_tolerance)

    @property
    def version(self) -> int:
        """Newest version such that every instance of every site serves it or a newer one; -1: none yet."""
        return self._versions.version(self.used)

    @property
    def used(self) -> list[str]:
        """Names of the services that are not excluded."""
        return [name for name in self.names if name not in self.excluded]

    @property
    def generating(self) -> list[str]:
        """Names of the services that are used and have reported instances."""
        return [name for name in self.used if name in self._fleets]

    @property
    def updating(self) -> bool:
        """Whether weights are in flight to any site."""
        return bool(self._versions.in_flight)

    @property
    def can_take_version(self) -> bool:
        """Whether at least one site could take a new version at once, or none is left that would have to."""
        return len(self._versions.in_flight) < len(self.used) or not self.used

    def joined(self, wrong: Callable[[str, object], str | None] = lambda name, fleet: None) -> dict[str, str]:
        """Record the instances of all services, which have just connected.

        Args:
            wrong: returns why a service's instances, as its hello lists them, now or later, cannot be used, or None.

        Returns:
            Services whose instances cannot be used, and why; they are to be excluded.
        """
        unusable = {}
        self._wrong_with_fleet = wrong
        for name in self.names:
            peer = self._hub.peers.get(name)
            wired = None if peer is None else peer.meta.get("fleet")
            if (why := wrong(name, wired)) is not None:
                unusable[name] = why
                continue
            assert wired is not None
            self._fleets[name] = fleet_from_wire(wired)
            self._dispatch.join(self._site_load(name, self._fleets[name]))
        return unusable

    def absent(self, limit_s: float) -> list[str]:
        """Return the services of remote sites that are used, but have been away for at least so many seconds."""
        remote = (name for name in self.used if self._sites[name] in self._cluster.remote_sites)
        return [name for name in remote if self.heartbeats.away_s(name) >= limit_s]

    def can_exclude(self, name: str) -> bool:
        """Return whether a service can be done without: its site does not train, and another one can generate."""
        return self._sites[name] in self._cluster.remote_sites and bool({*self.generating} - {name})

    def exclude(self, name: str, why: str) -> list[str]:
        """Stop using a service; return the work that its site has, which is to be given to others."""
        self.excluded[name] = why
        for wait in (f"{WEIGHTS} {name}", f"{RETURN} {name}"):
            self._waits.end(wait)
        self._versions.drop(name)
        self._asleep.discard(name)
        if name not in self._fleets:
            return []
        had = self._dispatch.groups_of(self._sites[name])
        self._dispatch.withdraw(had)
        self._dispatch.hold(self._sites[name])
        return had

    def gone(self, name: str) -> None:
        """Wait for a service that has said goodbye to reconnect; its launcher may restart it.

        A no-op if it is excluded, or connected: it has come back before its goodbye was read.
        """
        self.heartbeats.left(name)
        if name in self.excluded or name in self._hub.peers:
            return
        is_remote = self._sites[name] in self._cluster.remote_sites
        limit_s = self._cluster.absence_s if is_remote else self._return_s
        limit = f", and absence_s is {limit_s:g} s" if is_remote else ""
        self._waits.begin(f"{RETURN} {name}", f"{name} to come back", limit_s, rest=lambda: limit)

    async def returned(self, name: str) -> list[str]:
        """Bring a restarted service up to date: send it the newest weights and the instances to use.

        Returns:
            The work that its site has, to be sent to it again with `resend`; [] if it is excluded.
        """
        if name in self.excluded:
            return []
        for wait in (f"{RETURN} {name}", f"{WEIGHTS} {name}", SLEEP):  # what was asked of it is asked again
            self._waits.end(wait)
        self._asleep.discard(name)
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # else its next report counts
            fleet = self._hub.peers[name].meta["fleet"]
            if fleet == [] or self._wrong_with_fleet(name, fleet) is None:
                self.fleet_changed(name, fleet)
        if self._versions.restarted(name):
            await self._announce(name)
        if self._using is not None:
            await self._send(name, Use(instances=self._using))
        return self._dispatch.groups_of(self._sites[name])

    async def resend(self, name: str, work: Sequence[GivenWork], budget: int | None) -> None:
        """Send a service work of its site, first or again after its restart; `budget` as for `generate`."""
        newest = self._versions.newest
        for evaluation in (False, True):
            limit = None if evaluation else budget
            parts = list(sendable([one for one in work if one.evaluation is evaluation]))
            for number, part in enumerate(parts, start=1):
                groups, draws = [one.group for one in part], [one.draws for one in part]
                message, arrays = groups_to_wire(
                    *(groups, draws, time.time(), limit, self.train_tokens_s, newest), more=number < len(parts)
                )
                await self._send(name, message, arrays)

    async def park_resting(self, name: str, number: int, sample_ids: Sequence[str]) -> None:
        """Tell a restarted service the number of the current round and which samples are parked in it."""
        for order in (*resuming([], None, number), *parking(sample_ids)):
            await self._send(name, order)

    async def use(self, instances: Sequence[str]) -> None:
        """Let only these instances generate from now on."""
        self._using = list(instances)
        await self.tell(Use(instances=self._using))

    async def _send(self, name: str, message: TypedMessage, arrays: Arrays | None = None) -> None:
        """Send a message; a no-op for a service that is not connected, which is brought up to date when it returns."""
        if name not in self.excluded:
            with contextlib.suppress(KeyError):
                await self._hub.send(name, *wire(message), arrays)

    def _site_load(self, name: str, fleet: Sequence[SimulatedInstance]) -> SiteLoad:
        site = self._sites[name]
        link = self._cluster.link(site)
        prices = {pool.name: pool.price_per_hour for pool in self._cluster.sites[site].generation}
        return SiteLoad(
            site,
            tuple((instance.slots, instance.curve) for instance in fleet),
            link.bytes_per_s if link else None,
            link.rtt_s if link else 0.0,
            sum(prices[instance.pool] for instance in fleet),
            link.price_per_gb if link else 0.0,
            doubtful=all(instance.doubtful for instance in fleet),
        )

    def fleet_changed(self, name: str, wired: list[dict[str, Any]]) -> None:
        """Record the instances of a service's site that get requests from now on.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: these are no instances of the site; nothing changes.
        """
        if name in self.excluded:
            return
        if fleet := fleet_from_wire(wired):
            self._dispatch.change(self._site_load(name, fleet))
        self._fleets[name] = fleet

    def lives_changed(self, name: str, instances: Mapping[str, InstanceState]) -> None:
        """Record the states of all instances of a service's site."""
        self._lives[name] = {instance: one.life for instance, one in instances.items()}
        self.reports += 1

    def in_state(self, life: str) -> list[str]:
        """Return the names of the instances that were last reported to be in a state, of services that are used."""
        return sorted(one for name in self.used for one, state in self._lives.get(name, {}).items() if state == life)

    def holds(self, name: str, sample_id: str, group_id: str) -> bool:
        """Return whether a service's site owes a sample of a group."""
        work = sample_id if sample_id in self.alone else group_id
        return name in self._sites and self._dispatch.site_of(work) == self._sites[name]

    def awaits_weights(self, name: str) -> bool:
        """Return whether weights are in flight to a service's instances."""
        return name in self._versions.in_flight

    def version_in_flight(self, name: str) -> int:
        """Return the version in flight to a service's instances; -1: none is."""
        return self._versions.in_flight.get(name, -1)

    def awaits_sleep(self) -> bool:
        """Return whether instances were told to leave their devices."""
        return SLEEP in self._waits.begun

    def site_of(self, name: str) -> str:
        """Return the site of a service."""
        return self._sites[name]

    async def scale(self, site: str, pool: str, replicas: int, replace_dead: bool = False) -> None:
        """Set the number of instances that a pool of a site should have; `replace_dead` as in `ScalePools`."""
        for name, other in self._sites.items():
            if other == site:
                await self._send(name, ScalePools(replicas={pool: replicas}, replace_dead=replace_dead))

    async def tell(self, *messages: TypedMessage) -> None:
        """Send all services the same messages."""
        for message in messages:
            for name in self.names:
                await self._send(name, message)

    async def generate(
        self, groups: Sequence[Group], samples: Sequence[Sequence[SampleDraw]], budget: int | None = None
    ) -> None:
        """Send groups, with the completions to generate of each, to the sites that will generate them.

        `budget`: tokens after which a sample is parked; None: it runs to its end. Groups without any are left out.
        """
        if work := [
            GivenWork(group.group_id, group, some) for group, some in zip(groups, samples, strict=True) if some
        ]:
            await self.give(work, budget)

    async def give(self, work: Sequence[GivenWork], budget: int | None, avoid: Collection[str] = ()) -> None:
        """Send work to the sites that will generate it, as `generate`; to services of `avoid` only if no other can."""
        self._hold_unable(avoid)
        self._dispatch.submit(
            SiteGroup(key, len(some), group.forecast, len(group.prompt_tokens)) for key, group, some, _ in work
        )
        place = dict(self._dispatch.decide())
        for name, site in self._sites.items():
            await self.resend(name, [one for one in work if place[one.key] == site], budget)

    def take_back(self, sample_id: str, group_id: str) -> None:
        """Make a sample, which a site owes, work of its own, which no site has."""
        if sample_id in self.alone:
            self._dispatch.withdraw([sample_id])
        else:
            self._dispatch.take_back(group_id)
            self.alone[sample_id] = group_id

    def _hold_unable(self, avoid: Collection[str]) -> None:
        """Hold sites that cannot work as long as there are others; release all others.

        They are those that are to be avoided, silent, congested, or without an instance that is ready.
        """
        names = self.generating
        states = {name: self._hub.peers[name].state for name in names if name in self._hub.peers}
        able = {
            name
            for name, state in states.items()
            if self._fleets[name] and self._hub.silent_for(name) < ABSENT_AFTER_S and not state.get("congested")
        }
        chosen = (able - set(avoid)) or (set(names) - set(avoid)) or able or set(names)
        for name in names:
            (self._dispatch.unhold if name in chosen else self._dispatch.hold)(self._sites[name])

    def finished(self, sample_id: str, group_id: str, length: int) -> None:
        """Record that a sample of a group has finished with `length` tokens."""
        self._dispatch.finished(group_id if self.alone.pop(sample_id, None) is None else sample_id, length)

    async def spread(self, made: PublishDone) -> bool:
        """Send a new version to every site; generation and training continue meanwhile.

        Returns:
            Whether every site has it already: the trainer itself has pushed it, or all sites got it before the
            controller heard of it.
        """
        if not made.content_hash:
            self._count(made.bytes, None)
            self._versions.delivered(made.number)
            return True
        newest = LoadWeights(number=made.number, content_hash=made.content_hash, source=None)
        for name in self._versions.made(newest, self.used):
            await self._announce(name)
        return not self.updating

    async def _announce(self, name: str) -> None:
        made = self._versions.start(name, [peer for peer in self.used if self._passes_weights_on(peer)])
        loads = max(1, len(self._lives.get(name, {})), len(self._fleets.get(name, []))) if self._rolling else 1
        limit_s = LATER * (self._weights_s + loads * self._update_s)  # it is fetched, then loaded
        # a remote site that is disconnected gets its weights when it reconnects
        limit_s += self._cluster.absence_s if self._cluster.link(self._sites[name]) else 0.0
        # where running requests end before an update, it waits for as long as they produce tokens
        progress = self.heartbeats.since_token if self._update_s > self._weights_s else never
        lacking = functools.partial(self._lacking, name, made.number)
        self._waits.begin(f"{WEIGHTS} {name}", f"weights {made.number} to reach {name}", limit_s, progress, lacking)
        await self._send(name, made)

    def _lacking(self, name: str, number: int) -> str:
        """Return words for the instances of a service that have not loaded a version; '': none is known to lack it."""
        lacking = self.heartbeats.lacking(name, number)
        return f"; {', '.join(lacking)} did not load them" if lacking else ""

    def _passes_weights_on(self, name: str) -> bool:
        """Return whether a service is there, and its relay serves other sites."""
        peer = self._hub.peers.get(name)
        if peer is None or not peer.meta.get("passes_weights_on"):
            return False
        return self._hub.silent_for(name) < ABSENT_AFTER_S

    async def ready(self, name: str, report: WeightsReady) -> bool:
        """Record that a service's instances serve the version that was in flight to them, or a newer one.

        Returns:
            Whether every site now serves the newest version.
        """
        if not self.awaits_weights(name):
            return not self.updating  # report of a process that has been replaced since
        self._waits.end(f"{WEIGHTS} {name}")
        link = self._cluster.link_between(self._sites[name], report.source or self._cluster.trainer_site)
        usd = report.bytes * link.price_per_gb / 1e9 if link is not None else 0.0
        seconds = report.fetched - report.started  # right by a wrong clock, too, unless it was set in between
        self._count(report.bytes, seconds if 0 <= seconds <= LONGEST_S else None, {self._sites[name]: usd})
        self._asleep.discard(name)  # loading weights wakes instances up
        if self._versions.ready(name, report):
            await self._announce(name)
        return not self.updating

    def traffic(self) -> Traffic:
        """Return the traffic with all sites since the last call."""
        for name, site in self._sites.items():
            link, peer = self._cluster.link(site), self._hub.peers.get(name)
            if link is not None and peer is not None:
                carried = peer.bytes_in + peer.bytes_out
                usd = (carried - self._carried.get(name, 0)) * link.price_per_gb / 1e9
                self._count(0, None, {site: usd})
                self._carried[name] = carried
        traffic, self._traffic = self._traffic, Traffic()
        return traffic

    def _count(self, nbytes: int, seconds: float | None, usd: Mapping[str, float] | None = None) -> None:
        before = self._traffic
        costs = {**before.usd, **{site: before.usd.get(site, 0.0) + one for site, one in (usd or {}).items() if one}}
        longest = max((s for s in (seconds, before.seconds) if s is not None), default=None)
        self._traffic = Traffic(before.nbytes + nbytes, longest, costs)

    async def leave_devices(self) -> bool:
        """Return whether all instances have left their devices; if not, request it. Nothing may be generating."""
        if self._asleep == set(self.used):
            return True
        if SLEEP not in self._waits.begun:
            self._waits.begin(SLEEP, f"{', '.join(self.used)} to leave their devices", LATER * self._weights_s)
            await self.tell(Sleep())
        return False

    def asleep(self, name: str) -> None:
        """Record that a service's instances have left their devices."""
        self._asleep.add(name)
        if self._asleep == set(self.used):
            self._waits.end(SLEEP)

    def fleet(self) -> list[SimulatedInstance]:
        """Return all instances, as their services last reported them."""
        return [instance for name in self.used for instance in self._fleets[name]]

    def instances(self) -> set[str]:
        """Return the names of all instances, as their services last reported them."""
        return {instance.name for instance in self.fleet()}
