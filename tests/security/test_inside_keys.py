"""Over the nodes of a Ray cluster only the processes of this site and launch can speak to its hubs."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlparse

import pytest

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.config.weight_sync import WeightSyncConfig
from streamrl.errors import RunFailed, UserError
from streamrl.launcher import ray_backend, supervisor
from streamrl.launcher.emulated_cluster import emulated
from streamrl.launcher.site_setup import prepare
from streamrl.protocol.message import MessageReader, wire
from streamrl.protocol.operator import PoolScaled, ScalePool
from streamrl.protocol.speakers import RIGHTS
from streamrl.run_dir import layout
from streamrl.runtime.inside_keys import load_inside_keys, make_inside_keys
from streamrl.runtime.operator_link import ask_controller
from streamrl.runtime.process_context import RoleContext
from streamrl.runtime.processes import this_host
from streamrl.runtime.site_connections import CONTROLLER, bind_home, connect_home, home_hub, to_home
from streamrl.transport.curve import ClientSecurity, load_own
from streamrl.transport.deadlines import DeadlineExpired, WaitRegistry
from streamrl.transport.endpoint import Delivery, Hub, Link
from streamrl.weights.assembly import make_relay
from tests.security.keyed_place import ATTACKS, LINKS, NOBODYS, PATIENCE_S, SERVERS, SITES, Place, hub_of, run, succeeds
from tests.security.sockets_of import Listener, mechanism
from tests.transport.sockets import new_key, until
from tests.waiting import scaled


@pytest.mark.parametrize("attack", ATTACKS)
def test_whoever_reaches_a_node_without_the_keys_of_the_site_gets_nothing(any_place: Place, attack: str) -> None:
    assert run(lambda: succeeds(any_place, attack, None, open_to_all=True)), "it works at a door without keys"
    assert not run(lambda: succeeds(any_place, attack, None))
    public = any_place.key_of(SERVERS[attack])
    assert not run(lambda: succeeds(any_place, attack, ClientSecurity(new_key(), public))), (
        "with a key of its own making"
    )


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_key_of_another_site_does_not_open_the_inner_doors(any_place: Place, attack: str) -> None:
    public = any_place.key_of(SERVERS[attack])
    assert not run(lambda: succeeds(any_place, attack, ClientSecurity(any_place.outside_key, public)))
    at_home = load_own(any_place.run_dir / "links", "here").public
    assert not run(lambda: succeeds(any_place, attack, ClientSecurity(any_place.outside_key, at_home)))


def test_the_key_of_the_inside_does_not_open_the_outer_door(any_place: Place) -> None:
    own = any_place.context("trainer-0").inside_keys
    assert own is not None
    for server in (any_place.key_of("controller"), load_own(any_place.run_dir / "links", "here").public):
        security = ClientSecurity(own, server)
        assert not run(lambda security=security: succeeds(any_place, "be the trainer", security, outer=True))


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
                await stranger.connect(inner, scaled(PATIENCE_S), ClientSecurity(new_key(), place.key_of("controller")))
            await until(lambda: hub.refused())
            assert list(hub.refused()) == ["unknown key"]
            for end in (near, away, stranger):
                await end.close()

    run(body)


def test_a_hub_says_itself_whether_it_asks_for_keys(place: Place) -> None:
    """What the whole run on Ray is asked (`tests/end_to_end/test_ray.py`)."""

    async def said(open_to_all: bool) -> str | None:
        async with hub_of(place, CONTROLLER, open_to_all) as (_, address):
            where = urlparse(address)
            return await asyncio.to_thread(mechanism, Listener(str(where.hostname), where.port or 0), 10)

    assert run(lambda: said(open_to_all=True)) == "NULL"
    assert run(lambda: said(open_to_all=False)) == "CURVE"


def test_an_operators_command_has_the_keys_of_the_run(any_place: Place) -> None:
    async def answer(hub: Hub) -> None:
        delivery: Delivery = await hub.receive()
        delivery.ack()
        await hub.send(delivery.peer, *wire(PoolScaled(pool=delivery.body.pool, before=1, after=2)))

    async def body() -> None:
        context = any_place.context()
        hub = home_hub(context, CONTROLLER, WaitRegistry(CONTROLLER), context.local_flow)
        hub.reads = MessageReader(RIGHTS["controller"])
        bind_home(context, hub, context.addresses.controller, "")
        answering = asyncio.create_task(answer(hub))
        order = ScalePool(pool="regular", site="here", replicas=2)
        assert await ask_controller(any_place.run_dir, order) == PoolScaled(pool="regular", before=1, after=2)
        await answering
        make_inside_keys(any_place.run_dir, "here", ["operator"])
        with pytest.raises(UserError, match="of another process, site or launch"):
            await ask_controller(any_place.run_dir, order)
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
    assert public.keys() == {
        *("controller", "trainer-0", "trainer-1", "service-here", "here-regular-0", "rewards-here", "operator")
    }


@pytest.mark.parametrize("wrong", [0o640, 0o604, 0o620])
def test_a_key_file_that_others_can_read_is_refused_with_its_path(place: Place, wrong: int) -> None:
    place.secret_file.chmod(wrong)
    with pytest.raises(UserError, match=f"{place.secret_file}: mode {wrong:04o} .*chmod 600"):
        place.context().inside_client_security("trainer-0")


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
        place.context().inside_client_security("trainer-0")
    place.secret_file.unlink()
    with pytest.raises(UserError, match=f"{place.secret_file}: no such file; .*streamrl launch.* --resume"):
        place.context().inside_client_security("trainer-0")


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
            context = RoleContext.load("trainer-0", "", tmp_path, False)
            assert context.inside_keys is not None
            seen.add(context.inside_keys.public)
        assert not (tmp_path / layout.KEYS).exists()
    assert len(seen) == 2


def test_a_second_launcher_in_a_folder_is_refused_and_leaves_the_keys_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_backend, "RaySite", NoRay)
    with supervisor._locked(tmp_path), prepare(one_site(), RunConfig(), tmp_path):
        before = RoleContext.load("trainer-0", "", tmp_path, False).inside_keys
        with pytest.raises(UserError, match=rf"in use by another launcher \(process {os.getpid()} on "):
            supervisor.run(one_site(), RunConfig(), tmp_path, resume=True, plain=True)
        assert RoleContext.load("trainer-0", "", tmp_path, False).inside_keys == before


def test_every_site_that_one_launcher_starts_has_keys_of_its_own(tmp_path: Path) -> None:
    """A process knows no more than its site's folder, on one machine as well, and gets into no other site with it."""
    cluster = emulated(ClusterConfig.model_validate({"hardware": "cpu", "sites": SITES, "links": LINKS}))
    folders = {}
    with prepare(cluster, RunConfig(), tmp_path, emulate=True) as share:
        for site, folder in share.folders.items():
            made = sorted(path.name for path in (folder / layout.KEYS / f"inside-{site}").glob("*.key_secret"))
            folders[site] = folder
            public = RoleContext.load("", site, folder, False).addresses.inside_keys
            assert made == sorted(f"{name}.key_secret" for name in public) and f"service-{site}" in public
            assert RoleContext.load(f"service-{site}", site, folder, False).inside_keys.public
        with pytest.raises(UserError, match=r"service-here.key_secret: no such file"):
            RoleContext.load("service-here", "far", folders["far"], False).inside_client_security("controller")
    assert not [path for folder in folders.values() for path in (folder / layout.KEYS).glob("inside-*")]


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
        soon = RunConfig.model_validate({"deadlines": {"startup_s": scaled(PATIENCE_S)}})
        context = replace(context, run=soon, cluster=one_site())
        link = to_home(context, "rewards", WaitRegistry("rewards-here"))
        with pytest.raises(DeadlineExpired, match=rf"rewards-here .*an answer of controller at tcp://{NOBODYS}:5600"):
            await connect_home(context, link, CONTROLLER, f"tcp://{NOBODYS}:5600")
        await link.close()
        async with hub_of(place, CONTROLLER) as (hub, _):
            with pytest.raises(DeadlineExpired, match=r"controller .*rewards-here, trainer-0 to start"):
                await hub.wait_for({"trainer-0", "rewards-here"}, scaled(PATIENCE_S))

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
        await link.connect(context.addresses.controller, scaled(10), security)
        await until(lambda: link.clock.offset_s is not None)
        assert link.clock.offset_s == pytest.approx(3600, abs=60)
        assert link.hub_time() == pytest.approx(time.time(), abs=60)
        assert hub.silent_for("rewards-here") < 60 > link.silent_for
        await link.send("item", {"i": 1})
        (await hub.receive()).ack()
        await link.flush(scaled(10))
        for end in (link, hub):
            await end.close()

    run(body)
