"""A site with a valid key says what is not its own, or makes no sense: nothing comes of it, and the run goes on."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from scheduler.cost.decode import StepCurve
from scheduler.simulation.generation_simulator import SimulatedInstance
from scheduler.sites.site_dispatch import SiteGroup
from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.controller.controller import Controller
from streamrl.controller.group_source import samples_of
from streamrl.generation.site.sample_batches import pack_samples
from streamrl.protocol.controller_rewards import ScoreAnswer, ScoreRequest
from streamrl.protocol.controller_site import (
    CanaryMeasured,
    FleetChanged,
    InstanceState,
    Parked,
    SampleBatch,
    SiteAsleep,
    WeightsReady,
)
from streamrl.protocol.controller_trainer import TrainDone
from streamrl.protocol.message import TypedMessage, kind_of
from streamrl.protocol.samples import fleet_to_wire, sample_to_wire
from streamrl.report.panels import render
from streamrl.rollouts.types import Group, Sample
from streamrl.run_dir.status import read_status
from streamrl.runtime.process_context import Addresses, RoleContext
from streamrl.transport.endpoint import Delivery
from tests.tiny_model import save_tiny_model

CLUSTER = ClusterConfig.model_validate(
    {
        "hardware": "cpu",
        "sites": {"home": {"port": 5600, "trainer": {}, "generation": [{}]}, "far": {"generation": [{}]}},
        "links": [{"between": ["home", "far"], "bandwidth_gbit_s": 1, "rtt_ms": 30}],
    }
)
REQUEST = ScoreRequest(sample_id="", task="t", completion="", reward_input={})
OWN = np.arange(4, dtype=np.int32)
SITES = {"service-home": "home", "service-far": "far"}


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    """A controller of two sites, each of which has been given one group of two samples."""
    model = save_tiny_model(tmp_path / "model")
    run = RunConfig.model_validate({"model": {"path": str(model)}, "batch": {"samples_per_prompt": 2}})
    made: list[Controller] = []

    async def begin() -> None:
        context = RoleContext("controller", "home", tmp_path, CLUSTER, run, Addresses("", "", {}), False)
        one = Controller(context)
        made.append(one)
        one.evaluator = SimpleNamespace(  # type: ignore[assignment]  # no evaluation is in flight
            awaits=lambda _: False, generates=lambda _: False, unfinished=0
        )
        for name, site in SITES.items():
            one.hub.peers[name] = SimpleNamespace(  # type: ignore[assignment]
                name=name, session="s", meta={"fleet": fleet_of(site)}, state={}, last_seen=0.0, flow=None
            )
        one.services.joined()
        groups = [Group(f"p{n}-0", 1, n, f"p{n}", "t", 0, "", OWN, 2) for n in range(2)]
        one.pool.issue(groups, 0)
        one.ledger.issue((s, g.group_id) for g in groups for s, *_ in samples_of(g, 0))
        for group, site in zip(groups, SITES.values(), strict=True):
            for other in SITES.values():
                (one.services._dispatch.unhold if other == site else one.services._dispatch.hold)(other)
            one.services._dispatch.submit([SiteGroup(group.group_id, 2, None, 4)])
            assert dict(one.services._dispatch.decide()) == {group.group_id: site}
        one.rewarders.ask = _asked(one)  # type: ignore[method-assign]

    asyncio.run(begin())
    yield made[0]
    made[0].ledger.close()


def _asked(controller: Controller) -> Callable[..., Awaitable[None]]:
    async def ask(group: Group, sample_id: str, text: str) -> None:
        controller.rewarders._open["rewards-home"][sample_id] = REQUEST

    return ask


def fleet_of(site: str, pool: str = "regular") -> list[dict[str, Any]]:
    return fleet_to_wire([SimulatedInstance(f"{site}-{pool}-0", StepCurve((1, 8), (0.01, 0.02), 0.0, 0.0), 8, pool)])


def sample(at: str, group: int, number: int = 0, **changes: Any) -> Sample:
    values: dict[str, Any] = {
        **{"sample_id": f"p{group}-0.{number:03d}", "group_id": f"p{group}-0", "completion_tokens": OWN},
        **{"logprobs": OWN.astype(np.float32) * -0.1, "token_versions": OWN * 0, "finish_reason": "stop"},
        **{"site": at, "instance": f"{at}-regular-0", "pool": "regular", "route": "regular", "text": "4"},
        **{"t_queued": 0.0, "t_dispatched": 1.0, "t_first_token": 2.0, "t_finished": 3.0},
    }
    return Sample(**(values | changes))


def batch(peer: str, *samples: Sample) -> Delivery:
    body, arrays = pack_samples([sample_to_wire(one) for one in samples])
    return Delivery(peer, "samples", SampleBatch(**body), arrays, lambda: None)


def said(peer: str, message: TypedMessage, **arrays: np.ndarray) -> Delivery:
    return Delivery(peer, kind_of(message), message, arrays, lambda: None)


def hear(controller: Controller, *deliveries: Delivery) -> dict[str, dict[str, int]]:
    """Let the controller handle deliveries as its loop does; return what it has refused."""

    async def handle() -> None:
        await controller._samples([one for one in deliveries if isinstance(one.body, SampleBatch)])
        controller._rewards([one for one in deliveries if isinstance(one.body, ScoreAnswer)])
        for one in deliveries:
            if not isinstance(one.body, SampleBatch | ScoreAnswer):
                await controller._handle(one)

    asyncio.run(handle())
    return controller.hub.refused()


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
        {name: np.zeros(100_000, kind) for name, kind in (("completion_tokens", "i4"), ("token_versions", "i4"))}
        | {"logprobs": np.zeros(100_000, "f4")},
    ],
    ids=str,
)
def test_a_sample_that_makes_no_sense_is_refused_and_ends_nothing(
    controller: Controller, changes: dict[str, Any]
) -> None:
    refused = hear(controller, batch("service-far", sample("far", 1, **changes)))
    assert [dict(peers) for peers in refused.values()] == [{"service-far": 1}]
    assert controller.pool.missing("p1-0") == 2 and controller.ledger.counts() == {"issued": 4}
    assert hear(controller, batch("service-far", sample("far", 1))) == refused


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
CANARY = np.zeros(3, np.float32)


@pytest.mark.parametrize(
    "message",
    [
        Parked(sample_id="p0-0.000", tokens=3, round=0),
        SiteAsleep(),
        WeightsReady(**(LOADED | {"number": 10**9})),
        WeightsReady(**(LOADED | {"number": -1})),
        WeightsReady(**(LOADED | {"source": "nowhere"})),
        WeightsReady(**(LOADED | {"bytes": -5})),
        WeightsReady(**(LOADED | {"fetched": float("inf")})),
        WeightsReady(**(LOADED | {"applied": {"home-regular-0": (1.0, 2.0)}})),
        FleetChanged(fleet=[{"name": "far-regular-0"}], instances={}),
        FleetChanged(fleet=[{"curve": 5}], instances={}),
        FleetChanged(fleet=fleet_of("home"), instances={}),
        FleetChanged(fleet=fleet_of("far", "golden"), instances={}),
        FleetChanged(fleet=[], instances=STATES),
        CanaryMeasured(number=0, instance="home-regular-0", dtype="float32"),
        CanaryMeasured(number=9, instance="far-regular-0", dtype="float32"),
        TrainDone(rank=0, started=0.0, finished=0.0, stats={}),
    ],
    ids=kind_of,
)
def test_a_site_speaks_for_itself_alone(controller: Controller, message: TypedMessage) -> None:
    before = controller.services.version, controller.services.instances()
    assert hear(controller, said("service-far", message, logprobs=CANARY)) == {"not its own": {"service-far": 1}}
    assert (controller.services.version, controller.services.instances()) == before


def test_a_canary_without_its_array_is_refused(controller: Controller) -> None:
    canary = CanaryMeasured(number=0, instance="far-regular-0", dtype="float32")
    for arrays in ({}, {"logprobs": CANARY.astype(np.int32)}, {"logprobs": CANARY[None]}):
        hear(controller, said("service-far", canary, **arrays))
    assert controller.hub.refused() == {"not its own": {"service-far": 3}}
    hear(controller, said("service-far", canary, logprobs=CANARY))
    assert controller.hub.refused() == {"not its own": {"service-far": 3}}


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
