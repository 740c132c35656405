"""Who may say what, cell by cell: every kind of message, from every role, from inside and from another site."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any, get_args

import pytest

from streamrl.protocol.heartbeats import read_state
from streamrl.protocol.message import MessageReader, kind_of, wire
from streamrl.protocol.operator import ScalePool
from streamrl.protocol.speakers import RIGHTS, HubKind, role_at
from streamrl.runtime.process_plan import Role
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Hub, Link, Speaker
from streamrl.transport.wire import MalformedMessage, NotAllowed
from tests.messages import every_message, generated, type_of
from tests.ports import free_port
from tests.waiting import scaled, until

ROLES = ("trainer", "service", "rewards", "operator", "relay", "instance", "agents", "controller", "hub")
ROLES += ("stranger", "")
ANSWERS = (
    "precompute_done estimate_done train_done step_done examine_done publish_done canary_done checkpoint_done "
    "resources_done"
)
SERVICE = "samples parked given_back weights_ready asleep fleet canary_measured"
RELAY = "fetch again have"
TABLE: dict[tuple[HubKind, str, bool], str] = {
    # written again by hand: (hub, role, whether from another site) -> kinds
    ("controller", "trainer", False): f"{ANSWERS} weight_call",
    ("controller", "service", False): f"{SERVICE} weight_answer",
    ("controller", "service", True): SERVICE,
    ("controller", "rewards", False): "scored",
    ("controller", "rewards", True): "scored",
    ("controller", "operator", False): "scale checkpoint",
    ("publisher", "relay", False): RELAY,
    ("publisher", "relay", True): RELAY,
    ("service", "instance", False): "sample released progress applied missed asleep weights_taken canary_measured",
    ("service", "agents", False): "order_turn episode_done",
}
"""Cells that are not here allow nothing."""


@pytest.mark.parametrize("outside", [False, True], ids=["inside", "outside"])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("hub", RIGHTS)
def test_a_role_may_say_what_the_table_says_and_nothing_else(hub: HubKind, role: str, outside: bool) -> None:
    reads = MessageReader(RIGHTS[hub])
    speaker = Speaker("somebody", role, "west" if outside else None)
    allowed, dice = TABLE.get((hub, role, outside), "").split(), random.Random(f"{hub} {role} {outside}")
    taken = set()
    for message in every_message():
        for _ in range(40 if kind_of(message) in allowed else 2):
            body = generated(type_of(message), dice)
            try:
                taken.add(kind_of(reads(speaker, kind_of(message), body)))
            except NotAllowed:
                assert kind_of(message) not in allowed
            except MalformedMessage:  # of another edge, or values that contradict each other
                assert kind_of(message) in allowed
    assert taken == set(allowed)
    for kind in ("", "hello", "ack", "pickle", "\u0000", "x" * 10_000):
        with pytest.raises(NotAllowed) as refusal:
            reads(speaker, kind, {})
        assert len(str(refusal.value)) < 500


def test_every_role_of_a_plan_and_of_the_rights_is_in_the_table() -> None:
    assert {*get_args(Role), *(role for roles in RIGHTS.values() for role in roles)} <= set(ROLES)
    known = {kind_of(message) for message in every_message()}
    said = {kind_of(one) for roles in RIGHTS.values() for right in roles.values() for one in right.inside}
    assert said <= known and len(known - said) > 10  # the others are a hub's to say


def test_a_process_has_the_role_that_the_plan_gives_it() -> None:
    assert [role_at("controller", role) for role in ("service", "rewards", "trainer", "instance", "controller")] == [
        *("service", "rewards", "trainer"),
        *(None, None),
    ]
    assert [role_at("publisher", role) for role in ("service", "trainer", "rewards", "relay")] == ["relay"] + [None] * 3


def test_what_may_not_be_said_reaches_nobody_and_is_counted_by_cause_and_peer() -> None:
    async def body() -> None:
        hub = Hub("controller", WaitRegistry("controller"))
        hub.reads = MessageReader(RIGHTS["controller"])
        address = f"tcp://127.0.0.1:{free_port()}"
        hub.bind_outside(address, None)
        link = await Link("service-west", "service", WaitRegistry("west"), {"site": "west"}).connect(
            address, scaled(10)
        )
        try:
            await link.send(*wire(ScalePool(pool="regular", site="home", replicas=0)))
            await link.send("train_done", {"rank": 0, "started": 0.0, "finished": 0.0, "stats": {}})
            await link.send("parked", {"sample_id": "p-0.000", "tokens": "many", "round": 1})
            await link.flush(scaled(10))  # acknowledged, so that it is not sent again and again
            assert hub.receive_now() is None
            assert hub.refused() == {"not allowed": {"service-west": 2}, "malformed": {"service-west": 1}}
        finally:
            await link.close()
            await hub.close()

    asyncio.run(body())


@pytest.mark.parametrize(
    "state",
    [
        {"uplink": 5},
        {"instances": {"west-regular-0": "busy"}},
        {"instances": {"x": {"stalled_s": "long"}}},
        {"waits": [{"since": "now"}]},
        {"rtt_s": "none"},
        {"running": "all"},
        {"tokens_per_s": []},
        {"state": 3},
        *({"agents": {"agents-west": {"silent_s": bad}}} for bad in ("1", math.nan, math.inf, -1.0)),
        {"agents": {"agents-west": {"session": 7}}},
        {"instances": {"west-regular-0": {"drafts": [[]]}}},
        {"agents": {"agents-west": {"session": "x" * 1001}}},
    ],
)
def test_a_heartbeat_cannot_break_what_is_shown(state: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage, match="state of service"):
        read_state(Speaker("service-west", "service", "west"), state)


def test_what_is_kept_of_a_heartbeat_has_an_end_and_can_be_shown() -> None:
    wait = {"owner": "o\x1b" * 1000, "waiting_for": "w" * 19_000, "since": 0.0, "limit_s": 1.0}
    process = {"detail": "d\x1b", "drafts": "e\x1b", "waits": [wait] * 900, "refused": {"hello": {"p\x1b" * 200: 2}}}
    told = process | {"instances": {"west-regular-0": process}, "agents": {"agents-west": process}, "more": ["x"]}
    kept = read_state(Speaker("service-west", "service", "west"), told)
    assert "more" not in kept
    processes = [kept, kept["instances"]["west-regular-0"], kept["agents"]["agents-west"]]
    assert [len(one["waits"]) for one in processes] == [900, 100, 0]
    for one in processes:
        assert (one["detail"], one["drafts"], one["refused"]) == ("d?", "e?", {"hello": {"p?" * 100: 2}})
        assert all((len(w["owner"]), w["owner"][:2], len(w["waiting_for"])) == (1000, "o?", 1000) for w in one["waits"])


def test_a_long_text_of_one_instance_does_not_cost_its_site_the_heartbeat() -> None:
    names = "state", "detail", "dtype", "dtype_why", "packing", "packing_why", "drafts"
    wait = {"owner": "o" * 30_000, "waiting_for": "w" * 30_000, "since": 0.0, "limit_s": 1.0}
    long = dict.fromkeys(names, "x" * 30_000) | {"waits": [wait], "refused": {"hello": {"p" * 30_000: 2}}}
    told = {"instances": {"west-regular-0": long, "west-regular-1": {"weight_version": 7}}}
    kept = read_state(Speaker("service-west", "service", "west"), told)["instances"]
    assert kept["west-regular-1"]["weight_version"] == 7
    one = kept["west-regular-0"]
    assert {len(one[name]) for name in names} == {20_000}
    assert [(len(w["owner"]), len(w["waiting_for"])) for w in one["waits"]] == [(1000, 1000)]
    assert one["refused"] == {"hello": {"p" * 200: 2}}


def test_a_heartbeat_that_does_not_fit_leaves_the_one_before() -> None:
    async def body() -> None:
        hub = Hub("controller", WaitRegistry("controller")).bind(address := f"tcp://127.0.0.1:{free_port()}")
        hub.read_state = read_state
        link = Link("service-west", "service", WaitRegistry("west"))
        state: dict[str, Any] = {"state": "idle", "detail": "more"}
        link.state = lambda: state
        await link.connect(address, scaled(10))
        try:
            await until(lambda: hub.peers["service-west"].state.get("state") == "idle")
            state = {"state": "idle", "uplink": "broken"}
            await until(lambda: hub.refused().get("malformed"))
            assert hub.peers["service-west"].state["detail"] == "more"
        finally:
            await link.close()
            await hub.close()

    asyncio.run(body())
