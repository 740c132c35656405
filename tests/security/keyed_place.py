"""A trainer's site, on one machine or over the nodes of a Ray cluster, its hubs at work, and attacks on them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import zmq.asyncio

from streamrl.config.cluster import ClusterConfig
from streamrl.config.load import save_resolved
from streamrl.config.run import RunConfig
from streamrl.launcher.site_setup import choose_addresses
from streamrl.protocol.message import MessageReader, wire
from streamrl.protocol.operator import ScalePool
from streamrl.protocol.speakers import RIGHTS
from streamrl.run_dir import layout
from streamrl.runtime.inside_keys import inside_roles, make_inside_keys
from streamrl.runtime.interfaces import free_ports
from streamrl.runtime.process_context import Addresses, RoleContext
from streamrl.runtime.site_connections import CONTROLLER, PUBLISHER, bind_home, home_hub
from streamrl.transport.curve import ClientSecurity, KeyPair, load_own, make_keys
from streamrl.transport.deadlines import DeadlineExpired, WaitRegistry
from streamrl.transport.endpoint import Hub, Link
from streamrl.weights.publisher import WeightPublisher
from streamrl.weights.site_relay import WeightRelay
from streamrl.weights.version_store import WeightStore
from tests.tiny_model import save_tiny_model
from tests.waiting import scaled, until
from tests.weights.world import Policy

RAY = {"backend": "ray", "address": "127.0.0.1:1"}
SITES = {
    "here": {"address": "127.0.0.1", "port": 5600, "launch": RAY, "trainer": {"ranks": 2}, "generation": [{}]},
    "far": {"generation": [{}]},
}
LINKS = [{"between": ["here", "far"], "bandwidth_gbit_s": 1, "rtt_ms": 30}]
NOBODYS = "192.0.2.1"
"""Address that no machine has (RFC 5737)."""
PATIENCE_S = 0.1
"""Limit of a connection that gets no answer, to be scaled."""


@dataclass
class Place:
    """A trainer's site as its launcher prepares it, with the keys for links to another site."""

    run_dir: Path

    @functools.cached_property
    def _loaded(self) -> RoleContext:
        """The context that any process loads, in a tenth of a second; a copy reads its keys when asked for them."""
        return RoleContext.load("", "", self.run_dir, False)

    def context(self, name: str = "controller", site: str = "here") -> RoleContext:
        """The context from which a process of a site starts."""
        loaded = replace(self._loaded, name=name, site=site)
        if site == "here":
            return loaded
        outside = loaded.addresses
        return replace(loaded, addresses=Addresses(outside.controller_outside, outside.publisher_outside, {}))

    @property
    def outside_key(self) -> KeyPair:
        """The key of the other site, which may connect to the outer doors."""
        return load_own(self.run_dir / "links", "far")

    @property
    def secret_file(self) -> Path:
        return self.run_dir / layout.KEYS / "inside-here" / "controller.key_secret"

    def key_of(self, process: str) -> bytes:
        """The public key of a process of the site."""
        return self.context().addresses.inside_keys[process].encode()


def make_place(tmp_path: Path, nodes: bool = True) -> Place:
    """The folder of such a site, as its launcher leaves it for the processes.

    Args:
        nodes: over the nodes of a Ray cluster; False: on one machine, by Unix sockets.
    """
    for site in SITES:
        make_keys(tmp_path / "links", site)
    security = {"keys": str(tmp_path / "links")}
    here = SITES["here"] if nodes else {key: value for key, value in SITES["here"].items() if key != "launch"}
    values = {"hardware": "cpu", "sites": SITES | {"here": here}, "links": LINKS, "security": security}
    cluster = ClusterConfig.model_validate(values)
    run = RunConfig.model_validate({"model": {"path": str(save_tiny_model(tmp_path / "model")), "dtype": "float32"}})
    save_resolved(tmp_path, cluster, run)
    controller, publisher = free_ports(2, "127.0.0.1")
    addresses = replace(
        choose_addresses(cluster, "here", tmp_path, node="127.0.0.1" if nodes else ""),
        controller_outside=f"tcp://127.0.0.1:{controller}",
        publisher_outside=f"tcp://127.0.0.1:{publisher}",
        inside_keys=make_inside_keys(tmp_path, "here", inside_roles(cluster, run, "here")),
    )
    addresses.save(tmp_path)
    return Place(tmp_path)


Attack = Callable[[Place, Link], Awaitable[bool]]


async def takes_the_weights(place: Place, link: Link) -> bool:
    """Whether a version of the weights is in the attacker's folder."""
    manifest, _ = Policy().version()
    relay = WeightRelay(link, WeightStore(place.run_dir / "stolen"), 10, "raw")
    return await relay.fetch(manifest.version.number, manifest.version.content_hash) == manifest


async def scales(place: Place, link: Link) -> bool:
    """Whether the order was acknowledged, and so has reached the controller's own queue."""
    await link.send(*wire(ScalePool(pool="regular", site="here", replicas=1)))
    await link.flush(scaled(10))
    return True


async def says_hello(place: Place, link: Link) -> bool:
    """Nothing more: a link that is connected has been let in under its name."""
    return True


ATTACKS: dict[str, tuple[str, str, str, Attack]] = {
    "fetch weights": (PUBLISHER, "service-here", "relay", takes_the_weights),
    "be the trainer": (CONTROLLER, "trainer-0", "trainer", says_hello),
    "scale": (CONTROLLER, "operator-1", "operator", scales),
}


SERVERS = {"fetch weights": "trainer-0", "be the trainer": "controller", "scale": "controller"}
"""Process that each attack connects to."""


@contextlib.asynccontextmanager
async def hub_of(place: Place, name: str, open_to_all: bool = False) -> AsyncIterator[tuple[Hub, str]]:
    """The controller's or the publisher's hub at work, and its inner address.

    Args:
        open_to_all: without keys, as all were before there were any.
    """
    context = place.context("trainer-0" if name == PUBLISHER else "controller")
    addresses = context.addresses
    inner = addresses.controller if name == CONTROLLER else addresses.publisher
    hub = home_hub(context, name, WaitRegistry(name), context.local_flow)
    if open_to_all:
        hub.admit_inside = None
        hub.bind(inner)
    else:
        outer = addresses.controller_outside if name == CONTROLLER else addresses.publisher_outside
        bind_home(context, hub, inner, outer)
    if name == PUBLISHER:
        publisher = WeightPublisher(hub, chunk_of=lambda peer: 3000)
        serving = asyncio.create_task(publisher.serve())
        await publisher.publish(*Policy().version())
    else:
        hub.reads = MessageReader(RIGHTS["controller"])
        serving = asyncio.create_task(take_all(hub))
    try:
        yield hub, inner
    finally:
        serving.cancel()
        await hub.close()


async def take_all(hub: Hub) -> None:
    while True:
        (await hub.receive()).ack()


async def succeeds(
    place: Place, attack: str, security: ClientSecurity | None, open_to_all: bool = False, outer: bool = False
) -> bool:
    """Whether an attack on the inner door (or the outer one) has its effect."""
    hub_name, name, role, act = ATTACKS[attack]
    async with hub_of(place, hub_name, open_to_all) as (hub, address):
        if outer:
            addresses = place.context().addresses
            address = addresses.controller_outside if hub_name == CONTROLLER else addresses.publisher_outside
        link = Link(name, role, WaitRegistry("attacker"), {"site": "here"})
        limit_s = scaled(PATIENCE_S if security or not open_to_all else 10)
        connecting = asyncio.ensure_future(link.connect(address, limit_s, security))
        try:
            await until(
                lambda: connecting.done() or hub.refused()
            )  # a key of nobody's is counted; others get no answer
            if not connecting.done() or isinstance(connecting.exception(), DeadlineExpired):
                assert (link.bytes_in, dict(hub.peers)) == (0, {}), "it was not even greeted, and costs no memory"
                return False
            await connecting
            assert name in hub.peers
            return await act(place, link)
        finally:
            connecting.cancel()
            await link.close()


def run(body: Callable[[], Awaitable[Any]]) -> Any:
    async def limited() -> Any:
        try:
            async with asyncio.timeout(scaled(60)):
                return await body()
        except BaseException:
            zmq.asyncio.Context.instance().destroy(linger=0)  # what a failed assertion has left open
            raise

    return asyncio.run(limited())
