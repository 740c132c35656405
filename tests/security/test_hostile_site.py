"""A site with a valid key says what is not its own, or makes no sense: nothing comes of it, and the run goes on."""

from __future__ import annotations

import asyncio
import io
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from streamrl.controller import arrivals
from streamrl.controller.arrivals import read_sample
from streamrl.controller.controller import Controller
from streamrl.controller.sample_intake import MOST_PARTS
from streamrl.controller.site_claims import read_heartbeat
from streamrl.protocol.controller_rewards import ScoreAnswer
from streamrl.protocol.controller_site import (
    CanaryMeasured,
    FleetChanged,
    GivenBack,
    InstanceState,
    Parked,
    SampleBatch,
    SiteAsleep,
    WeightsReady,
)
from streamrl.protocol.controller_trainer import TrainDone
from streamrl.protocol.message import TypedMessage, kind_of
from streamrl.report.panels import render
from streamrl.rollouts.trajectory import RowExtent, Trajectory
from streamrl.rollouts.types import Sample
from streamrl.run_dir.status import read_status
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Delivery, Hub, Link, Speaker
from streamrl.transport.wire import Arrays
from tests.ports import free_port
from tests.security.hostile_world import OWN, Sent, batch, fleet_of, hear, said, sample
from tests.waiting import scaled, until


def test_a_site_delivers_its_own_samples_once(controller: Controller) -> None:
    own = sample("far", 1)
    assert hear(controller, batch("service-far", own, own), batch("service-far", own)) == {}
    assert controller.pool.missing("p1-0") == 1 and controller.ledger.counts() == {"finished": 1, "issued": 3}
    assert hear(controller, batch("service-far", own)) == {}  # as a process that has restarted sends it again
    assert hear(controller, batch("service-far", sample("far", 1, 1)), batch("service-far", own)) == {}
    assert controller.pool.missing("p1-0") == 0


def test_a_site_cannot_deliver_the_samples_of_another(controller: Controller) -> None:
    refused = hear(controller, batch("service-far", sample("far", 0), sample("home", 0, 1)))
    assert refused == {"not its own": {"service-far": 2}}
    assert hear(controller, batch("service-home", sample("home", 0))) == refused
    assert controller.pool.missing("p0-0") == 1


def test_a_sample_that_is_not_to_come_is_not_read(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few hundred bytes of a compressed batch can be millions of values."""
    read: list[str] = []

    def recorded(body: dict[str, Any], arrays: Arrays) -> Sample:
        read.append(body["sample_id"])
        return read_sample(body, arrays)

    monkeypatch.setattr(arrivals, "read_sample", recorded)
    foreign, own = sample("far", 0), sample("far", 1)
    told = Trajectory(rows=[RowExtent(4, 1)], reward=1.0, messages=[], steps=[])
    episode = sample("far", 1, 1, trajectory=told, token_versions=np.array([-1, 0, 0, 0], np.int32))
    refused = hear(controller, batch("service-far", foreign, own, episode))
    assert refused == {"not its own": {"service-far": 1}, "unreadable": {"service-far": 1}}
    assert read == [own.sample_id] and controller.pool.missing("p1-0") == 1


def test_a_site_cannot_have_a_sample_of_another_overlooked(controller: Controller) -> None:
    forged, real = batch("service-far", sample("far", 0)), batch("service-home", sample("home", 0))
    assert hear(controller, forged, real) == {"not its own": {"service-far": 1}}
    assert controller.pool.received["p0-0.000"][0].site == "home"


@pytest.mark.parametrize(
    "changes",
    [
        {"site": "home"},
        {"instance": "home-regular-0"},
        {"pool": "other", "instance": "far-other-0"},
        {"finish_reason": "bored"},
        {"t_finished": float("nan")},
        {"group_id": "p0-0"},
        {"completion_tokens": OWN + 10**6},
        {"completion_tokens": OWN - 1},
        {"token_versions": OWN + 7},
        {"token_versions": OWN - 1},
        {"t_dispatched": 1e300},
        {"t_last_part": float("nan")},
        {"text": "x" * 1_000_000},
        {"route": "x" * 1_000_000},
        *({"logprobs": np.full(4, value, "f4")} for value in (np.nan, -np.inf, -1e30, 5.0)),
        {name: np.zeros(100_000, kind) for name, kind in (("completion_tokens", "i4"), ("token_versions", "i4"))}
        | {"logprobs": np.zeros(100_000, "f4")},
    ],
    ids=str,
)
def test_a_sample_that_makes_no_sense_is_refused_and_ends_nothing(
    controller: Controller, sent: Sent, changes: dict[str, Any]
) -> None:
    refused = hear(controller, batch("service-far", sample("far", 1, **changes)))
    assert [dict(peers) for peers in refused.values()] == [{"service-far": 1}]
    assert controller.pool.missing("p1-0") == 2 and controller.ledger.counts() == {"issued": 4}
    assert sent.ordered() == [("service-home", ["p1-0.000"])]  # of what the other one still owes, nothing
    late = hear(controller, batch("service-far", sample("far", 1), sample("far", 1, 1)))
    assert late == refused | {"not its own": {"service-far": 1}}
    assert hear(controller, batch("service-home", sample("home", 1))) == late
    assert controller.pool.missing("p1-0") == 0 and controller.ledger.counts() == {"issued": 2, "finished": 2}


def test_each_instance_of_a_sample_that_moved_or_was_parked_generated_while_it_had_it(controller: Controller) -> None:
    part = GivenBack(sample_id="p1-0.000", instance="far-regular-0", started=0.5, ended=1.5)
    came = batch("service-home", sample("home", 0)), batch("service-far", sample("far", 1, t_last_part=2.5))
    assert not hear(controller, said("service-far", part), *came)  # all at once
    expected = [("far-regular-0", 0.5, 1.5), ("home-regular-0", 1.0, 3.0), ("far-regular-0", 2.5, 3.0)]
    assert controller.times.generating == expected
    assert not hear(controller, said("service-far", part))  # as of a sample that another site goes on with by now
    assert controller.times.generating == expected


def test_a_clock_that_is_set_forward_by_hours_makes_no_later_step_one_of_work(controller: Controller) -> None:
    began = time.time() - 10
    ahead, name = began + 5 * 3600, "far-regular-0"
    controller.services._versions.in_flight |= {"service-home": 0, "service-far": 0}
    heard = (
        said("service-far", GivenBack(sample_id="p1-0.000", instance=name, started=began + 1, ended=ahead)),
        said("service-far", GivenBack(sample_id="p1-0.000", instance=name, started=ahead, ended=ahead + 1)),
        batch("service-home", sample("home", 0, t_dispatched=began + 2, t_finished=ahead)),
        batch("service-far", sample("far", 1, t_dispatched=ahead, t_finished=ahead + 1)),
        said("service-far", WeightsReady(**(LOADED | {"applied": {name: (began + 3, ahead)}}))),
    )
    assert not hear(controller, *heard)
    times, now = controller.times, time.time()
    found = {start - began: end for _, start, end in (*times.generating, *times.loading)}
    assert sorted(found) == pytest.approx([1, 2, 3], abs=1e-3)
    assert all(now - 60 < end <= now for end in found.values())
    times.end_step(now, now, None)
    assert (times.generating, times.loading) == ([], [])


def test_a_site_cannot_say_without_end_that_it_has_given_back_a_sample(controller: Controller) -> None:
    part = GivenBack(sample_id="p1-0.000", instance="far-regular-0", started=0.5, ended=1.5)
    assert not hear(controller, *[said("service-far", part)] * (MOST_PARTS + 5))
    assert len(controller.times.generating) == len(controller.pool.groups["p1-0"].given_back["p1-0.000"]) == MOST_PARTS


def test_bytes_that_are_no_samples_are_refused_and_others_arrive(controller: Controller) -> None:
    acknowledged = []
    nonsense = Delivery(
        *("service-far", "samples", SampleBatch(packing="zstd", samples=2, tokens=8, bodies=9)),
        *({"payload": np.frombuffer(b"no zstd", np.uint8)}, lambda: acknowledged.append(1)),
    )
    empty = Delivery("service-far", "samples", SampleBatch(packing="raw"), {}, lambda: acknowledged.append(2))
    refused = hear(controller, nonsense, empty, batch("service-home", sample("home", 0)))
    assert refused == {"unreadable": {"service-far": 2}} and acknowledged == [1, 2]
    assert controller.pool.missing("p0-0") == 1


def test_a_reward_is_given_only_by_the_process_that_was_asked(controller: Controller) -> None:
    hear(controller, batch("service-home", sample("home", 0)))
    forged = ScoreAnswer(sample_id="p0-0.000", reward=1.0, seconds=0.0)
    unasked = ScoreAnswer(sample_id="p1-0.000", reward=1.0, seconds=0.0)
    refused = hear(controller, said("rewards-far", forged), said("rewards-home", unasked))
    assert refused == {"not its own": {"rewards-far": 1, "rewards-home": 1}}
    assert not controller.pool.groups["p0-0"].scored
    real = ScoreAnswer(sample_id="p0-0.000", reward=0.25, seconds=0.0)
    assert hear(controller, said("rewards-home", real)) == refused
    assert controller.pool.groups["p0-0"].scored["p0-0.000"].reward == 0.25


LOADED = {"number": 0, "source": None, "transfer_s": 0.1, "bytes": 5, "started": 1.0, "fetched": 2.0, "applied": {}}
STATES = {"home-regular-0": InstanceState("regular", "ready", "")}
FAR = {"far-regular-0": InstanceState("regular", "ready", "")}
CANARY = np.zeros(3, np.float32)
POINTS = {str(batch): 0.01 for batch in range(1, 1002)}


@pytest.mark.parametrize(
    "message",
    [
        Parked(sample_id="p0-0.000", tokens=3, round=0),
        SiteAsleep(),
        GivenBack(sample_id="p1-0.000", instance="home-regular-0", started=1.0, ended=2.0),
        GivenBack(sample_id="p1-0.000", instance="far-regular-0", started=1.0, ended=float("nan")),
        GivenBack(sample_id="p1-0.000", instance="far-regular-0", started=1.0, ended=0.5),
        GivenBack(sample_id="p1-0.000", instance="far-regular-0", started=9e10, ended=9e10),
        WeightsReady(**(LOADED | {"number": 10**9})),
        WeightsReady(**(LOADED | {"number": -1})),
        WeightsReady(**(LOADED | {"source": "nowhere"})),
        WeightsReady(**(LOADED | {"bytes": -5})),
        WeightsReady(**(LOADED | {"transfer_s": 9e10})),
        WeightsReady(**(LOADED | {"applied": {"home-regular-0": (1.0, 2.0)}})),
        FleetChanged(fleet=[{"name": "far-regular-0"}], instances={}),
        FleetChanged(fleet=[{"curve": 5}], instances={}),
        FleetChanged(fleet=fleet_of("home"), instances={}),
        FleetChanged(fleet=fleet_of("far", "golden"), instances={}),
        FleetChanged(fleet=[], instances=STATES),
        FleetChanged(fleet=fleet_of("far") * 2, instances=FAR),
        FleetChanged(fleet=fleet_of("far"), instances={}),
        FleetChanged(fleet=fleet_of("far") * 100_000, instances=FAR),
        FleetChanged(fleet=[fleet_of("far")[0] | {"name": "far-regular-1"}], instances={}),
        FleetChanged(fleet=[fleet_of("far")[0] | {"curve": {"step_seconds": {"1": 1e300}}}], instances=FAR),
        FleetChanged(fleet=[fleet_of("far")[0] | {"curve": {"step_seconds": POINTS}}], instances=FAR),
        FleetChanged(fleet=[], instances={"far-regular-0": InstanceState("regular", "x" * 1_000_000, "")}),
        CanaryMeasured(number=0, instance="home-regular-0", dtype="float32"),
        CanaryMeasured(number=9, instance="far-regular-0", dtype="float32"),
        CanaryMeasured(number=0, instance="far-regular-0", dtype="x" * 1_000_000),
        TrainDone(rank=0, started=0.0, finished=0.0, stats={}),
    ],
    ids=kind_of,
)
def test_a_site_speaks_for_itself_alone(controller: Controller, message: TypedMessage) -> None:
    controller.services._versions.in_flight["service-far"] = 0
    before = controller.services.version, controller.services.instances()
    assert hear(controller, said("service-far", message, logprobs=CANARY)) == {"not its own": {"service-far": 1}}
    assert (controller.services.version, controller.services.instances()) == before


def test_the_clock_of_a_site_may_be_hours_ahead(controller: Controller) -> None:
    controller.services._versions.in_flight["service-far"] = 0
    ahead = time.time() + 3600.0
    spans = {"started": ahead, "fetched": ahead, "applied": {"far-regular-0": (ahead, ahead + 1.0)}}
    assert hear(controller, said("service-far", WeightsReady(**(LOADED | spans)))) == {}
    assert not controller.services.awaits_weights("service-far")


@pytest.mark.parametrize(
    ("changes", "seconds", "loading"),
    [
        ({"fetched": float("inf")}, None, (1.0, 2.0)),
        ({"fetched": 0.5}, None, (1.0, 2.0)),
        ({"fetched": 1.7e9}, None, (1.0, 2.0)),
        ({"started": float("nan")}, None, (1.0, 2.0)),
        ({"started": 9e10, "fetched": 9e10 + 3}, 3.0, (1.0, 2.0)),
        ({"applied": {"far-regular-0": (2.0, 1.0)}}, 1.0, None),
        ({"applied": {"far-regular-0": (9e10, 9e10)}}, 1.0, None),
        ({"applied": {"far-regular-0": (1.0, 1e6 + 2)}}, 1.0, None),
        ({"applied": {"far-regular-0": (float("nan"), 1.0)}}, 1.0, None),
    ],
    ids=str,
)
def test_weights_that_are_loaded_count_whatever_the_clock_of_a_site_says(
    controller: Controller, changes: dict[str, Any], seconds: float | None, loading: tuple[float, float] | None
) -> None:
    controller.services._versions.in_flight |= {"service-home": 0, "service-far": 0}  # the step is not over with one
    ready = WeightsReady(**(LOADED | {"applied": {"far-regular-0": (1.0, 2.0)}} | changes))
    assert hear(controller, said("service-far", ready)) == {}
    assert not controller.services.awaits_weights("service-far")
    assert controller.times.loading == ([("far-regular-0", *loading)] if loading else [])
    assert controller.services._traffic.seconds == seconds


def test_a_site_cannot_answer_weights_with_older_ones(controller: Controller) -> None:
    controller.training.step = 3
    controller.services._versions.in_flight["service-far"] = 2
    older = WeightsReady(**(LOADED | {"number": 1}))
    assert hear(controller, said("service-far", older)) == {"not its own": {"service-far": 1}}
    assert controller.services.awaits_weights("service-far")
    newer = WeightsReady(**(LOADED | {"number": 3}))
    assert hear(controller, said("service-far", newer)) == {"not its own": {"service-far": 1}}
    assert not controller.services.awaits_weights("service-far")


@pytest.mark.parametrize("fleet", [fleet_of("home"), fleet_of("far", step_s=1e300), None, {}, [5]], ids=str)
def test_instances_in_the_hello_of_a_service_that_was_restarted_are_its_sites_or_not_used(
    controller: Controller, fleet: object
) -> None:
    controller.services._fleets.clear()
    controller.services._dispatch._sites.clear()
    asyncio.run(controller._join_services())
    before = controller.services.instances()
    controller.hub.peers["service-far"].meta = {"fleet": fleet}
    asyncio.run(controller.services.returned("service-far"))
    assert controller.services.instances() == before


def test_a_canary_without_its_array_is_refused(controller: Controller) -> None:
    canary = CanaryMeasured(number=0, instance="far-regular-0", dtype="float32")
    long = np.zeros(1_000_000, np.float32)
    for arrays in ({}, {"logprobs": CANARY.astype(np.int32)}, {"logprobs": CANARY[None]}, {"logprobs": long}):
        hear(controller, said("service-far", canary, **arrays))
    assert controller.hub.refused() == {"not its own": {"service-far": 4}}
    hear(controller, said("service-far", canary, logprobs=CANARY))
    assert controller.hub.refused() == {"not its own": {"service-far": 4}}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "fp8"])
def test_a_canary_in_any_type_that_instances_compute_in_is_heard(controller: Controller, dtype: str) -> None:
    canary = CanaryMeasured(number=0, instance="far-regular-0", dtype=dtype)
    assert hear(controller, said("service-far", canary, logprobs=CANARY)) == {}
    unknown = CanaryMeasured(number=0, instance="far-regular-0", dtype="int4")
    assert hear(controller, said("service-far", unknown, logprobs=CANARY)) == {"not its own": {"service-far": 1}}


def test_an_answer_to_no_command_of_the_trainer_is_refused(controller: Controller) -> None:
    done = TrainDone(rank=0, started=0.0, finished=0.0, stats={})
    assert hear(controller, said("trainer-0", done)) == {"not its own": {"trainer-0": 1}}


def test_what_was_refused_is_in_status_and_report(controller: Controller) -> None:
    hear(controller, batch("service-far", sample("far", 0)))
    controller.telemetry.write()
    status = read_status(controller.context.run_dir)
    assert status.refused == {"not its own": {"service-far": 1}}
    shown = Console(width=150, record=True, file=io.StringIO())
    shown.print(render(status, [], time.time(), [], []))
    assert "not its own: service-far 1" in shown.export_text()


def test_what_other_hubs_refused_is_shown_with_the_process_that_refused_it(controller: Controller) -> None:
    states = {
        "trainer-0": {"refused": {"not allowed": {"service-far": 7}}},
        "trainer-1": {"refused": {"not allowed": {"hub": 1}}},
        "service-far": {"instances": {"far-regular-0": {"refused": {"malformed": {"hub\u001b[2J": 3}}}}},
        "rewards-home": {"refused": {"malformed": {"hub": 2}}},
    }
    for name, state in states.items():
        state = read_heartbeat(controller.own, Speaker(name, "trainer"), state)
        controller.hub.peers[name] = SimpleNamespace(  # type: ignore[assignment]
            name=name, role=name.split("-")[0], session="s", state=state, last_seen=0.0, meta={}, empty_connections=0
        )
    hear(controller, batch("service-far", sample("far", 0)))
    shown = {
        "not its own": {"service-far": 1},
        "not allowed": {"service-far at trainer-0": 7, "hub at trainer-1": 1},
        "malformed": {"hub?[2J at far-regular-0": 3, "hub at rewards-home": 2},
    }
    controller.telemetry.write()
    assert read_status(controller.context.run_dir).refused == shown
    controller.hub.peers.pop("trainer-0")
    controller.telemetry.write()
    assert read_status(controller.context.run_dir).refused == shown


def test_a_process_reports_what_its_hubs_and_its_link_refused() -> None:
    async def body() -> None:
        controller = Hub("controller", WaitRegistry("controller")).bind(address := f"tcp://127.0.0.1:{free_port()}")
        publisher = Hub("publisher", WaitRegistry("publisher"))
        publisher.refusals.count("not allowed", "service-far", "scale")
        link = Link("trainer-0", "trainer", WaitRegistry("trainer"))
        link.reports.append(publisher)
        link.refusals.count("not allowed", "hub", "scale")
        await link.connect(address, scaled(10))
        try:
            expected = {"not allowed": {"service-far": 1, "hub": 1}}
            await until(lambda: controller.peers["trainer-0"].state.get("refused") == expected)
        finally:
            await link.close()
            await controller.close()

    asyncio.run(body())
