"""Over the nodes of a Ray cluster only the processes of this site and launch can speak to its hubs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest

from streamrl.config.cluster import ClusterConfig
from streamrl.config.load import save_resolved
from streamrl.config.run import RunConfig, WeightSyncConfig
from streamrl.errors import RunFailed, UserError
from streamrl.launcher import ray_backend, supervisor
from streamrl.launcher.site_setup import choose_addresses, prepare
from streamrl.protocol.message import MessageReader, wire
from streamrl.protocol.operator import PoolScaled, ScalePool
from streamrl.protocol.speakers import RIGHTS
from streamrl.run_dir import layout
from streamrl.runtime.inside_keys import inside_admission, inside_roles, load_inside_keys, make_inside_keys
from streamrl.runtime.interfaces import free_ports
from streamrl.runtime.operator_link import ask_controller
from streamrl.runtime.process_context import Addresses, RoleContext
from streamrl.runtime.processes import this_host
from streamrl.runtime.site_connections import CONTROLLER, PUBLISHER, bind_home, connect_home, home_hub, to_home
from streamrl.transport.curve import ClientSecurity, KeyPair, load_own, make_keys
from streamrl.transport.deadlines import DeadlineExpired, WaitRegistry
from streamrl.transport.endpoint import Delivery, Hub, Link
from streamrl.transport.endpoint_base import Refused
from streamrl.weights.assembly import make_relay
from streamrl.weights.publisher import WeightPublisher
from streamrl.weights.site_relay import WeightRelay
from streamrl.weights.version_store import WeightStore
from tests.security.sockets_of import Listener, mechanism
from tests.tiny_model import save_tiny_model
from tests.transport.sockets import new_key, until
from tests.waiting import scaled
from tests.weights.world import Policy

RAY = {"backend": "ray", "address": "127.0.0.1:1"}
SITES = {
    "here": {"address": "127.0.0.1", "port": 5600, "launch": RAY, "trainer": {}, "generation": [{}]},
    "far": {"generation": [{}]},
}
LINKS = [{"between": ["here", "far"], "bandwidth_gbit_s": 1, "rtt_ms": 30}]
NOBODYS = "192.0.2.1"
"""Address that no machine has (RFC 5737)."""
PATIENCE_S = 0.7
"""Limit of a connection that gets no answer."""


@dataclass
class Place:
    """A trainer's site on Ray, as its launcher prepares it, with the keys for links to another site."""

    run_dir: Path

    def context(self, name: str = "controller", site: str = "here") -> RoleContext:
        """The context from which a process of a site starts."""
        loaded = RoleContext.load(name, site, self.run_dir, False)
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


@pytest.fixture
def place(tmp_path: Path) -> Place:
    for site in SITES:
        make_keys(tmp_path / "links", site)
    security = {"keys": str(tmp_path / "links")}
    values = {"hardware": "cpu", "sites": SITES, "links": LINKS, "security": security}
    cluster = ClusterConfig.model_validate(values)
    run = RunConfig.model_validate({"model": {"path": str(save_tiny_model(tmp_path / "model")), "dtype": "float32"}})
    save_resolved(tmp_path, cluster, run)
    controller, publisher = free_ports(2, "127.0.0.1")
    addresses = replace(
        choose_addresses(cluster, "here", tmp_path, node="127.0.0.1"),
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
    await link.flush(10)
    return True


async def says_hello(place: Place, link: Link) -> bool:
    """Nothing more: a link that is connected has been let in under its name."""
    return True


ATTACKS: dict[str, tuple[str, str, str, Attack]] = {
    "fetch weights": (PUBLISHER, "service-here", "relay", takes_the_weights),
    "be the trainer": (CONTROLLER, "trainer-0", "trainer", says_hello),
    "scale": (CONTROLLER, "operator-1", "operator", scales),
}


SERVERS = {"fetch weights": "trainer", "be the trainer": "controller", "scale": "controller"}
"""Process that each attack connects to."""


@contextlib.asynccontextmanager
async def hub_of(place: Place, name: str, open_to_all: bool = False) -> AsyncIterator[tuple[Hub, str]]:
    """The controller's or the publisher's hub at work, and its inner address.

    Args:
        open_to_all: without keys, as all were on Ray before there were any.
    """
    context = place.context("trainer" if name == PUBLISHER else "controller")
    addresses = context.addresses
    inner = addresses.controller if name == CONTROLLER else addresses.publisher
    hub = home_hub(context, name, WaitRegistry(name), context.local_flow)
    if open_to_all:
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
        try:
            await link.connect(address, PATIENCE_S if security or not open_to_all else 10, security)
        except DeadlineExpired:
            assert (link.bytes_in, dict(hub.peers)) == (0, {}), "it was not even greeted, and costs no memory"
            return False
        else:
            assert name in hub.peers
            return await act(place, link)
        finally:
            await link.close()


def run(body: Callable[[], Awaitable[Any]]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(scaled(60)):
            return await body()

    return asyncio.run(limited())


@pytest.mark.parametrize("attack", ATTACKS)
def test_whoever_reaches_a_node_without_the_keys_of_the_site_gets_nothing(place: Place, attack: str) -> None:
    assert run(lambda: succeeds(place, attack, None, open_to_all=True)), "it works at a door without keys"
    assert not run(lambda: succeeds(place, attack, None))
    public = place.key_of(SERVERS[attack])
    assert not run(lambda: succeeds(place, attack, ClientSecurity(new_key(), public))), "with a key of its own making"


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_key_of_another_site_does_not_open_the_inner_doors(place: Place, attack: str) -> None:
    public = place.key_of(SERVERS[attack])
    assert not run(lambda: succeeds(place, attack, ClientSecurity(place.outside_key, public)))
    at_home = load_own(place.run_dir / "links", "here").public
    assert not run(lambda: succeeds(place, attack, ClientSecurity(place.outside_key, at_home)))


def test_the_key_of_the_inside_does_not_open_the_outer_door(place: Place) -> None:
    own = place.context("trainer").inside_keys
    assert own is not None
    for server in (place.key_of("controller"), load_own(place.run_dir / "links", "here").public):
        security = ClientSecurity(own, server)
        assert not run(lambda security=security: succeeds(place, "be the trainer", security, outer=True))


def test_each_door_lets_in_those_whose_keys_it_has(place: Place) -> None:
    async def body() -> None:
        async with hub_of(place, CONTROLLER) as (hub, inner):
            inside, far = place.context("rewards-here"), place.context("service-far", "far")
            near = to_home(inside, "rewards", WaitRegistry("rewards-here"))
            away = to_home(far, "service", WaitRegistry("service-far"))
            await connect_home(inside, near, CONTROLLER, inner)
            await connect_home(far, away, CONTROLLER, far.addresses.controller)
            assert {name: peer.site for name, peer in hub.peers.items()} == {"rewards-here": None, "service-far": "far"}
            assert hub.refused() == {}
            stranger = Link("rewards-here", "rewards", WaitRegistry("stranger"))
            with pytest.raises(DeadlineExpired):
                await stranger.connect(inner, PATIENCE_S, ClientSecurity(new_key(), place.key_of("controller")))
            await until(lambda: hub.refused())
            assert list(hub.refused()) == ["unknown key"]
            for end in (near, away, stranger):
                await end.close()

    run(body)


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("thief", ["here-regular-0", "rewards-here"])
def test_the_key_of_one_process_does_not_give_the_name_or_the_role_of_another(
    place: Place, attack: str, thief: str
) -> None:
    """Whoever has taken an instance's key, or that of the reward workers, is that process and no other."""

    async def body() -> None:
        hub_name, name, role, _ = ATTACKS[attack]
        async with hub_of(place, hub_name) as (hub, address):
            for claimed in ((name, role), (thief, role)):
                link = Link(*claimed, WaitRegistry("attacker"), {"site": "here"})
                security = place.context(thief).inside_client_security(SERVERS[attack])
                why = f"the key is that of '{thief}'" if claimed[0] == name else f"'{thief}' is no '{role}' here"
                with pytest.raises(Refused, match=why):
                    await link.connect(address, 10, security)
                await link.close()
            assert not hub.peers and hub.refused() == {"hello": {name: 1, thief: 1}}

    run(body)


def test_every_process_of_the_plan_is_let_in_under_its_own_name_and_role(place: Place) -> None:
    context = place.context()
    roles = inside_roles(context.cluster, context.run, "here")
    good = {
        "controller": [
            *(("trainer-0", "trainer"), ("trainer-17", "trainer"), ("service-here", "service")),
            *(("rewards-here", "rewards"), ("operator-4711", "operator")),
        ],
        "publisher": [("service-here", "relay")],
        "service": [("here-regular-0", "instance")],
    }
    owners = {"trainer-0": "trainer", "trainer-17": "trainer", "operator-4711": "operator"}
    names = [name for some in good.values() for name, _ in some] + [
        "trainer",
        "trainer-x",
        "trainer-0-0",
        "here-regular-9",
    ]
    for hub, allowed in good.items():
        admit = inside_admission(roles, hub)  # type: ignore[arg-type]
        for name in names:
            for role in ("trainer", "service", "rewards", "operator", "relay", "instance", "agents", "controller"):
                for owner in (None, *roles):
                    fits = (name, role) in allowed and owner in (None, owners.get(name, name))
                    assert (admit(name, role, owner) is None) == fits, (hub, name, role, owner)


def test_a_hub_says_itself_whether_it_asks_for_keys(place: Place) -> None:
    """What the whole run on Ray is asked (`tests/end_to_end/test_ray.py`)."""

    async def said(open_to_all: bool) -> str | None:
        async with hub_of(place, CONTROLLER, open_to_all) as (_, address):
            where = urlparse(address)
            return await asyncio.to_thread(mechanism, Listener(str(where.hostname), where.port or 0), 10)

    assert run(lambda: said(open_to_all=True)) == "NULL"
    assert run(lambda: said(open_to_all=False)) == "CURVE"


def test_an_operators_command_has_the_keys_of_the_run(place: Place) -> None:
    async def answer(hub: Hub) -> None:
        delivery: Delivery = await hub.receive()
        delivery.ack()
        await hub.send(delivery.peer, *wire(PoolScaled(pool=delivery.body.pool, before=1, after=2)))

    async def body() -> None:
        context = place.context()
        hub = home_hub(context, CONTROLLER, WaitRegistry(CONTROLLER), context.local_flow)
        hub.reads = MessageReader(RIGHTS["controller"])
        bind_home(context, hub, context.addresses.controller, "")
        answering = asyncio.create_task(answer(hub))
        order = ScalePool(pool="regular", site="here", replicas=2)
        assert await ask_controller(place.run_dir, order) == PoolScaled(pool="regular", before=1, after=2)
        await answering
        make_inside_keys(place.run_dir, "here", ["operator"])
        with pytest.raises(UserError, match="of another process, site or launch"):
            await ask_controller(place.run_dir, order)
        await hub.close()

    run(body)


def test_a_hub_does_not_listen_where_others_reach_it_without_keys() -> None:
    async def body() -> None:
        for address in (f"tcp://{NOBODYS}:5600", "tcp://0.0.0.0:5600", "tcp://*:5600", "tcp://eth0:5600"):
            with pytest.raises(RunFailed, match="without keys: other machines could reach it"):
                Hub("controller", WaitRegistry("controller")).bind(address)

    run(body)


# -- files


def test_the_keys_are_their_users_alone(place: Place) -> None:
    folder = place.secret_file.parent
    assert stat.S_IMODE(place.secret_file.stat().st_mode) == 0o600 and stat.S_IMODE(folder.stat().st_mode) == 0o700
    public = place.context().addresses.inside_keys
    secrets = {load_inside_keys(place.run_dir, "here", name, public).secret.decode() for name in public}
    told = (place.run_dir / layout.ADDRESSES).read_text()
    assert not any(secret in told for secret in secrets) and all(key in told for key in public.values())
    assert len(secrets) == len(set(public.values())) == len(public), "each has its own"
    assert public.keys() == {"controller", "trainer", "service-here", "here-regular-0", "rewards-here", "operator"}


@pytest.mark.parametrize("wrong", [0o640, 0o604, 0o620])
def test_a_key_file_that_others_can_read_is_refused_with_its_path(place: Place, wrong: int) -> None:
    place.secret_file.chmod(wrong)
    with pytest.raises(UserError, match=f"{place.secret_file}: mode {wrong:04o} .*chmod 600"):
        place.context().inside_client_security("trainer")


def test_a_folder_of_keys_that_others_can_enter_is_refused_with_its_path(place: Place) -> None:
    place.secret_file.parent.chmod(0o750)
    with pytest.raises(UserError, match=f"{place.secret_file.parent}: mode 0750 .*chmod 700"):
        place.context().inside_server_security()


def test_a_link_in_the_place_of_the_folder_of_keys_is_neither_written_to_nor_read_from(place: Place) -> None:
    folder, theirs = place.secret_file.parent, place.run_dir / "theirs"
    folder.rename(theirs)
    before = {path: path.read_bytes() for path in theirs.iterdir()}
    folder.symlink_to(theirs)
    with pytest.raises(UserError, match=f"{folder}: is a link"):
        place.context().inside_server_security()
    with pytest.raises(UserError, match=f"{folder}: is no folder of keys"):
        make_inside_keys(place.run_dir, "here", ["controller"])
    assert before == {path: path.read_bytes() for path in theirs.iterdir()}


def test_the_keys_of_another_launch_or_of_another_site_are_refused(place: Place, tmp_path: Path) -> None:
    refused = rf"{place.secret_file}: the keys of another process, site or launch, .* --resume {place.run_dir}"
    make_inside_keys(place.run_dir, "there", ["controller"])
    others = place.run_dir / layout.KEYS / "inside-there" / "controller", place.secret_file.with_name("rewards-here")
    for other in others:
        for kind in (".key", ".key_secret"):
            shutil.copy2(f"{other}{kind}", place.secret_file.with_suffix(kind))
        with pytest.raises(UserError, match=refused):
            place.context().inside_server_security()
    make_inside_keys(place.run_dir, "here", ["controller"])
    with pytest.raises(UserError, match=refused):
        place.context().inside_server_security()


def test_missing_and_malformed_keys_name_the_file_and_what_makes_it(place: Place) -> None:
    place.secret_file.write_text("nothing")
    with pytest.raises(UserError, match=f"{place.secret_file}: it holds no public key; .*streamrl launch.* --resume"):
        place.context().inside_client_security("trainer")
    place.secret_file.unlink()
    with pytest.raises(UserError, match=f"{place.secret_file}: no such file; .*streamrl launch.* --resume"):
        place.context().inside_client_security("trainer")


class NoRay:
    """A site on Ray as far as its keys and addresses go."""

    host = "127.0.0.1"

    def __init__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        """Nothing was connected."""


def one_site() -> ClusterConfig:
    return ClusterConfig.model_validate({"hardware": "cpu", "sites": {"here": SITES["here"]}})


def test_every_launch_has_keys_of_its_own_that_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_backend, "RaySite", NoRay)
    seen = set()
    for _ in range(2):  # the second one is a resumed run
        with prepare(one_site(), RunConfig(), tmp_path):
            context = RoleContext.load("trainer", "", tmp_path, False)
            assert context.inside_keys is not None
            seen.add(context.inside_keys.public)
        assert not (tmp_path / layout.KEYS).exists()
    assert len(seen) == 2


def test_a_second_launcher_in_a_folder_is_refused_and_leaves_the_keys_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_backend, "RaySite", NoRay)
    with supervisor._locked(tmp_path), prepare(one_site(), RunConfig(), tmp_path):
        before = RoleContext.load("trainer", "", tmp_path, False).inside_keys
        with pytest.raises(UserError, match=rf"in use by another launcher \(process {os.getpid()} on "):
            supervisor.run(one_site(), RunConfig(), tmp_path, resume=True, plain=True)
        assert RoleContext.load("trainer", "", tmp_path, False).inside_keys == before


def test_one_machine_needs_no_keys(tmp_path: Path) -> None:
    site = {"here": {"trainer": {}, "generation": [{}]}}
    cluster = ClusterConfig.model_validate({"hardware": "cpu", "sites": site})
    with prepare(cluster, RunConfig(), tmp_path):
        context = RoleContext.load("trainer", "", tmp_path, False)
        assert context.inside_keys is None and not (tmp_path / layout.KEYS).exists()


@pytest.mark.parametrize("chosen", ["auto", "raw", "delta"])
def test_between_nodes_weights_are_deltas_so_that_little_has_to_be_encrypted(place: Place, chosen: str) -> None:
    async def body() -> None:
        across = place.context("service-here")
        across = replace(across, run=across.run.model_copy(update={"weights": WeightSyncConfig(encoding=chosen)}))
        together = ClusterConfig.model_validate(
            {"hardware": "cpu", "sites": {"here": {"trainer": {}, "generation": [{}]}}}
        )
        found = {}
        for context in (across, replace(across, cluster=together)):
            link = to_home(context, "relay", WaitRegistry("relay"))
            relay = make_relay(context, link)
            assert relay.host == this_host()  # on the trainer's own node its file is copied
            found[context.one_machine] = relay.encoding
            await link.close()
        assert found == ({True: "raw", False: "delta"} if chosen == "auto" else {True: chosen, False: chosen})

    run(body)


# -- networks and clocks


def test_a_node_that_cannot_reach_the_stated_address_names_the_process_and_the_address(place: Place) -> None:
    async def body() -> None:
        context = place.context("rewards-here")
        soon = RunConfig.model_validate({"deadlines": {"startup_s": PATIENCE_S}})
        context = replace(context, run=soon, cluster=one_site())
        link = to_home(context, "rewards", WaitRegistry("rewards-here"))
        with pytest.raises(DeadlineExpired, match=rf"rewards-here .*an answer of controller at tcp://{NOBODYS}:5600"):
            await connect_home(context, link, CONTROLLER, f"tcp://{NOBODYS}:5600")
        await link.close()
        async with hub_of(place, CONTROLLER) as (hub, _):
            with pytest.raises(DeadlineExpired, match=r"controller .*rewards-here, trainer-0 to start"):
                await hub.wait_for({"trainer-0", "rewards-here"}, PATIENCE_S)

    run(body)


def test_clocks_an_hour_apart_change_nothing_between_processes_of_a_site(place: Place) -> None:
    """Keys have no dates, and a connection is judged by each process's own monotonic clock."""

    async def body() -> None:
        context = place.context()
        late = lambda: time.time() - 3600  # noqa: E731
        hub = home_hub(context, CONTROLLER, WaitRegistry(CONTROLLER), context.local_flow)
        bind_home(context, hub, context.addresses.controller, "")
        link = Link("rewards-here", "rewards", WaitRegistry("rewards-here"), clock=late)
        security = place.context("rewards-here").inside_client_security(CONTROLLER)
        await link.connect(context.addresses.controller, 10, security)
        await until(lambda: link.clock.offset_s is not None)
        assert link.clock.offset_s == pytest.approx(3600, abs=60)
        assert link.hub_time() == pytest.approx(time.time(), abs=60)
        assert hub.silent_for("rewards-here") < 60 > link.silent_for
        await link.send("item", {"i": 1})
        (await hub.receive()).ack()
        await link.flush(10)
        for end in (link, hub):
            await end.close()

    run(body)
