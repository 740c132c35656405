"""Instances are added and taken away as people and the rule ask, within limits, and paid for while they are there."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.cost.decode import StepCurve
from scheduler.simulation.generation_simulator import SimulatedInstance
from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.controller.pool_sizes import Scaling
from streamrl.controller.spending import Spending
from streamrl.controller.step_times import StepTimes
from streamrl.protocol.controller_site import FleetChanged, InstanceState
from streamrl.protocol.operator import ScalePool
from streamrl.run_dir import layout
from streamrl.runtime.process_plan import plan_processes
from streamrl.transport.endpoint import Delivery

POOLS = [
    {"name": "regular", "replicas": 2, "min_replicas": 1, "max_replicas": 4, "price_per_hour": 3.0},
    {"name": "tail", "price_per_hour": 1.0},
]
CURVE = StepCurve((1, 8), (0.01, 0.02), 0.0, 0.0)


def cluster(**home: Any) -> ClusterConfig:
    site = {"trainer": {"price_per_hour": 10.0}, "generation": POOLS, "port": 5600} | home
    return ClusterConfig.model_validate({"hardware": "cpu", "sites": {"home": site}})


class Sites:
    """What scaling needs of the services."""

    train_tokens_s: float | None = None

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, int]] = []
        self.fleets: dict[str, list[str]] = {}

    def site_of(self, name: str) -> str:
        return name.removeprefix("service-")

    async def scale(self, site: str, pool: str, replicas: int) -> None:
        self.asked.append((site, pool, replicas))

    def fleet_changed(self, name: str, fleet: list[str]) -> None:
        self.fleets[name] = fleet

    def fleet(self) -> list[SimulatedInstance]:
        return [SimulatedInstance(name, CURVE, 8, name.split("-")[1]) for some in self.fleets.values() for name in some]


class Answers:
    """What scaling needs of a hub."""

    def __init__(self) -> None:
        self.peers = {"operator-1": object()}
        self.sent: list[dict[str, Any]] = []

    async def send(self, peer: str, kind: str, body: dict[str, Any]) -> None:
        assert peer == "operator-1" and ("error" in body) == (kind == "refused_scaling")
        self.sent.append(body)


def make(folder: Path, run: dict[str, Any] | None = None, **home: Any) -> tuple[Scaling, Sites, StepTimes]:
    sites, times, config = Sites(), StepTimes(), RunConfig.model_validate(run or {})
    files = cluster(**home)
    plan = plan_processes(files, config, folder)
    return Scaling(files, config, folder, plan, sites, times), sites, times  # type: ignore[arg-type]


def ask(scaling: Scaling, pool: str, replicas: int, site: str = "") -> dict[str, Any]:
    answers = Answers()
    order = ScalePool(pool=pool, site=site, replicas=replicas)
    asyncio.run(scaling.handle_request(Delivery("operator-1", "scale", order, {}, lambda: None), answers))  # type: ignore[arg-type]
    return answers.sent[0]


def told(scaling: Scaling, **lives: str) -> None:
    """The service says where its instances are in their lives."""
    instances = {name.replace("_", "-"): InstanceState(name.split("_")[1], life, "") for name, life in lives.items()}
    ready = [name for name, one in instances.items() if one.life == "ready"]
    scaling.fleet_changed("service-home", FleetChanged(instances=instances, fleet=ready))  # type: ignore[arg-type]


START = {"home_regular_0": "ready", "home_regular_1": "ready", "home_tail_0": "ready"}


@pytest.mark.parametrize(
    ("pool", "replicas", "site", "says"),
    [
        ("regular", 0, "", "must keep 1 or more, not 0"),
        ("regular", 5, "", "4 instances at most, not 5"),
        ("tail", 2, "", "1 instances at most, not 2"),
        ("regualr", 2, "", "did you mean regular?"),
        ("regular", 2, "away", "no pool 'regular' at a site 'away'"),
    ],
)
def test_impossible_scalings_are_refused_and_change_nothing(
    tmp_path: Path, pool: str, replicas: int, site: str, says: str
) -> None:
    scaling, sites, _ = make(tmp_path)
    assert says in ask(scaling, pool, replicas, site)["error"]
    assert not sites.asked and not (tmp_path / layout.REPLICAS).exists()


def test_where_the_devices_are_divided_otherwise_nothing_is_scaled(tmp_path: Path) -> None:
    scaling, sites, _ = make(tmp_path, {"schedule": {"name": "auto"}})
    assert "schedule: auto has divided the devices" in ask(scaling, "regular", 3)["error"]
    assert not sites.asked
    scaling, sites, _ = make(tmp_path, {"weights": {"backend": "gloo"}})  # its group is formed anew
    assert "error" not in ask(scaling, "regular", 3) and sites.asked


def test_an_instance_costs_from_its_start_to_its_end_and_works_while_it_is_ready(tmp_path: Path) -> None:
    scaling, sites, times = make(tmp_path)
    told(scaling, **START)
    assert scaling.spending.usd_per_hour == 10 + 2 * 3 + 1
    answer = ask(scaling, "regular", 3)
    assert answer == {"pool": "home/regular", "before": 2, "after": 3}
    assert sites.asked == [("home", "regular", 3)]
    told(scaling, **START, home_regular_2="starting")
    assert scaling.spending.usd_per_hour == 10 + 3 * 3 + 1
    (costs,) = scaling.spending.between(time.time() + 60, time.time() + 60 + 3600).values()
    regular = {f"home-regular-{n}": pytest.approx(3.0, rel=1e-3) for n in range(3)}
    assert costs == {"trainer": pytest.approx(10.0, rel=1e-3), **regular, "home-tail-0": pytest.approx(1.0, rel=1e-3)}
    assert "home-regular-2" not in times.instances and scaling.status()["ready"]["home/regular"] == 2
    [coming] = scaling.coming
    assert coming.ready_at is None
    told(scaling, **START, home_regular_2="ready")
    assert coming.ready_at is not None and "home-regular-2" in times.instances
    sample: Any = SimpleNamespace(instance="home-regular-2")
    scaling.sample_came(sample, 17.0)
    scaling.sample_came(sample, 18.0)
    assert coming.first_sample_at == 17.0
    told(scaling, **START, home_regular_2="draining")
    assert "home-regular-2" in times.gone and scaling.roles()["home-regular-2"] == "instance"
    told(scaling, **START)
    assert scaling.spending.usd_per_hour == 10 + 2 * 3 + 1
    assert "home-regular-2" not in scaling.roles()


def test_a_resumed_run_has_what_was_asked_for_last_and_another_run_what_its_file_says(tmp_path: Path) -> None:
    scaling, _, _ = make(tmp_path)
    ask(scaling, "regular", 4)
    resumed, sites, _ = make(tmp_path)
    asyncio.run(resumed.begin(resume=True))
    assert sites.asked == [("home", "regular", 4)]
    asyncio.run(resumed.returned("service-home"))  # a service that was started anew hears it, too
    assert sites.asked[1:] == [("home", "regular", 4), ("home", "tail", 1)]
    fresh, sites, _ = make(tmp_path)
    asyncio.run(fresh.begin(resume=False))
    assert not sites.asked and not (tmp_path / layout.REPLICAS).exists()
    (tmp_path / layout.REPLICAS).write_text(json.dumps({"home/regular": 99, "gone/regular": 2}))
    other, sites, _ = make(tmp_path)
    asyncio.run(other.begin(resume=True))
    assert not sites.asked  # the cluster file has changed since


def test_the_rule_adds_an_instance_once_generation_takes_too_long(tmp_path: Path) -> None:
    scaling, sites, _ = make(tmp_path, {"elasticity": {"enabled": True, "patience": 2, "settle": 0}})
    told(scaling, **START)
    sites.fleets["service-home"].append("home-regular-2")  # as a restarted service's hello has it, before its report
    lengths = [[100] * 8 for _ in range(16)]

    def batch() -> Any:
        groups = {
            f"g{n}": SimpleNamespace(
                prompt_tokens=[1] * 5,
                members=lambda some=some: [SimpleNamespace(sample=SimpleNamespace(output_length=s)) for s in some],
            )
            for n, some in enumerate(lengths)
        }
        return SimpleNamespace(groups=groups)

    async def steps(count: int, generation: float, training: float) -> None:
        for _ in range(count):
            times: Any = SimpleNamespace(generate_s=generation, train_s=training)
            await scaling.step_done(batch(), times)
            if scaling._choosing is not None:
                await scaling._choosing

    asyncio.run(steps(3, 20.0, 18.0))
    assert not sites.asked and "no change" in scaling.status()["note"]

    async def out_of_balance() -> None:
        await steps(2, 40.0, 10.0)
        await steps(1, 40.0, 10.0)  # what was chosen after the step before

    asyncio.run(out_of_balance())
    assert sites.asked == [("home", "regular", 3)]
    assert "one more instance of home/regular" in scaling.status()["note"]


def test_what_is_spent_follows_the_price_over_time() -> None:
    one, two = {("home", "trainer"): 36.0}, {("home", "trainer"): 36.0, ("far", "far-tail-0"): 36.0}
    spending = Spending(one)
    spending.change(100.0, two)
    spending.change(150.0, dict(two))
    assert spending.usd_per_hour == 72.0
    spending.change(200.0, {("home", "trainer"): 0.0})
    assert spending.between(0.0, 100.0) == {"home": {"trainer": pytest.approx(1.0)}}
    both = {"home": {"trainer": pytest.approx(1.1)}, "far": {"far-tail-0": pytest.approx(1.0)}}
    assert spending.between(90.0, 250.0) == both
    assert spending.between(300.0, 400.0) == {}
    assert spending.usd_per_hour == 0.0
