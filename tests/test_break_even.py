"""The cheapest plan that keeps up with a pace, against every possible split; and thresholds."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scheduler.capacity.allocation import Allocator, Split
from scheduler.capacity.covering import Replicas
from scheduler.capacity.placement_plan import Step, evaluate
from scheduler.capacity.plan_search import plans
from scheduler.capacity.problem import Offer, Problem, Route
from scheduler.cost.generation_cost import Batch
from scheduler.cost.hardware import device
from scheduler.cost.model_shapes import MODELS
from scheduler.cost.trainer_work import GRPO, PPO
from tests.simulated_once import splits_simulated_once

sys.path.append(str(Path(__file__).parents[1] / "experiments"))
from break_even import (
    Comparison,
    Cost,
    Point,
    Threshold,
    cheapest_within,
    in_turns,
    shortest_step,
    threshold,
)

LENGTHS = np.random.default_rng(0).lognormal(6.5, 0.8, 2000)
BATCH = Batch.of(LENGTHS, 256, 200)
LINK = Route(10e9 / 8, 0.01, 0.02)


def offer(site: str, gpu: str, count: int) -> Offer:
    found = device(gpu)
    assert found.price is not None
    return Offer(site, found, count, found.price.usd_per_hour)


def problem(*offers: Offer, link: Route = LINK, budget: float = math.inf, ratio: float = 70.0) -> Problem:
    routes = ((frozenset("ab"), link),)
    return Problem(MODELS["1.5b"], BATCH, GRPO, offers, routes, budget, ratio)


def across(link: Route = LINK, ratio: float = 70.0) -> Problem:
    """H800 train, H20 far away generate."""
    here, there = offer("a", "H800", 4), offer("b", "H20", 8)
    return problem(replace(here, generates=False), replace(there, trains=False), link=link, ratio=ratio)


FEW = problem(offer("a", "H800", 5), offer("b", "H20", 5))
"""So few GPUs that every split of them can be tried."""


@pytest.fixture(scope="module", autouse=True)
def simulated_once() -> Iterator[None]:
    """Simulate a split once for all tests: most of them plan for the same GPUs."""
    with splits_simulated_once():
        yield


@functools.cache
def shortest_of_few(schedule: str) -> float:
    """Seconds of the shortest step on `FEW`."""
    return plans(FEW, schedule, "throughput")[0].chosen.seconds


@functools.cache
def steps_of_all(schedule: str) -> list[Step]:
    """Steps of all splits of `FEW`."""
    allocator, steps = Allocator(FEW, schedule), []
    for trainer, times in allocator.trainers.items():
        for time in {time for time in times if time is not None}:
            pools = []
            for number, part in enumerate(FEW.offers):
                free = part.count - (time.gpus if number == trainer else 0)
                kinds = allocator.kinds.get(number, [])
                some = [Replicas(number, n, k) for k in kinds for n in range(1, free // k.tensor_parallel + 1)]
                pools.append([None, *some])
            for chosen in itertools.product(*pools):
                generation = tuple(pool for pool in chosen if pool is not None)
                if generation:
                    steps.append(evaluate(allocator, Split(trainer, time, generation)).chosen)
    return steps


@pytest.mark.parametrize("schedule", ["async", "one_step_off", "stream", "sync"])
@pytest.mark.parametrize("slack", [1.02, 1.5, 3.0])
def test_the_cheapest_plan_that_keeps_up_is_near_the_cheapest_of_all_splits(schedule: str, slack: float) -> None:
    limit = slack * shortest_of_few(schedule)
    found = cheapest_within(FEW, schedule, limit)
    assert found is not None
    assert found.chosen.seconds <= limit * (1 + 1e-5)
    cheapest = min(step.usd_per_1k for step in steps_of_all(schedule) if step.seconds <= limit)
    assert found.chosen.usd_per_1k <= 1.05 * cheapest


@pytest.mark.parametrize("schedule", ["async", "stream", "sync"])
def test_more_time_never_costs_much_more(schedule: str) -> None:
    one = across()
    fastest = plans(one, schedule, "throughput")[0].chosen.seconds
    costs = []
    for slack in (1.01, 1.2, 1.6, 2.5, 4.0):
        found = cheapest_within(one, schedule, fastest * slack)
        assert found is not None
        costs.append(found.chosen.usd_per_1k)
    assert all(later <= 1.03 * earlier for earlier, later in itertools.pairwise(costs))
    assert costs[-1] < 0.95 * costs[0]


def test_there_is_no_plan_where_nothing_keeps_up() -> None:
    assert cheapest_within(across(), "async", 0.01) is None
    assert cheapest_within(across(), "sync", 0.01) is None


@pytest.mark.parametrize("schedule", ["async", "stream", "sync"])
def test_whole_weights_over_a_slow_link_do_not_keep_up_and_deltas_do(schedule: str) -> None:
    slow = replace(LINK, bytes_per_s=0.2e9 / 8)
    limit = 1.5 * plans(across(), schedule, "throughput")[0].chosen.seconds
    assert cheapest_within(across(slow, ratio=1.0), schedule, limit) is None
    assert cheapest_within(across(slow, ratio=70.0), schedule, limit) is not None


def test_the_budget_holds() -> None:
    one = across()
    free = cheapest_within(one, "async", 60.0)
    assert free is not None
    rent = free.chosen.usd_per_hour
    within = cheapest_within(replace(one, budget=rent * 1.01), "async", 60.0)
    assert within is not None and within.chosen.usd_per_hour <= rent * 1.01
    assert cheapest_within(replace(one, budget=1.0), "async", 60.0) is None


def test_a_cost_adds_up_and_traffic_is_a_part_of_it() -> None:
    plan = cheapest_within(across(replace(LINK, usd_per_gb=1.0)), "async", 60.0)
    assert plan is not None
    cost = Cost.of(plan)
    assert cost.usd == pytest.approx(cost.usd_per_hour * cost.seconds / 3600 / BATCH.samples * 1000)
    rent = plan.split.rent(plan.problem.offers) * cost.seconds / 3600 / BATCH.samples * 1000
    assert cost.traffic_usd > 0 and cost.usd == pytest.approx(rent + cost.traffic_usd)
    assert cost.split.startswith(f"{plan.split.time.gpus} H800 > ") and cost.split.endswith("H20")


def test_colocated_plans_get_faster_with_gpus_and_leave_out_too_few() -> None:
    one = replace(problem(offer("a", "RTX4090", 1)))
    found = in_turns(one, (1, 8, 16))
    assert [cost.split for cost in found] == ["8 RTX4090 in turns", "16 RTX4090 in turns"]
    assert found[1].seconds < found[0].seconds
    for cost in found:
        assert cost.seconds == pytest.approx(cost.generation_s + cost.training_s + cost.weights_s)


def test_colocated_planning_needs_exactly_one_offer() -> None:
    with pytest.raises(ValueError, match="one offer"):
        in_turns(across(), (4,))


@pytest.mark.parametrize("schedule", ["async", "stream", "sync"])
def test_the_shortest_step_is_the_plans(schedule: str) -> None:
    one = replace(across(), budget=12.0)
    assert shortest_step(one, schedule) == plans(one, schedule, "throughput", simulated=False)[0].chosen.seconds
    assert shortest_step(replace(one, budget=0.5), schedule) == math.inf


@pytest.mark.parametrize("edge", [0.02, 1.0, 37.0])
def test_a_threshold_is_found_from_below_and_from_above(edge: float) -> None:
    found = threshold(lambda x: x >= edge, 0.01, 100.0)
    assert found.kind == "from" and found.value is not None
    assert edge <= found.value <= edge * 1.01
    found = threshold(lambda x: x <= edge, 0.01, 100.0, upwards=False, precision=0.001)
    assert found.kind == "up_to" and found.value is not None
    assert edge / 1.001 <= found.value <= edge


@pytest.mark.parametrize("upwards", [True, False])
def test_a_threshold_outside_of_the_range_is_always_or_never(upwards: bool) -> None:
    assert threshold(lambda x: True, 1.0, 2.0, upwards) == Threshold("always")
    assert threshold(lambda x: False, 1.0, 2.0, upwards) == Threshold("never")


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (2.0, 1.0), (1.0, math.inf)])
def test_the_search_for_a_threshold_needs_a_positive_range(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="range"):
        threshold(lambda x: True, low, high)


def long_answers(name: str) -> Batch:
    """Mostly 2,000 tokens, and a thin flat tail to 20,000."""
    assert name == "long"
    rng = np.random.default_rng(0)
    body, tail = rng.lognormal(7.7, 0.45, 2000), rng.uniform(4000, 20_000, 2000)
    return Batch.of(np.where(rng.random(2000) < 0.12, tail, body), 1024, 512)


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    devices = {name: device(name) for name in ("H800", "H20")}
    return Comparison(MODELS["7b"], PPO, long_answers, devices, "H800", 64, (8, 16))


def at(schedule: str = "async", **link: float) -> Point:
    return replace(Point(16, "long", schedule, 10.0, 30.0, 0.02), **link)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["async", "stream", "sync"])
def test_everything_that_is_compared_keeps_up(comparison: Comparison, schedule: str) -> None:
    here = at(schedule).local()
    limit = comparison.limit(at(schedule))
    two, single = comparison.two_sites(at(schedule), "H20"), comparison.single(here)
    assert two is not None and max(two.seconds, single.seconds) <= limit * (1 + 1e-5)
    own = comparison.one_type(here, "H800")
    assert own is not None and single.usd <= own.usd
    assert comparison.mixed(here, "H20").usd <= min(single.usd, 1.005 * comparison.usd(at(schedule, egress=0.0), "H20"))


@pytest.mark.parametrize("delta", [True, False])
def test_two_sites_cost_less_from_the_break_even_bandwidth_on(comparison: Comparison, delta: bool) -> None:
    here = replace(at(egress=0.0), delta=delta)
    found, below = comparison.bandwidth(here, "H20")
    assert found.kind == "from" and found.value is not None
    assert comparison.ratio(replace(here, gbit_s=found.value), "H20") < 1
    worse = comparison.ratio(replace(here, gbit_s=found.value / 1.02), "H20")
    assert worse >= 1 and (below == "slow") == math.isinf(worse)


def test_whole_weights_need_a_faster_link_and_cheaper_traffic_than_deltas(comparison: Comparison) -> None:
    free, whole = at(egress=0.0), replace(at(egress=0.0), delta=False)
    links = [comparison.bandwidth(one, "H20")[0].value for one in (free, whole)]
    assert links[0] is not None and links[1] is not None and links[1] > 10 * links[0]
    prices = [comparison.dearest_egress(replace(one, gbit_s=50.0), "H20").value for one in (free, whole)]
    assert prices[0] is not None and prices[1] is not None and prices[0] > 10 * prices[1]


def test_the_second_sites_gpus_may_cost_up_to_a_price(comparison: Comparison) -> None:
    found = comparison.dearest_gpu(at(), "H20")
    assert found.kind == "up_to" and found.value is not None and found.value > 1.0
    assert comparison.ratio(replace(at(), remote_usd=found.value), "H20") < 1
    assert comparison.ratio(replace(at(), remote_usd=found.value * 1.02), "H20") >= 1


def test_a_step_for_equal_money_is_longer_over_a_slow_link(comparison: Comparison) -> None:
    steps = [comparison.two_sites_step(replace(at(gbit_s=gbit), delta=False), "H20") for gbit in (0.1, 1.0, 100.0)]
    assert steps[0] > steps[1] >= steps[2]
    found = comparison.bandwidth_for_time(at(), "H20")
    assert found.value is not None
    best = comparison.single_step(at().local())
    assert comparison.two_sites_step(at(gbit_s=found.value), "H20") < best


def test_every_type_needs_a_price() -> None:
    free = {"H800": device("H800"), "H20": replace(device("H20"), price=None)}
    with pytest.raises(ValueError, match="no price is known of H20"):
        Comparison(MODELS["7b"], PPO, long_answers, free, "H800", 8, ())
