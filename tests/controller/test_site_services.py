"""Weights spread to each site at its own pace; work goes to sites that can take it."""

from __future__ import annotations

import asyncio
import json
import math
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scheduler.cost.decode import StepCurve
from scheduler.simulation.generation_simulator import SimulatedInstance
from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.controller import site_services
from streamrl.controller.given_work import GivenWork, sendable, wire_bytes
from streamrl.controller.group_source import samples_of
from streamrl.controller.site_services import Services
from streamrl.controller.site_trust import open_work
from streamrl.controller.step_times import Traffic
from streamrl.protocol.controller_site import InstanceState, Use, WeightsReady
from streamrl.protocol.controller_trainer import PublishDone
from streamrl.protocol.samples import fleet_from_wire, fleet_to_wire
from streamrl.rollouts.types import Group
from streamrl.run_dir.remote_site import RemoteSite
from streamrl.transport.deadlines import DeadlineExpired, WaitRegistry
from tests.waiting import scaled

CLUSTER = ClusterConfig.model_validate(
    {
        "hardware": "cpu",
        "absence_s": 500,
        "sites": {
            "home": {"port": 5600, "trainer": {}, "generation": [{}]},
            "far": {"generation": [{}]},
        },
        "links": [{"between": ["home", "far"], "bandwidth_gbit_s": 1, "rtt_ms": 30, "price_per_gb": 0.05}],
    }
)


HOME = {"source": None, "transfer_s": 0.5}
QUICK, SLOW = {"started": 10.0, "fetched": 11.0} | HOME, {"started": 10.0, "fetched": 15.0} | HOME


class Wire:
    """What services need of a hub: it keeps what is sent."""

    def __init__(self, *names: str) -> None:
        curve = StepCurve((1, 8), (0.01, 0.02), 0.0, 0.0)
        self.peers = {
            name: SimpleNamespace(
                meta={"fleet": fleet_to_wire([SimulatedInstance(f"{name}-0", curve, 8, "regular")])},
                state={},
                bytes_in=0,
                bytes_out=0,
                empty_connections=0,
            )
            for name in names
        }
        self.sent: dict[str, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
        self.silent: dict[str, float] = {}

    async def send(self, peer: str, kind: str, body: dict[str, Any], arrays: object = None, **options: Any) -> None:
        self.sent[peer].append((kind, body))

    def silent_for(self, name: str) -> float:
        return self.silent.get(name, 0.1)

    def weights(self, peer: str) -> list[int]:
        return [body["number"] for kind, body in self.sent[peer] if kind == "weights"]

    def groups(self, peer: str) -> list[str]:
        return [group["group_id"] for kind, body in self.sent[peer] if kind == "generate" for group in body["groups"]]


@pytest.fixture
def wire() -> Wire:
    return Wire("service-home", "service-far")


def make_services(wire: Wire, run: RunConfig) -> Services:
    sites = {"service-home": "home", "service-far": "far"}
    made = Services(wire, WaitRegistry("test"), sites, CLUSTER, run)  # type: ignore[arg-type]
    made.joined()
    return made


def test_a_token_of_a_mixture_that_is_replayed_has_more_bytes_on_a_link(wire: Wire, tmp_path: Path) -> None:
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    for replay, expected in ((False, 12), (True, 12 + 48 * 8)):
        run = {"model": {"path": str(tmp_path)}, "algorithm": {"name": "grpo", "router_replay": replay}}
        made = make_services(wire, RunConfig.model_validate(run))
        assert made._dispatch.bytes_per_token == expected


@pytest.mark.parametrize(
    ("hardware", "run", "limit_s"),
    [
        ("cpu", {}, 300.0),
        ("cpu", {"deadlines": {"startup_s": 900}}, 900.0),
        ("cuda", {"deadlines": {"training_s": 5000}, "schedule": {"name": "colocated"}}, 5300.0),
        ("cpu", {"deadlines": {"training_s": 5000}, "schedule": {"name": "colocated"}}, 300.0),
    ],
)
def test_the_trainers_site_may_take_as_long_to_come_back_as_its_instances_to_start(
    wire: Wire, hardware: str, run: dict[str, Any], limit_s: float
) -> None:
    waits, sites = WaitRegistry("test"), {"service-home": "home", "service-far": "far"}
    cluster = CLUSTER.model_copy(update={"hardware": hardware})
    made = Services(wire, waits, sites, cluster, RunConfig.model_validate(run))  # type: ignore[arg-type]
    wire.peers.clear()
    made.gone("service-home")
    made.gone("service-far")
    assert [one["limit_s"] for one in waits.snapshot()] == [limit_s, 500.0]


def test_the_end_of_the_wait_for_a_site_that_has_said_goodbye_names_its_limit(wire: Wire, services: Services) -> None:
    del wire.peers["service-far"]
    services.gone("service-far")
    wait = services._waits._waits["return service-far"]
    assert str(wait.expired("controller")) == (
        "controller waited 500 s for service-far to come back, and absence_s is 500 s (see docs: E1011)"
    )


def test_a_service_that_is_back_before_its_goodbye_is_read_is_not_waited_for(wire: Wire, services: Services) -> None:
    """The hellos and goodbyes of before the run begins are read once it has."""
    services.gone("service-far")
    assert services._waits.begun == frozenset()


@pytest.fixture
def services(wire: Wire) -> Services:
    return make_services(wire, RunConfig())


def version(number: int) -> PublishDone:
    return PublishDone(rank=0, started=0.0, finished=1.0, number=number, content_hash=f"hash {number}", bytes=100)


def report(values: dict[str, Any]) -> WeightsReady:
    return WeightsReady(**({"applied": {}} | values))


def some_groups(first: int, count: int) -> tuple[list[Group], list[list[tuple[str, int, float | None]]]]:
    tokens = np.arange(5, dtype=np.int32)
    groups = [Group(f"g{n}", 1, n, f"p{n}", "t", 0, "", tokens, 2) for n in range(first, first + count)]
    return groups, [[(f"{group.group_id}/{k}", k, None) for k in range(2)] for group in groups]


def test_a_slow_site_skips_versions_and_the_run_goes_by_the_oldest_that_is_served(
    wire: Wire, services: Services
) -> None:
    async def play() -> None:
        assert services.version == -1
        await services.spread(version(0))
        assert not services.can_take_version
        assert not await services.ready("service-home", report({"number": 0, "bytes": 100} | QUICK))
        assert services.version == -1 and services.can_take_version
        await services.spread(version(1))
        await services.ready("service-home", report({"number": 1, "bytes": 100} | QUICK))
        await services.spread(version(2))
        assert wire.weights("service-home") == [0, 1, 2]
        assert wire.weights("service-far") == [0]
        assert not await services.ready("service-far", report({"number": 0, "bytes": 90} | SLOW))
        assert services.version == 0
        assert wire.weights("service-far") == [0, 2]  # version 1 is skipped
        assert not await services.ready("service-home", report({"number": 2, "bytes": 100} | QUICK))
        assert await services.ready("service-far", report({"number": 2, "bytes": 7} | QUICK))
        assert services.version == 2 and not services.updating
        wire.peers["service-far"].bytes_in, wire.peers["service-far"].bytes_out = 30_000_000, 10_000_000
        wire.peers["service-home"].bytes_in = 10**9  # inside the trainer's site: no link
        traffic = services.traffic()
        assert (traffic.nbytes, traffic.seconds) == (100 + 100 + 90 + 100 + 7, 5.0)
        assert traffic.usd == {"far": pytest.approx(0.05 * (0.04 + (90 + 7) / 1e9))}
        assert services.traffic() == Traffic(0, None, {})

    asyncio.run(play())


def test_a_service_that_was_started_anew_is_told_weights_and_what_its_site_has(wire: Wire, services: Services) -> None:
    async def play() -> None:
        await services.spread(version(0))
        for name in ("service-home", "service-far"):
            await services.ready(name, report({"number": 0, "bytes": 100} | QUICK))
        groups, samples = some_groups(0, 6)
        await services.generate(groups, samples)
        had = wire.groups("service-far")
        assert had
        await services.spread(version(1))
        assert wire.weights("service-far") == [0, 1]
        peer = wire.peers.pop("service-far")  # it says goodbye
        services.gone("service-far")
        await services.tell(Use(instances=[]))  # who is away is told nothing, and that is no error
        wire.peers["service-far"] = peer
        assert await services.returned("service-far") == had
        assert wire.weights("service-far") == [0, 1, 1]
        assert not await services.ready("service-home", report({"number": 1, "bytes": 1} | QUICK))
        assert await services.ready("service-far", report({"number": 1, "bytes": 1} | QUICK))
        assert await services.ready("service-far", report({"number": 1, "bytes": 1} | QUICK))
        work = [GivenWork(group.group_id, group, some) for group, some in zip(groups, samples, strict=True)]
        await services.resend("service-far", [one for one in work if one.key in had], None)
        assert wire.groups("service-far") == had + had
        newest = [body["newest"] for kind, body in wire.sent["service-far"] if kind == "generate"]
        assert newest[0] == 0 and newest[-1] == 1, "tokens of version 1 may be kept before it has fetched it"

    asyncio.run(play())


def test_what_is_sent_again_of_an_evaluation_has_no_budget(wire: Wire, services: Services) -> None:
    """Nobody would resume an evaluation's sample that is parked at the budget of a round."""
    (trained, evaluated), draws = some_groups(0, 2)
    pool: Any = SimpleNamespace(
        groups={"g0": trained}, unfinished=lambda ids: [draw[0] for draw in samples_of(trained, 1)]
    )
    evaluator: Any = SimpleNamespace(open_groups=lambda: {"g1": evaluated}, unfinished_samples=lambda group: draws[1])
    work = open_work(["g0", "g1", "g1/1"], {"g1/1": "g1"}, pool, evaluator, seed=1)
    asyncio.run(services.resend("service-far", work, 16))
    sent = [
        (body["budget"], sample[0])
        for kind, body in wire.sent["service-far"]
        if kind == "generate"
        for group in body["groups"]
        for sample in group["samples"]
    ]
    assert [one for one in sent if one[1].startswith("g1")] == [(None, "g1/0"), (None, "g1/1")]
    assert {budget for budget, name in sent if name.startswith("g0")} == {16}


def test_a_service_that_died_before_its_instances_slept_is_asked_again_once_they_have_weights(
    wire: Wire, services: Services
) -> None:
    names = ("service-home", "service-far")

    def asked() -> list[int]:
        return [sum(kind == "sleep" for kind, _ in wire.sent[name]) for name in names]

    async def play() -> None:
        await services.spread(version(0))
        for name in names:
            await services.ready(name, report({"number": 0, "bytes": 1} | QUICK))
        assert not await services.leave_devices() and not await services.leave_devices()
        assert asked() == [1, 1]
        services.asleep("service-far")
        await services.returned("service-home")
        assert not services.awaits_sleep() and services.updating
        await services.ready("service-home", report({"number": 0, "bytes": 1} | QUICK))
        assert not await services.leave_devices()
        assert asked() == [2, 2] and services.awaits_sleep()
        for name in names:
            services.asleep(name)
        assert await services.leave_devices() and not services.awaits_sleep()

    asyncio.run(play())


def test_work_that_one_message_cannot_hold_is_sent_in_several_that_are_placed_together(
    wire: Wire, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first issue of large batches is so much, and all open work that a restarted service gets again."""
    groups, samples = some_groups(0, 7)
    work = [GivenWork(group.group_id, group, some) for group, some in zip(groups, samples, strict=True)]
    work[3] = work[3]._replace(evaluation=True)
    of_three = partial(sendable, most=3 * max(wire_bytes(one) for one in work))
    monkeypatch.setattr("streamrl.controller.site_services.sendable", of_three)
    asyncio.run(services.resend("service-far", work, 16))
    sent = [
        ([group["group_id"] for group in body["groups"]], body["budget"], body["more"])
        for _, body in wire.sent["service-far"]
    ]
    assert sent == [(["g0", "g1", "g2"], 16, True), (["g4", "g5", "g6"], 16, False), (["g3"], None, False)]


def test_a_site_may_get_a_newer_version_than_was_announced(wire: Wire, services: Services) -> None:
    async def play() -> None:
        await services.spread(version(0))
        await services.ready("service-far", report({"number": 0, "bytes": 1} | QUICK))
        await services.ready("service-home", report({"number": 1, "bytes": 1} | QUICK))  # made, but not yet told here
        assert services.version == 0
        assert not await services.spread(version(1))
        assert wire.weights("service-home") == [0] and wire.weights("service-far") == [0, 1]
        assert await services.ready("service-far", report({"number": 1, "bytes": 1} | QUICK))
        assert services.version == 1

    asyncio.run(play())


@pytest.mark.parametrize("home_generates", [False, True])
def test_weights_come_from_a_nearer_site_once_that_has_served_what_this_one_holds(home_generates: bool) -> None:
    cluster = ClusterConfig.model_validate(
        {
            "hardware": "cpu",
            "sites": {
                "home": {"port": 5600, "trainer": {}, "generation": [{}] * home_generates},
                "near": {"port": 5700, "generation": [{}]},
                "far": {"generation": [{}]},
            },
            "links": [
                {"between": ["home", "near"], "bandwidth_gbit_s": 1, "rtt_ms": 10},
                {"between": ["home", "far"], "bandwidth_gbit_s": 0.01, "rtt_ms": 100},
                {"between": ["near", "far"], "bandwidth_gbit_s": 1, "rtt_ms": 10},
            ],
        }
    )
    home = {"service-home": "home"} if home_generates else {}
    wire = Wire(*home, "service-near", "service-far")
    wire.peers["service-near"].meta["passes_weights_on"] = True
    services = Services(
        wire,  # type: ignore[arg-type]
        WaitRegistry("test"),
        home | {"service-near": "near", "service-far": "far"},
        cluster,
        RunConfig(),
    )
    services.joined()
    near, far = {"started": 0.0, "fetched": 1.0, "source": None}, {"started": 0.0, "fetched": 9.0, "source": None}

    def sources(peer: str) -> list[str | None]:
        return [body["source"] for kind, body in wire.sent[peer] if kind == "weights"]

    async def spread(number: int) -> None:
        await services.spread(version(number))
        if home_generates:
            await services.ready("service-home", report({"number": number, "bytes": 1} | QUICK))
            assert sources("service-home") == [None] * (number + 1)

    async def play() -> None:
        for number in (0, 1):
            await spread(number)
            await services.ready(
                "service-near", report({"number": number, "bytes": 2_000_000, "transfer_s": 0.1} | near)
            )
            await services.ready("service-far", report({"number": number, "bytes": 2_000_000, "transfer_s": 2.0} | far))
        assert sources("service-near") == [None, None]
        assert sources("service-far") == [None, "near"]  # at first it held nothing that `near` had served
        wire.silent["service-near"] = 60.0
        await spread(2)
        assert sources("service-far")[-1] is None  # `near` is away
        await services.ready("service-near", report({"number": 2, "bytes": 2_000_000, "transfer_s": 0.1} | near))
        # a link that turns out to be fast is used from then on
        await services.ready("service-far", report({"number": 2, "bytes": 2_000_000, "transfer_s": 0.001} | far))
        wire.silent.clear()
        await spread(3)
        assert sources("service-far")[-1] is None

    asyncio.run(play())


def test_the_wait_for_weights_is_longer_for_a_site_that_may_be_away(services: Services) -> None:
    async def play() -> None:
        await services.spread(version(0))
        limits = {wait["waiting_for"]: wait["limit_s"] for wait in services._waits.snapshot()}
        assert limits == {"weights 0 to reach service-home": 1200, "weights 0 to reach service-far": 1700}

    asyncio.run(play())


@pytest.mark.parametrize(("rolling", "loads"), [(False, 1), (True, 3)])
def test_a_site_has_time_to_replace_an_instance_that_does_not_load_a_version(
    wire: Wire, rolling: bool, loads: int
) -> None:
    """Its limits are weights_s for the fetch, and for each load; instances load one after the other if rolling."""
    run = RunConfig.model_validate({"schedule": {"name": "async", "rolling": rolling}, "deadlines": {"weights_s": 10}})
    services = make_services(wire, run)
    states = {name: InstanceState("regular", "ready", "") for name in ("home-0", "home-1", "home-2")}
    services.lives_changed("service-home", states)

    async def play() -> None:
        await services.spread(version(0))
        limits = {wait["waiting_for"]: wait["limit_s"] for wait in services._waits.snapshot()}
        assert limits["weights 0 to reach service-home"] == 2 * (10 + loads * 10)
        await services.leave_devices()
        limits = {wait["waiting_for"]: wait["limit_s"] for wait in services._waits.snapshot()}
        assert limits["service-home, service-far to leave their devices"] > 10

    asyncio.run(play())


def test_a_wait_for_weights_that_expires_names_the_instances_that_have_not_loaded_them(wire: Wire) -> None:
    run = RunConfig.model_validate({"schedule": {"name": "async"}, "deadlines": {"weights_s": 0.01}})
    services = make_services(wire, run)
    loaded = {"home-0": 3, "home-1": 2, "home-2": None}
    wire.peers["service-home"].state = {"instances": {name: {"weight_version": n} for name, n in loaded.items()}}

    async def play() -> None:
        await services.spread(version(3))
        with pytest.raises(DeadlineExpired, match=r"for weights 3 to reach service-home; home-1, home-2 did not load"):
            await services._waits.first_of_begun(asyncio.get_running_loop().create_future())

    asyncio.run(play())


@pytest.mark.parametrize(("on_update", "lasts"), [("keep_kv", False), ("wait", True)])
def test_the_wait_for_weights_lasts_while_requests_that_end_first_produce_tokens(
    wire: Wire, on_update: str, lasts: bool
) -> None:
    limits = {"weights_s": 0.02, "generation_s": 0.01}
    run = {"schedule": {"name": "async", "on_update": on_update}, "deadlines": limits}
    services = make_services(wire, RunConfig.model_validate(run))
    wire.peers["service-home"].state = {"instances": {"home-0": {"running": 1, "stalled_s": 0.0}}}
    wire.silent["service-home"] = 0.0

    async def play() -> None:
        await services.spread(version(0))
        async with asyncio.timeout(1.0 if lasts else scaled(30)):
            await services._waits.first_of_begun(asyncio.get_running_loop().create_future())

    with pytest.raises(TimeoutError if lasts else DeadlineExpired):
        asyncio.run(play())


def test_a_site_that_is_away_or_congested_gets_nothing_new_while_another_can_work(
    wire: Wire, services: Services
) -> None:
    async def play() -> None:
        await services.generate(*some_groups(0, 20))
        both = wire.groups("service-home"), wire.groups("service-far")
        assert sorted(both[0] + both[1]) == sorted(f"g{n}" for n in range(20))
        assert min(map(len, both)) > 4
        wire.silent["service-far"] = 60.0
        await services.generate(*some_groups(20, 6))
        assert {f"g{n}" for n in range(20, 26)} <= set(wire.groups("service-home"))
        wire.silent.clear()
        wire.peers["service-home"].state = {"congested": True}
        await services.generate(*some_groups(26, 6))
        assert {f"g{n}" for n in range(26, 32)} <= set(wire.groups("service-far"))
        wire.peers["service-home"].state = {}
        services.fleet_changed("service-far", [])  # its instances have died, and are not back yet
        await services.generate(*some_groups(32, 6))
        assert {f"g{n}" for n in range(32, 38)} <= set(wire.groups("service-home"))
        wire.silent["service-home"] = 60.0  # nobody is left that can: it is better to wait in a queue than nowhere
        await services.generate(*some_groups(38, 6))
        placed = wire.groups("service-home") + wire.groups("service-far")
        assert sorted(placed) == sorted(f"g{n}" for n in range(44))

    asyncio.run(play())


def test_a_site_that_is_doubtful_as_a_whole_gets_a_group_and_one_in_part_does_not(
    wire: Wire, services: Services
) -> None:
    async def play() -> None:
        slow = StepCurve((1, 8), (10.0, 20.0), 0.0, 0.0)
        fleet = [SimulatedInstance(f"far-{n}", slow, 8, "regular", doubtful=n == 0) for n in range(2)]
        services.fleet_changed("service-far", fleet_to_wire(fleet))
        await services.generate(*some_groups(0, 6))
        assert len(wire.groups("service-home")) == 6
        services.fleet_changed("service-far", fleet_to_wire(fleet[:1]))
        await services.generate(*some_groups(6, 6))
        assert len(wire.groups("service-far")) == 1

    asyncio.run(play())


def test_what_a_site_reports_of_its_instances_is_parsed_once(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[object] = []

    def counting(wired: list[dict[str, Any]]) -> list[SimulatedInstance]:
        parsed.append(wired)
        return fleet_from_wire(wired)

    monkeypatch.setattr(site_services, "fleet_from_wire", counting)
    far = SimulatedInstance("far-0", StepCurve((1, 8), (10.0, 20.0), 0.0, 0.0), 8, "regular")
    services.fleet_changed("service-far", fleet_to_wire([far]))
    assert far in services.fleet() and "far-0" in services.instances()
    asyncio.run(services.generate(*some_groups(0, 6)))
    assert len(parsed) == 1


def test_the_status_of_a_remote_site_shows_what_is_known_of_it(wire: Wire, services: Services) -> None:
    wire.peers["service-far"].state = {
        "rtt_s": 0.031,
        "clock_offset_s": -2.5,
        "uplink": {"backlog_samples": 3, "compressing": True, "ratio": 0.4},
        "congested": True,
        "weights_refetched": 1,
        "controller_silent_s": 11.0,
        "publisher_silent_s": 40.0,
        "empty_connections": 2,
    }
    wire.peers["service-far"].empty_connections = 1
    wire.silent["service-far"] = 12.0
    assert services.heartbeats.remote() == {
        "far": {
            "silent_s": 12.0,
            "rtt_ms": pytest.approx(31.0),
            "clock_offset_s": -2.5,
            "samples_waiting": 3,
            "compression": pytest.approx(2.5),
            "congested": True,
            "weights_refetched": 1,
            "controller_silent_s": 11.0,
            "publisher_silent_s": 40.0,
            "empty_connections": 2,
            "excluded": "",
        }
    }


def test_a_remote_site_that_has_said_goodbye_stays_in_the_status(wire: Wire, services: Services) -> None:
    async def play() -> None:
        here = dict(wire.peers)
        for name in ("service-home", "service-far"):
            services.gone(name)
            del wire.peers[name]
        assert list(services.heartbeats.remote()) == ["far"]
        far = RemoteSite.model_validate(services.heartbeats.remote()["far"])
        assert far.away and far.left_s == far.silent_s and far.absence_s == 500
        services.exclude("service-far", "it lies")
        far = RemoteSite.model_validate(services.heartbeats.remote()["far"])
        assert far.excluded == "it lies" and far.absence_s is None
        wire.peers.update(here)
        assert "left_s" not in services.heartbeats.remote()["far"]

    asyncio.run(play())


def test_a_remote_site_that_has_not_come_yet_is_not_said_to_have_left(wire: Wire, services: Services) -> None:
    wire.peers.clear()
    assert services.heartbeats.remote() == {}


def test_the_latest_token_is_that_of_any_busy_instance_and_as_old_as_the_heartbeat_that_told_of_it(
    wire: Wire, services: Services
) -> None:
    assert services.heartbeats.since_token() == math.inf
    wire.peers["service-home"].state = {"instances": {"a": {"running": 1, "stalled_s": 40.0}, "b": {"running": 0}}}
    wire.peers["service-far"].state = {"instances": {"c": {"running": 2, "stalled_s": 1.0}}}
    wire.silent = {"service-home": 2.0, "service-far": 30.0}
    assert services.heartbeats.since_token() == 31.0
    wire.silent["service-far"] = 300.0  # nobody knows what happens there
    assert services.heartbeats.since_token() == 42.0
