"""The generation services of all sites as one: groups go out, weights spread, devices change hands.

Which site generates a group is `scheduler/sites/site_dispatch.py`'s decision. Every site takes new weights on its own:
one that is still loading a version when the next one is made gets that one afterwards, or, if there is a newer one by
then, only the newest.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from scheduler.simulation.generation_simulator import SimulatedInstance
from scheduler.sites.relay_tree import RelayPath, relay_tree
from scheduler.sites.site_candidates import SiteLoad
from scheduler.sites.site_dispatch import SiteDispatch, SiteGroup
from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.controller.group_source import SampleDraw
from streamrl.controller.step_times import Traffic
from streamrl.errors import RunFailed
from streamrl.protocol.controller_site import (
    Finish,
    LoadWeights,
    Park,
    Resume,
    ScalePools,
    Sleep,
    Use,
    WeightsReady,
)
from streamrl.protocol.controller_trainer import PublishDone
from streamrl.protocol.message import TypedMessage, wire
from streamrl.protocol.samples import fleet_from_wire, groups_to_wire
from streamrl.rollouts.types import Group
from streamrl.run_dir.status import ABSENT_AFTER_S
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Hub
from streamrl.transport.wire import Arrays

WEIGHTS, SLEEP, RETURN = "weights", "sleep", "return"
"""Names of what is waited for; weights and returns have a service behind."""
RETURN_S = 300.0
"""For the service of the trainer's site to be started again."""
MEASURED_BYTES = 500_000
"""A transfer of weights from this size on tells the bandwidth of its path."""
HISTORY = 10
"""Versions that a site is remembered to have served."""
FINISH_S = 3.0
"""For a site to hear that the run is over; one that does not notices the silence."""
BYTES_PER_TOKEN = 12.0
"""Of a sample on a link: id, log-probability and weight version, 4 bytes each, before compression."""


class Services:
    """See the module's text."""

    def __init__(
        self, hub: Hub, waits: WaitRegistry, sites: Mapping[str, str], cluster: ClusterConfig, run: RunConfig
    ) -> None:
        """
        Args:
            hub: that the services connect to.
            waits: where waits for them are registered.
            sites: of each service by name.
            cluster: the cluster file.
            run: the run file.
        """
        self.names = list(sites)
        self._sites, self._cluster = dict(sites), cluster
        self._hub, self._waits = hub, waits
        self._weights_s = run.deadlines.weights_s
        self._update_s = self._weights_s
        if run.schedule.on_update == "wait":
            self._update_s += run.deadlines.generation_s
        self._serving = dict.fromkeys(sites, -1)
        """Newest version that every instance of a site serves."""
        self._served: dict[str, deque[int]] = {name: deque(maxlen=HISTORY) for name in sites}
        """Its newest versions, by service: deltas from one of them on can be had there."""
        self._paths = {
            frozenset(link.between): RelayPath(link.bytes_per_s * link.weight_share, link.rtt_s)
            for link in cluster.links
        }
        """Between sites, as declared, and as measured since."""
        self._version_bytes = 0.0
        """Of the last transfer of weights that was one."""
        self._coming: dict[str, int] = {}
        """Version that is on its way to a site's instances."""
        self._next: dict[str, LoadWeights] = {}
        """Announcement of what a site gets after that."""
        self._newest: LoadWeights | None = None
        """Announcement of the version that was made last."""
        self._fleets: dict[str, list[dict[str, Any]]] = {}
        """Instances of each service's site, as it has told."""
        self._using: list[str] | None = None
        """What `use` has said last."""
        self._asleep: set[str] = set()
        """Those whose instances have left their devices to the trainer."""
        self._traffic = Traffic()
        self._carried: dict[str, int] = {}
        """Bytes to and from each service since the start, weights aside, as counted last."""
        self._dispatch = SiteDispatch(run.sampling.max_tokens, BYTES_PER_TOKEN, run.dispatch.price_tolerance)

    @property
    def version(self) -> int:
        """Newest weights that every instance of every site serves, or newer ones; -1: none yet."""
        return min(self._serving.values())

    @property
    def updating(self) -> bool:
        """Whether weights are on their way to any site."""
        return bool(self._coming)

    @property
    def can_take_version(self) -> bool:
        """Whether a new version would go to some site at once."""
        return len(self._coming) < len(self.names)

    def joined(self) -> None:
        """All services have said hello, with their instances."""
        for name in self.names:
            self._fleets[name] = self._hub.peers[name].meta["fleet"]
            self._dispatch.join(self._facts(name))

    def gone(self, name: str) -> None:
        """A service has said goodbye: its launcher, or a new process in its place, may bring it back."""
        remote = self._sites[name] in self._cluster.remote_sites
        self._waits.begin(f"{RETURN} {name}", f"{name} to come back", self._cluster.absence_s if remote else RETURN_S)

    async def returned(self, name: str) -> list[str]:
        """A service is a new process, which knows nothing: it gets the newest weights.

        Returns:
            The groups that its site has, to be sent to it again (`again`).
        """
        self._waits.end(f"{RETURN} {name}")
        self._waits.end(f"{WEIGHTS} {name}")
        self._coming.pop(name, None)
        self._served[name].clear()
        self._asleep.discard(name)
        self.fleet_changed(name, self._hub.peers[name].meta["fleet"])
        if self._newest is not None:
            self._next[name] = self._newest
            await self._announce(name)
        if self._using is not None:
            await self._send(name, Use(instances=self._using))
        return self._dispatch.groups_of(self._sites[name])

    async def again(
        self, name: str, groups: Sequence[Group], samples: Sequence[Sequence[SampleDraw]], budget: int | None
    ) -> None:
        """Sends a service what its site has, as `generate` did."""
        if groups:
            message, arrays = groups_to_wire(groups, samples, time.time(), budget)
            await self._send(name, message, arrays)

    async def rest(self, name: str, number: int, sample_ids: Sequence[str]) -> None:
        """Tells a service the number of the round under way, and which samples rest in it."""
        await self._send(name, Resume(sample_ids=[], budget=None, round=number))
        await self._send(name, Park(sample_ids=list(sample_ids)))

    async def use(self, instances: Sequence[str]) -> None:
        """From now on only these instances generate."""
        self._using = list(instances)
        await self.tell(Use(instances=self._using))

    async def _send(self, name: str, message: TypedMessage, arrays: Arrays | None = None) -> None:
        """A service that is away gets nothing: when it is back, it is told all that is open."""
        with contextlib.suppress(KeyError):
            await self._hub.send(name, *wire(message), arrays)

    def _facts(self, name: str) -> SiteLoad:
        site, fleet = self._sites[name], self._fleet(name)
        link = self._cluster.link(site)
        prices = {pool.name: pool.price_per_hour for pool in self._cluster.sites[site].generation}
        return SiteLoad(
            site,
            tuple((instance.slots, instance.curve) for instance in fleet),
            link.bytes_per_s if link else None,
            link.rtt_s if link else 0.0,
            sum(prices[instance.pool] for instance in fleet),
            link.price_per_gb if link else 0.0,
        )

    def fleet_changed(self, name: str, fleet: list[dict[str, Any]]) -> None:
        """Other instances of a service's site get requests now."""
        self._fleets[name] = fleet
        if fleet:
            self._dispatch.change(self._facts(name))

    def site_of(self, name: str) -> str:
        """Of a service."""
        return self._sites[name]

    async def scale(self, site: str, pool: str, replicas: int) -> None:
        """A pool of a site is to have so many instances."""
        for name in (name for name, other in self._sites.items() if other == site):
            await self._send(name, ScalePools(replicas={pool: replicas}))

    async def tell(self, message: TypedMessage) -> None:
        """Sends all of them the same."""
        for name in self.names:
            await self._send(name, message)

    async def generate(
        self, groups: Sequence[Group], samples: Sequence[Sequence[SampleDraw]], budget: int | None = None
    ) -> None:
        """Sends groups to the sites that are to generate them.

        Args:
            groups: any number.
            samples: the completions wanted of each.
            budget: tokens after which a sample is parked; None: it runs to its end.
        """
        self._hold_absent()
        self._dispatch.submit(
            SiteGroup(group.group_id, len(some), group.forecast, len(group.prompt_tokens))
            for group, some in zip(groups, samples, strict=True)
        )
        place = dict(self._dispatch.decide())
        now = time.time()
        dealt = defaultdict(list)
        for number, group in enumerate(groups):
            dealt[place[group.group_id]].append(number)
        for name, site in self._sites.items():
            if mine := dealt[site]:
                message, arrays = groups_to_wire([groups[n] for n in mine], [samples[n] for n in mine], now, budget)
                await self._send(name, message, arrays)

    def _hold_absent(self) -> None:
        """Sites that are away or congested get nothing new as long as another one can work."""
        states = {name: self._hub.peers[name].state for name in self.names if name in self._hub.peers}
        able = {
            name
            for name, state in states.items()
            if self._hub.silent_for(name) < ABSENT_AFTER_S and not state.get("congested")
        }
        for name, site in self._sites.items():
            if able and name not in able:
                self._dispatch.hold(site)
            else:
                self._dispatch.unhold(site)

    def finished(self, group_id: str, length: int) -> None:
        """A sample has come, with so many tokens."""
        self._dispatch.finished(group_id, length)

    async def spread(self, made: PublishDone) -> bool:
        """A version is made: it goes to every site, while everything else goes on.

        Args:
            made: the trainer's answer.

        Returns:
            Whether it is there already: the trainer itself has brought it (NCCL), or all sites were quicker to get it
            than this to hear of it.
        """
        if not made.content_hash:
            self._count(made.bytes * len(self.names), None, 0.0)
            self._serving = dict.fromkeys(self.names, made.number)
            self._asleep.clear()
            return True
        self._newest = LoadWeights(number=made.number, content_hash=made.content_hash, source=None)
        for name in self.names:
            if self._serving[name] < made.number:
                self._next[name] = self._newest
                if name not in self._coming:
                    await self._announce(name)
        return not self._coming

    async def _announce(self, name: str) -> None:
        made = msgspec.structs.replace(self._next.pop(name), source=self._source(name))
        self._coming[name] = made.number
        # a site that is away gets its weights when it is back
        limit_s = self._update_s + (self._cluster.absence_s if self._cluster.link(self._sites[name]) else 0.0)
        self._waits.begin(f"{WEIGHTS} {name}", f"weights {made.number} to reach {name}", limit_s)
        await self._send(name, made)

    def _source(self, name: str) -> str | None:
        """The site whose relay a service is to get its next weights from; None: the trainer's."""
        site, holds = self._sites[name], self._serving[name]
        able = {
            other
            for peer, other in self._sites.items()
            if other in self._cluster.relays_for(site)
            and peer in self._hub.peers
            and self._hub.peers[peer].meta.get("passes_weights_on")
            and self._hub.silent_for(peer) < ABSENT_AFTER_S
            and holds in self._served[peer]
        }
        if not able:
            return None
        root = self._cluster.trainer_site
        parents = relay_tree(root, self._cluster.remote_sites, self._paths, able, self._version_bytes)
        return None if parents[site] == root else parents[site]

    def _measure(self, name: str, report: WeightsReady) -> None:
        """What a transfer says of its path."""
        nbytes, seconds = report.bytes, report.transfer_s
        ends = frozenset((self._sites[name], report.source or self._cluster.trainer_site))
        if nbytes >= MEASURED_BYTES and seconds > 0 and ends in self._paths:
            self._paths[ends] = RelayPath(nbytes / seconds, self._paths[ends].rtt_s)
            self._version_bytes = nbytes

    async def ready(self, name: str, report: WeightsReady) -> bool:
        """A service's instances serve the version that was coming, or one that was newer by then.

        Args:
            name: which.
            report: what the service says of it.

        Returns:
            Whether every site now serves the newest version there is.
        """
        if self._coming.get(name) is None:
            return not self._coming  # of a process that has been replaced since
        self._waits.end(f"{WEIGHTS} {name}")
        source = report.source or self._cluster.trainer_site
        link = self._cluster.link_between(self._sites[name], source)
        usd = report.bytes * link.price_per_gb / 1e9 if link is not None else 0.0
        self._count(report.bytes, report.fetched - report.started, usd)
        self._measure(name, report)
        del self._coming[name]
        self._serving[name] = report.number
        self._served[name].append(self._serving[name])
        self._asleep.discard(name)  # new weights wake instances up
        if name in self._next and self._next[name].number <= self._serving[name]:
            del self._next[name]
        if name in self._next:
            await self._announce(name)
        return not self._coming

    async def finish(self, state: str, error: str | None) -> None:
        """The run is over: other sites are told how, if they can be reached within a moment."""
        kind, body = wire(Finish(state=state, error=error))
        for name, site in self._sites.items():
            if site in self._cluster.remote_sites and name in self._hub.peers:
                told = asyncio.get_running_loop().create_future()
                with contextlib.suppress(RunFailed, TimeoutError):
                    async with asyncio.timeout(FINISH_S):
                        await self._hub.send(name, kind, body, on_ack=functools.partial(told.set_result, None))
                        await told

    def traffic(self) -> Traffic:
        """With all sites, since the last call."""
        for name, site in self._sites.items():
            link, peer = self._cluster.link(site), self._hub.peers.get(name)
            if link is not None and peer is not None:
                carried = peer.bytes_in + peer.bytes_out
                self._count(0, None, (carried - self._carried.get(name, 0)) * link.price_per_gb / 1e9)
                self._carried[name] = carried
        traffic, self._traffic = self._traffic, Traffic()
        return traffic

    def _count(self, nbytes: int, seconds: float | None, usd: float) -> None:
        before = self._traffic
        longest = max((s for s in (seconds, before.seconds) if s is not None), default=None)
        self._traffic = Traffic(before.nbytes + nbytes, longest, before.usd + usd)

    async def leave_devices(self) -> bool:
        """Whether all instances have left their devices to the trainer; asks them to. Nothing may be running."""
        if self._asleep == set(self.names):
            return True
        if SLEEP not in self._waits.begun:
            self._waits.begin(SLEEP, f"{', '.join(self.names)} to leave their devices", self._weights_s)
            await self.tell(Sleep())
        return False

    def asleep(self, name: str) -> None:
        """A service's instances have left their devices."""
        self._asleep.add(name)
        if self._asleep == set(self.names):
            self._waits.end(SLEEP)

    def _fleet(self, name: str) -> list[SimulatedInstance]:
        return fleet_from_wire(self._fleets[name])

    def fleet(self) -> list[SimulatedInstance]:
        """All instances, as their services have told."""
        return [instance for name in self.names for instance in self._fleet(name)]

    def remote(self) -> dict[str, dict[str, Any]]:
        """What is known of each site behind a link (`run_dir/status.py` RemoteSite)."""
        return {
            site: self._about(name)
            for name, site in self._sites.items()
            if site in self._cluster.remote_sites and name in self._hub.peers
        }

    def _about(self, name: str) -> dict[str, Any]:
        state = self._hub.peers[name].state
        uplink = state.get("uplink", {})
        rtt_s, ratio = state.get("rtt_s"), uplink.get("ratio")
        return {
            "silent_s": self._hub.silent_for(name),
            "rtt_ms": None if rtt_s is None else rtt_s * 1e3,
            "clock_offset_s": state.get("clock_offset_s"),
            "samples_waiting": uplink.get("backlog_samples", 0),
            "compression": 1 / ratio if ratio and uplink.get("compressing") else None,
            "congested": bool(state.get("congested")),
            "weights_refetched": state.get("weights_refetched", 0),
        }

    def busy_since(self) -> dict[str, float]:
        """Since when each busy instance has had something to do, as the last heartbeats told (unix seconds)."""
        known = [self._hub.peers[name] for name in self.names if name in self._hub.peers]
        states = [peer.state.get("instances", {}) for peer in known]
        return {name: s["busy_since"] for some in states for name, s in some.items() if s.get("busy_since")}
