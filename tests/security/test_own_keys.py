"""Each process of a site is who its key says, and no other process of the same site."""

from __future__ import annotations

import pytest
import zmq

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.runtime.inside_keys import inside_admission, inside_roles
from streamrl.runtime.site_connections import CONTROLLER
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Link
from streamrl.transport.endpoint_base import Refused, send_now
from streamrl.transport.wire import Message, encode
from tests.security.keyed_place import ATTACKS, SERVERS, Place, hub_of, run
from tests.transport.sockets import until
from tests.waiting import scaled


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("thief", ["here-regular-0", "rewards-here"])
def test_the_key_of_one_process_does_not_give_the_name_or_the_role_of_another(
    any_place: Place, attack: str, thief: str
) -> None:
    """Whoever has taken an instance's key, or that of the reward workers, is that process and no other."""

    async def body() -> None:
        hub_name, name, role, _ = ATTACKS[attack]
        async with hub_of(any_place, hub_name) as (hub, address):
            for claimed in ((name, role), (thief, role)):
                link = Link(*claimed, WaitRegistry("attacker"), {"site": "here"})
                security = any_place.context(thief).inside_client_security(SERVERS[attack])
                why = f"the key is that of '{thief}'" if claimed[0] == name else f"'{thief}' is no '{role}' here"
                with pytest.raises(Refused, match=why):
                    await link.connect(address, scaled(10), security)
                await link.close()
            assert not hub.peers and hub.refused() == {"hello": {thief: 2}}, "blamed is the key, not the name"

    run(body)


@pytest.mark.parametrize("rank", ["trainer-0", "trainer-1"])
def test_the_key_of_a_rank_does_not_give_the_name_of_another(any_place: Place, rank: str) -> None:
    """Neither while the other one is connected nor before; its own place is not lost by it."""

    async def body() -> None:
        other = {"trainer-0": "trainer-1", "trainer-1": "trainer-0"}[rank]
        async with hub_of(any_place, CONTROLLER) as (hub, address):
            for connected in (False, True):
                victim = Link(other, "trainer", WaitRegistry(other))
                if connected:
                    await victim.connect(
                        address, scaled(10), any_place.context(other).inside_client_security("controller")
                    )
                liar = Link(other, "trainer", WaitRegistry("liar"))
                security = any_place.context(rank).inside_client_security("controller")
                with pytest.raises(Refused, match=f"the key is that of '{rank}', the hello is of '{other}'"):
                    await liar.connect(address, scaled(10), security)
                assert hub.refused() == {"hello": {rank: 1 + connected}}
                assert [peer.owner for peer in hub.peers.values()] == [other] * connected
                own = Link(rank, "trainer", WaitRegistry(rank))
                await own.connect(address, scaled(10), security)
                assert hub.peers[rank].owner == rank
                for link in (victim, liar, own):
                    await link.close()

    run(body)


def test_a_connection_of_another_process_cannot_be_taken_over(any_place: Place) -> None:
    """Whoever has guessed the id of a broken connection, and the session, cannot go on under its name."""

    async def body() -> None:
        async with hub_of(any_place, CONTROLLER) as (hub, address):
            rank = Link("trainer-0", "trainer", WaitRegistry("trainer-0"))
            await rank.connect(address, scaled(10), any_place.context("trainer-0").inside_client_security("controller"))
            peer = hub.peers["trainer-0"]
            assert peer.route is not None
            said = list(encode(Message("heartbeat", peer.session, 0, {"state": "stolen"})))
            await rank._stop()
            rank._socket.close(0)  # as by a broken connection: without a goodbye
            await until(lambda: not hub._answer(peer.route, hub._control("unknown")))
            thief = Link("trainer-0", "trainer", WaitRegistry("thief"))
            thief._socket.setsockopt(zmq.ROUTING_ID, peer.route.routing_id)
            thief._configure(any_place.context("trainer-1").inside_client_security("controller"))
            thief._socket.connect(address)
            await until(lambda: send_now(thief._socket, said) and hub.misplaced)
            assert list(hub.refused()) == ["wrong key"] and list(hub.refused()["wrong key"]) == ["trainer-1"]
            assert peer.state.get("state") != "stolen"
            hub._arrived(peer.route, said, "trainer-0")
            assert peer.state["state"] == "stolen", "the message is one that its owner may send"
            await thief.close()

    run(body)


def test_what_is_malformed_is_counted_under_the_key_of_its_sender(any_place: Place) -> None:
    async def body() -> None:
        async with hub_of(any_place, CONTROLLER) as (hub, address):
            for frames in ([b"nonsense"], list(encode(Message("hello", "life", 0, {"name": "trainer-0"})))):
                liar = Link("trainer-0", "trainer", WaitRegistry("liar"))
                liar._configure(any_place.context("rewards-here").inside_client_security("controller"))
                liar._socket.connect(address)
                before = hub.malformed
                await liar._socket.send_multipart(frames)
                await until(lambda before=before: hub.malformed > before)
                await liar.close()
            assert hub.refused() == {"malformed": {"rewards-here": 2}}

    run(body)


def test_every_process_of_the_plan_is_let_in_under_its_own_name_and_role(any_place: Place) -> None:
    context = any_place.context()
    roles = inside_roles(context.cluster, context.run, "here")
    good = {
        "controller": [
            *(("trainer-0", "trainer"), ("trainer-1", "trainer"), ("service-here", "service")),
            *(("rewards-here", "rewards"), ("operator-4711", "operator")),
        ],
        "publisher": [("service-here", "relay")],
        "service": [("here-regular-0", "instance")],
    }
    owners = {"operator-4711": "operator"}
    names = [name for some in good.values() for name, _ in some] + [
        "trainer",
        "trainer-2",
        "trainer-x",
        "operator",
        "here-regular-9",
    ]
    for hub, allowed in good.items():
        admit = inside_admission(roles, hub)  # type: ignore[arg-type]
        for name in names:
            for role in ("trainer", "service", "rewards", "operator", "relay", "instance", "agents", "controller"):
                for owner in (None, *roles):
                    fits = (name, role) in allowed and owner == owners.get(name, name)
                    assert (admit(name, role, {}, owner) is None) == fits, (hub, name, role, owner)


def test_ranks_on_every_node_and_instances_that_may_come_later_have_pairs_from_the_start() -> None:
    pool = {"name": "tail", "replicas": 1, "max_replicas": 3}
    launch = {"backend": "ray", "address": "127.0.0.1:1"}
    sites = {
        "here": {"launch": launch, "trainer": {"ranks": 4, "nodes": 2}, "generation": [pool]},
        "far": {"generation": [pool], "rewards": {"workers": 1}},
    }
    links = [{"between": ["here", "far"], "bandwidth_gbit_s": 1, "rtt_ms": 30}]
    cluster = ClusterConfig.model_validate({"hardware": "cpu", "sites": sites, "links": links})
    assert inside_roles(cluster, RunConfig(), "here") == {
        "controller": "controller",
        **{f"trainer-{rank}": "trainer" for rank in range(4)},
        "service-here": "service",
        **{f"here-tail-{number}": "instance" for number in range(3)},
        "rewards-here": "rewards",
        "operator": "operator",
    }
    assert inside_roles(cluster, RunConfig(), "far") == {
        "service-far": "service",
        **{f"far-tail-{number}": "instance" for number in range(3)},
        "rewards-far": "rewards",
    }
