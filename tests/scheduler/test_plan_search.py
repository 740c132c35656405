"""Plans under `async`, whose steps are simulated: what rates alone would miss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from scheduler.capacity.allocation import Allocator, PlanObjective, Replicas, Split, most_replicas
from scheduler.capacity.placement_plan import PlacementPlan, evaluate
from scheduler.capacity.plan_search import plans
from scheduler.capacity.problem import Offer, Problem, Route
from scheduler.cost.generation_cost import Batch
from scheduler.cost.hardware import device
from scheduler.cost.model_shapes import MODELS
from scheduler.cost.trainer_work import GRPO

pytestmark = pytest.mark.usefixtures("simulated_once")

RNG = np.random.default_rng(0)
LENGTHS = np.concatenate([RNG.lognormal(7.7, 0.45, 3520), RNG.uniform(4_000, 20_000, 480)])
LINK = Route(1e9, 0.01)
AIMS: tuple[PlanObjective, ...] = ("throughput", "cost")


def problem(h800: int, h20: int) -> Problem:
    batch = Batch.of(LENGTHS, 1024, 512)
    offers = []
    for site, gpu, count in (("a", "H800", h800), ("b", "H20", h20)):
        found = device(gpu)
        assert found.price is not None
        offers.append(Offer(site, found, count, found.price.usd_per_hour, trains=site == "a"))
    return Problem(MODELS["7b"], batch, GRPO, tuple(offers), ((frozenset("ab"), LINK),), home="a")


def others(plan: PlacementPlan) -> Iterator[PlacementPlan]:
    """The same trainer and pools with replicas of another size, on the same GPUs or on all."""
    allocator, split = Allocator(plan.problem, "async"), plan.split
    for place, pool in enumerate(split.generation):
        beside = split.time if pool.offer == split.trainer else None
        for kind in allocator.kinds[pool.offer]:
            most = most_replicas(plan.problem.offers[pool.offer], kind.tensor_parallel, beside)
            for count in {min(most, pool.gpus // kind.tensor_parallel), most} - {0}:
                pools = list(split.generation)
                pools[place] = Replicas(pool.offer, count, kind)
                changed = Split(split.trainer, split.time, tuple(pools))
                yield replace(evaluate(allocator, changed, plan.objective), simulated=True)


@pytest.mark.parametrize("objective", ["throughput", "cost"])
def test_no_other_size_of_replicas_is_better(objective: PlanObjective) -> None:
    one = problem(8, 32)
    free = plans(one, "async", objective)[0]
    for budget in (one.budget, 0.8 * free.chosen.usd_per_hour):
        best = plans(replace(one, budget=budget), "async", objective)[0]
        assert best.chosen.usd_per_hour <= budget * 1.001
        for other in others(best):
            if other.chosen.usd_per_hour <= budget:
                assert other.worth[0] > 0.989 * best.worth[0], (best.text, other.text)


def test_more_gpus_make_no_plan_slower() -> None:
    few, more = (plans(problem(h800, 32), "async", "throughput")[0] for h800 in (8, 16))
    assert more.chosen.seconds <= 1.01 * few.chosen.seconds, (few.text, more.text)


def test_a_pool_that_generates_nothing_by_rate_is_replaced_by_one_that_has_a_replica() -> None:
    """One sample, which mostly is short and at times very long: in a usual step, a slow GPU generates nothing."""
    lengths = np.where(np.random.default_rng(0).random(3000) < 0.9, 500.0, 20_000.0)
    batch = Batch.of(lengths, 1, 100, staleness=2)
    offers = Offer("a", device("L40S"), 2, 0.335, 256), Offer("b", device("A100-80"), 3, 2.251, 256)
    links = ((frozenset("ab"), Route(1e9, 0.1, 1.0)),)
    for count in (2, 3):
        several = (offers[0], replace(offers[1], count=count))
        one = Problem(MODELS["7b"], batch, GRPO, several, links, delta_ratio=1.0)
        assert all(pool.count for pool in plans(one, "async", "throughput")[0].split.generation)


@pytest.mark.parametrize("objective", ["throughput", "cost"])
def test_one_gpu_more_makes_no_plan_slower_or_a_refusal_though_layers_hold_the_trainer_then(
    objective: PlanObjective,
) -> None:
    """Few GPUs hold the longest sample only if ranks share rows, all of them also if ranks share layers."""
    batch = Batch.of(LENGTHS, 1024, 512, 20_000)
    one = Problem(MODELS["7b"], batch, replace(GRPO, recompute=False), (Offer("a", device("H100"), 12, 3.0),))
    before: PlacementPlan | None = None
    for count in (12, 15, 16, 17):
        more = replace(one, offers=(replace(one.offers[0], count=count),))
        best = plans(more, "sync", objective)[0]
        assert before is None or best.worth[0] <= 1.01 * before.worth[0], (count, before.text, best.text)
        before = best


def test_gpus_share_layers_where_sharing_rows_gains_nothing() -> None:
    best = plans(problem(8, 32), "sync", "throughput")[0]
    assert best.split.time.sequence_parallel == 1


@pytest.mark.parametrize("h800", [12, 24])
def test_samples_of_a_better_plan_get_over_a_narrow_link_within_its_step(h800: int) -> None:
    one = replace(problem(h800, 32), routes=((frozenset("ab"), Route(3e5, 0.01)),), delta_ratio=1e4)
    best = plans(one, "async", "throughput")[0]
    over = sum(share for share, pool in zip(best.shares, best.split.generation, strict=True) if pool.offer == 1)
    assert over * one.sample_bytes <= 1.02 * best.chosen.seconds * 3e5, best.text


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_a_batch_of_few_samples_is_shared_among_the_pools(samples: int) -> None:
    one = problem(8, 32)
    few = replace(one, batch=Batch.of(LENGTHS, samples, 512))
    for best in plans(few, "async", "throughput"):
        assert sum(best.shares) == pytest.approx(1.0) and max(best.shares) > 0


@pytest.mark.parametrize("objective", ["throughput", "cost"])
def test_no_plan_is_shown_that_another_shown_one_beats_in_seconds_and_price(objective: PlanObjective) -> None:
    one = problem(8, 32)
    shape = replace(one.batch, environment_s=1.0, environment_processes=64)
    free = replace(one, offers=tuple(replace(offer, trains=True) for offer in one.offers))
    for asked in (free, replace(free, batch=shape)):
        shown = [plan.chosen for plan in plans(asked, "async", objective)]
        for number, worse in enumerate(shown):
            for better in shown[:number]:
                assert worse.seconds <= 1.01 * better.seconds or worse.usd_per_hour <= 1.01 * better.usd_per_hour


def big_site(gpus: int) -> Problem:
    """One site with more GPUs than a step can use."""
    offers = (Offer("a", device("H100"), gpus, 2.0),)
    return Problem(MODELS["7b"], Batch.of(LENGTHS, 1024, 512), GRPO, offers, home="a")


@pytest.mark.parametrize("gpus", [108, 208])
def test_no_plan_with_fewer_replicas_is_faster(gpus: int) -> None:
    best = plans(big_site(gpus), "async", "throughput")[0]
    allocator, split = Allocator(best.problem, "async"), best.split
    for place, pool in enumerate(split.generation):
        rest = split.generation[:place] + split.generation[place + 1 :]
        fewer = [(*rest, replace(pool, count=count)) for count in range(pool.count // 2, pool.count)]
        for pools in [rest] * bool(rest) + fewer:
            other = replace(evaluate(allocator, replace(split, generation=pools)), simulated=True)
            assert other.chosen.seconds > best.chosen.seconds, (best.text, other.text)


def test_gpus_that_hardly_shorten_a_step_are_not_rented() -> None:
    one = big_site(24)
    slow = replace(one, batch=replace(one.batch, environment_s=1.0))  # which limits the step, whatever generates
    fast, cheap = (plans(slow, "async", objective)[0].chosen for objective in AIMS)
    assert cheap.seconds <= 1.01 * fast.seconds
    assert fast.usd_per_hour <= 1.01 * cheap.usd_per_hour


def test_a_budget_binds_plans_that_are_made_cheaper() -> None:
    one = big_site(108)
    free = plans(one, "async", "throughput")[0].chosen
    for budget in (free.usd_per_hour, 0.8 * free.usd_per_hour):
        best = plans(replace(one, budget=budget), "async", "throughput")[0]
        assert best.chosen.usd_per_hour <= budget * 1.001
        assert all(gpus >= 0 for _, gpus in best.released)


@pytest.mark.parametrize("objective", AIMS)
@pytest.mark.parametrize("schedule", ["async", "one_step_off", "stream", "sync"])
def test_a_planned_step_has_the_environments_of_its_own_sites_only(schedule: str, objective: PlanObjective) -> None:
    one = replace(problem(8, 8), site_processes=16)
    one = replace(one, batch=replace(one.batch, samples=256, environment_s=20.0))
    best = plans(one, schedule, objective)[0]
    used = {best.split.trainer, *(pool.offer for pool in best.split.generation)}
    sites = {one.offers[pool.offer].site for pool in best.split.generation}
    assert best.batch.stepping_s == 256 * 20 / (16 * len(sites))
    left = Counter(dict(best.released))
    offers = [replace(offer, count=offer.count - left[n]) for n, offer in enumerate(one.offers) if n in used]
    again = plans(replace(one, offers=tuple(offers)), schedule, objective)[0]
    assert again.chosen.seconds == pytest.approx(best.chosen.seconds, rel=0.01)
    assert again.chosen.usd_per_hour == pytest.approx(best.chosen.usd_per_hour, rel=0.01)


def test_a_replica_at_a_further_site_is_tried_for_its_environments() -> None:
    one = replace(problem(8, 8), site_processes=16)
    one = replace(one, batch=replace(one.batch, samples=256, environment_s=200.0))
    for objective in AIMS:
        best = plans(one, "sync", objective)[0]
        assert {one.offers[pool.offer].site for pool in best.split.generation} == {"a", "b"}, best.text
    with pytest.raises(ValueError, match="one process of environments or more, got 0"):
        replace(one, site_processes=0)
