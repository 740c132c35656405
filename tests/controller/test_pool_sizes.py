"""Instances are added and taken away as people and the rule ask, within limits, and paid for while they are there."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.capacity.elasticity import REST_AFTER_FAILURE
from scheduler.cost.decode import StepCurve
from scheduler.simulation.generation_simulator import SimulatedInstance
from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.controller import pool_sizes
from streamrl.controller.pool_sizes import Scaling
from streamrl.controller.spending import LINK, Spending, few_names
from streamrl.controller.step_recorder import Recorder
from streamrl.controller.step_times import StepTimes
from streamrl.protocol.controller_site import FleetChanged, InstanceState
from streamrl.protocol.operator import ScalePool
from streamrl.run_dir import layout
from streamrl.runtime.process_plan import plan_processes
from streamrl.transport.endpoint import Delivery
from tests.run_dir.conftest import FILE_LIMIT, Disk, file_size_limit
from tests.run_dir.conftest import disk as disk

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
        self.replacing: list[bool] = []
        """Whether each of these scalings replaces what is dead for good."""
        self.fleets: dict[str, list[str]] = {}
        self.excluded: dict[str, str] = {}

    def site_of(self, name: str) -> str:
        return name.removeprefix("service-")

    async def scale(self, site: str, pool: str, replicas: int, replace_dead: bool = False) -> None:
        self.asked.append((site, pool, replicas))
        self.replacing.append(replace_dead)

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


def make(
    folder: Path, run: dict[str, Any] | None = None, resume: bool = False, **home: Any
) -> tuple[Scaling, Sites, StepTimes]:
    sites, times, config = Sites(), StepTimes(), RunConfig.model_validate(run or {})
    files = cluster(**home)
    plan = plan_processes(files, config, folder)
    return Scaling(files, config, folder, plan, sites, times, resume), sites, times  # type: ignore[arg-type]


def ask(scaling: Scaling, pool: str, replicas: int, site: str = "") -> dict[str, Any]:
    answers = Answers()
    order = ScalePool(pool=pool, site=site, replicas=replicas)
    asyncio.run(scaling.handle_request(Delivery("operator-1", "scale", order, {}, lambda: None), answers))  # type: ignore[arg-type]
    return answers.sent[0]


def told(scaling: Scaling, **lives: str) -> None:
    """The service says where its instances are in their lives; 'gone' are those that are dead for good."""
    instances = {
        name.replace("_", "-"): InstanceState(name.split("_")[1], life.replace("gone", "dead"), "", life == "gone")
        for name, life in lives.items()
    }
    ready = [name for name, one in instances.items() if one.life == "ready"]
    scaling.fleet_changed("service-home", FleetChanged(instances=instances, fleet=ready))  # type: ignore[arg-type]


async def steps(scaling: Scaling, count: int, generation: float, training: float) -> None:
    """So many steps of 16 groups of 8 samples, in which generation and training take these times."""
    sample = SimpleNamespace(sample=SimpleNamespace(output_length=100))
    group = SimpleNamespace(prompt_tokens=[1] * 5, members=lambda: [sample] * 8)
    batch: Any = SimpleNamespace(groups={f"g{n}": group for n in range(16)})
    times: Any = SimpleNamespace(generate_s=generation, train_s=training)
    for _ in range(count):
        await scaling.step_done(batch, times)
        if scaling._choosing is not None:
            await scaling._choosing


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


def test_a_scaling_whose_command_has_given_up_changes_nothing(tmp_path: Path) -> None:
    (scaling, sites, _), answers = make(tmp_path), Answers()
    answers.peers.clear()
    order = ScalePool(pool="regular", site="", replicas=3)
    asyncio.run(scaling.handle_request(Delivery("operator-1", "scale", order, {}, lambda: None), answers))  # type: ignore[arg-type]
    assert not sites.asked and not answers.sent and not (tmp_path / layout.REPLICAS).exists()


def test_a_scaling_that_the_disk_has_no_room_for_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    scaling, sites, _ = make(tmp_path)
    told(scaling, **START)
    before, file = dict(scaling.status()["wanted"]), tmp_path / layout.REPLICAS
    with file_size_limit(8):
        answer = ask(scaling, "regular", 1)
    assert answer == {"error": f"cannot write {file}: [Errno 27] File too large; {FILE_LIMIT} (see docs: E1007)"}
    assert scaling.status()["wanted"] == before and sites.asked == [] and not file.exists()
    assert ask(scaling, "regular", 1)["after"] == 1


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
    resumed, sites, _ = make(tmp_path, resume=True)
    wanted = resumed.status()["wanted"]
    assert wanted == {"home/regular": 4, "home/tail": 1} and not sites.asked, "the status has it while the run starts"
    asyncio.run(resumed.begin())
    assert sites.asked == [("home", "regular", 4)]
    asyncio.run(resumed.returned("service-home"))  # a service that was started anew hears it, too
    assert sites.asked[1:] == [("home", "regular", 4), ("home", "tail", 1)]
    fresh, sites, _ = make(tmp_path)
    assert fresh.status()["wanted"]["home/regular"] == 2
    asyncio.run(fresh.begin())
    assert not sites.asked and not (tmp_path / layout.REPLICAS).exists()
    recorded = {"home/regular": {"wanted": 99, "replicas": 2}, "gone/regular": {"wanted": 2, "replicas": 2}}
    (tmp_path / layout.REPLICAS).write_text(json.dumps(recorded))
    other, sites, _ = make(tmp_path, resume=True)
    asyncio.run(other.begin())
    assert not sites.asked  # the cluster file has changed since


def with_replicas(regular: int, tail: int = 1, most: int = 4) -> list[dict[str, Any]]:
    return [POOLS[0] | {"replicas": regular, "max_replicas": most}, POOLS[1] | {"replicas": tail}]


@pytest.mark.parametrize(
    ("regular", "tail", "most", "asked", "says"),
    [
        (2, 1, 4, [("home", "regular", 3)], "pool home/regular gets the 3 instances that it was scaled to"),
        (2, 2, 4, [("home", "regular", 3)], "pool home/regular gets the 3 instances that it was scaled to"),
        (1, 1, 4, [], "its replicas in the cluster file were 2 then, and are 1"),
        (2, 1, 2, [], "the cluster file gives it 1 to 2 instances"),
    ],
)
def test_a_resume_follows_the_cluster_file_where_its_replicas_have_changed_or_nobody_has_scaled(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    regular: int,
    tail: int,
    most: int,
    asked: list[tuple[str, str, int]],
    says: str,
) -> None:
    caplog.set_level("INFO")
    ask(make(tmp_path)[0], "regular", 3)
    resumed, sites, _ = make(tmp_path, resume=True, generation=with_replicas(regular, tail, most))
    asyncio.run(resumed.begin())
    assert sites.asked == asked and resumed.status()["wanted"]["home/tail"] == tail
    assert [says in message for message in caplog.messages] == [True]
    again, sites, _ = make(tmp_path, resume=True)  # what was left out stays so
    asyncio.run(again.begin())
    assert sites.asked == asked


def test_numbers_of_an_earlier_version_which_nobody_may_have_scaled_are_left_out_and_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    (tmp_path / layout.REPLICAS).write_text(json.dumps({"home/regular": 3, "home/tail": 1}))
    for _ in range(2):
        resumed, sites, _ = make(tmp_path, resume=True)
        asyncio.run(resumed.begin())
        assert not sites.asked
    [line] = caplog.messages
    assert "an earlier version has recorded home/regular: 3, home/tail: 1, scaled or not" in line


def test_the_rule_adds_an_instance_once_generation_takes_too_long(tmp_path: Path) -> None:
    scaling, sites, _ = make(tmp_path, {"elasticity": {"enabled": True, "patience": 2, "settle": 0}})
    told(scaling, **START)
    sites.fleets["service-home"].append("home-regular-2")  # as a restarted service's hello has it, before its report
    asyncio.run(steps(scaling, 3, 20.0, 18.0))
    assert not sites.asked and "no change" in scaling.status()["note"]
    asyncio.run(steps(scaling, 3, 40.0, 10.0))  # the last one does what was chosen after the step before
    assert sites.asked == [("home", "regular", 3)]
    assert "one more instance of home/regular" in scaling.status()["note"]


ELASTIC = {"elasticity": {"enabled": True, "patience": 1, "settle": 0}, "deadlines": {"startup_s": 100}}


def test_an_added_instance_that_is_dead_for_good_is_given_up_and_the_rule_goes_on(tmp_path: Path) -> None:
    scaling, sites, _ = make(tmp_path, ELASTIC)
    told(scaling, **START)
    asyncio.run(steps(scaling, 2, 40.0, 10.0))
    assert sites.asked == [("home", "regular", 3)]
    told(scaling, **START, home_regular_2="dead")  # it is restarted
    asyncio.run(steps(scaling, 2, 40.0, 10.0))
    assert len(sites.asked) == 1 and scaling.elasticity is not None and scaling.elasticity.waiting is not None
    told(scaling, **START, home_regular_2="gone")
    asyncio.run(steps(scaling, 1, 40.0, 10.0))
    assert sites.asked[1:] == [("home", "regular", 2)] and scaling.elasticity.waiting is None
    asyncio.run(steps(scaling, REST_AFTER_FAILURE + 4, 10.0, 40.0))
    assert sites.asked[2:] == [("home", "regular", 1)]


def with_one_dead_for_good(folder: Path, name: str) -> tuple[Scaling, Sites]:
    """Five steps after an instance has died for good."""
    scaling, sites, _ = make(folder, ELASTIC)
    told(scaling, **START)
    asyncio.run(steps(scaling, 1, 20.0, 18.0))
    told(scaling, **(START | {name: "gone"}))
    asyncio.run(steps(scaling, 5, 40.0, 10.0))
    return scaling, sites


def test_the_status_names_what_is_dead_for_good(tmp_path: Path) -> None:
    scaling, _, _ = make(tmp_path)
    told(scaling, **START)
    assert not any(scaling.status()["dead"].values())
    told(scaling, **(START | {"home_regular_0": "gone", "home_regular_1": "dead"}))
    assert scaling.status()["dead"]["home/regular"] == ["home-regular-0"]


def test_only_the_operator_has_dead_instances_replaced(tmp_path: Path) -> None:
    scaling, sites = with_one_dead_for_good(tmp_path, "home_regular_1")
    assert len(sites.replacing) >= 2 and not any(sites.replacing)
    asyncio.run(scaling.returned("service-home"))
    assert not any(sites.replacing)
    ask(scaling, "regular", 2)
    assert sites.replacing[-1]


def test_an_instance_of_the_start_that_is_dead_for_good_does_not_end_elasticity(tmp_path: Path) -> None:
    _, sites = with_one_dead_for_good(tmp_path, "home_regular_0")
    assert sites.asked[:2] == [("home", "regular", 1), ("home", "regular", 2)]


def test_more_deaths_than_instances_are_wanted_leave_no_target_below_zero(tmp_path: Path) -> None:
    scaling, sites, _ = make(tmp_path, ELASTIC)
    told(scaling, **START)
    asyncio.run(steps(scaling, 1, 20.0, 18.0))
    ask(scaling, "regular", 1)
    told(scaling, **(START | {"home_regular_0": "gone", "home_regular_1": "gone"}))
    asyncio.run(steps(scaling, 2, 20.0, 18.0))
    assert [replicas for _, _, replicas in sites.asked] == [1, 0]


def test_an_instance_that_is_called_ready_and_dead_for_good_is_ready(tmp_path: Path) -> None:
    scaling, sites, _ = make(tmp_path, ELASTIC)
    told(scaling, **START)
    reports = {name: InstanceState("regular", "ready", "", True) for name in ("home-regular-0", "home-regular-1")}
    scaling.fleet_changed("service-home", FleetChanged(fleet=[], instances=reports))
    asyncio.run(steps(scaling, 3, 20.0, 18.0))
    assert not sites.asked and not scaling._dead


def test_an_addition_does_not_pay_for_a_death_that_nobody_waits_for(tmp_path: Path) -> None:
    scaling, sites, _ = make(tmp_path, ELASTIC)
    told(scaling, **START)
    ask(scaling, "regular", 1)
    told(scaling, **(START | {"home_regular_1": "gone"}))
    asyncio.run(steps(scaling, 1, 20.0, 18.0))
    ask(scaling, "regular", 2)
    asyncio.run(steps(scaling, 3, 20.0, 18.0))
    assert [replicas for _, _, replicas in sites.asked] == [1, 2]


def test_an_added_instance_that_is_overdue_is_given_up_but_none_in_place_of_one_that_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaling, sites, _ = make(tmp_path, ELASTIC)
    told(scaling, **START)
    asyncio.run(steps(scaling, 2, 40.0, 10.0))
    told(scaling, **START, home_regular_2="starting")
    asyncio.run(steps(scaling, 1, 40.0, 10.0))
    unix, now = time.time(), time.monotonic()
    monkeypatch.setattr(pool_sizes.time, "time", lambda: unix + 36_000)  # the clock was set forward
    asyncio.run(steps(scaling, 1, 40.0, 10.0))
    assert sites.asked == [("home", "regular", 3)], "it is not overdue"
    monkeypatch.setattr(pool_sizes.time, "monotonic", lambda: now + 100 + 900 + 300 + 1)
    told(scaling, **(START | {"home_regular_0": "starting"}), home_regular_2="ready")
    asyncio.run(steps(scaling, 1, 40.0, 10.0))
    assert sites.asked == [("home", "regular", 3)], "the last one would leave, which works"
    told(scaling, **START, home_regular_2="starting")
    asyncio.run(steps(scaling, 1, 40.0, 10.0))
    assert sites.asked[1:] == [("home", "regular", 2)]
    assert scaling.elasticity is not None and scaling.elasticity.waiting is None


def test_pools_of_an_excluded_site_are_left_out(tmp_path: Path) -> None:
    scaling, sites, _ = make(tmp_path, ELASTIC)
    told(scaling, **START)
    asyncio.run(steps(scaling, 1, 40.0, 10.0))
    assert scaling.elasticity is not None and scaling.elasticity.waiting is not None
    sites.excluded["service-home"] = "its samples cannot be used"
    asyncio.run(steps(scaling, 3, 40.0, 10.0))
    assert not sites.asked and scaling.elasticity.waiting is None and scaling.elasticity.limits == {}


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


def test_steps_cost_what_was_spent_between_their_ends_however_long_they_are_said_to_be() -> None:
    spending = Spending({("home", "trainer"): 36.0})
    costs = [spending.of_step(began, now) for began, now in ((50.0, 150.0), (3850.0, 250.0), (-3200.0, 400.0))]
    assert costs == [{"home": {"trainer": pytest.approx(usd)}} for usd in (1.0, 1.0, 1.5)]


def test_prices_of_steps_that_are_counted_are_forgotten() -> None:
    spending, whole = Spending({("home", "trainer"): 3600.0}), Spending({("home", "trainer"): 3600.0})
    for step in range(1, 101):
        for change in (0.0, 4.0):
            prices = {("home", "trainer"): 3600.0 * (step + change)}
            for one in (spending, whole):
                one.change(10.0 * step + change, prices)
        began, ended = 10.0 * step - 2.0, 10.0 * step + 8.0
        assert spending.of_step(began, ended) == whole.between(began, ended)
        assert len(spending._changes) == 1
    assert spending.usd_per_hour == whole.usd_per_hour and len(whole._changes) == 200


def test_a_row_names_pools_instead_of_more_instances_than_it_has_room_for() -> None:
    names = {f"far-1-tail-{index}": 0.5 for index in range(3)} | {"far-1-spot-2-0": 0.25, LINK: 2.0}
    costs = {"home": {"trainer": 1.0, "service-home": 0.125}, "far-1": names}
    assert few_names(costs, 7) == costs
    assert few_names(costs, 6) == {
        "home": {"trainer": 1.0, "service-home": 0.125},
        "far-1": {"far-1-tail": 1.5, "far-1-spot-2": 0.25, LINK: 2.0},
    }


def test_a_clock_that_is_set_changes_nothing_of_what_an_instance_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaling, *_ = make(tmp_path)
    told(scaling, **START)
    recorder: Any = SimpleNamespace(spending=scaling.spending)
    traffic: Any = SimpleNamespace(usd={})
    ticks = {"time": 1e9, "monotonic": 1e6}
    for name in ticks:
        monkeypatch.setattr(time, name, lambda name=name: ticks[name])
    steps = []
    for real, shown in ((3600, 3600), (3600, -7200), (1800, 1800), (1800, 7200)):
        if shown == -7200:
            told(scaling, **START, home_regular_2="starting")
        began = ticks["monotonic"]
        ticks = {"time": ticks["time"] + shown, "monotonic": began + real}
        costs = Recorder._costs(recorder, began, ticks["monotonic"], traffic)
        assert costs is not None
        steps.append(costs["home"].get("home-regular-2"))
    assert steps == [None, pytest.approx(3.0), pytest.approx(1.5), pytest.approx(1.5)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "not valid JSON: Expecting value"),
        (b'{"home/regular": 4, "ho', "not valid JSON: Unterminated string"),
        (bytes(40), "not valid JSON: Expecting value"),
        (b"\xff\xff", "not UTF-8 text (byte 0)"),
        (b"[4]", "expected the number of instances of each pool"),
        (b'{"home/regular": "4"}', "expected the number of instances of each pool"),
    ],
)
def test_a_resumed_run_whose_record_is_damaged_has_what_its_file_says_and_names_the_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: bytes, why: str
) -> None:
    record = tmp_path / layout.REPLICAS
    record.write_bytes(text)
    scaling, sites, _ = make(tmp_path, resume=True)
    asyncio.run(scaling.begin())
    assert not sites.asked
    [line] = caplog.messages
    assert line.startswith(f"{record}: {why}") and line.endswith("; pools get the sizes of the cluster file")
    ask(scaling, "regular", 4)
    assert json.loads(record.read_text())["home/regular"]["wanted"] == 4


def test_what_was_asked_for_last_is_on_disk(tmp_path: Path, disk: Disk) -> None:
    ask(make(tmp_path)[0], "regular", 4)
    assert [what for what, _ in disk.events] == ["on disk", "renamed", "on disk"]
