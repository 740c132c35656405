"""Plans under `async` against splits that differ in the trainer, its offer, its site, or in a pool more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from scheduler.capacity.allocation import Allocator, Replicas, Split, most_replicas
from scheduler.capacity.placement_plan import PlacementPlan, evaluate
from scheduler.capacity.plan_refinement import NOISE, Refinement
from scheduler.capacity.plan_search import plans
from scheduler.capacity.problem import Offer, Problem, Route
from scheduler.cost.generation_cost import Batch
from scheduler.cost.hardware import device
from scheduler.cost.model_shapes import MODELS
from scheduler.cost.trainer_work import GRPO

pytestmark = pytest.mark.usefixtures("simulated_once")

RNG = np.random.default_rng(0)
LENGTHS = np.concatenate([RNG.lognormal(7.7, 0.45, 3520), RNG.uniform(4_000, 20_000, 480)])
Gpus = tuple[str, str, int, float]
"""Site, type, count and USD per hour of one."""
ONE_SITE: tuple[Gpus, ...] = (("a", "H800", 4, 5.7), ("a", "H100", 8, 1.5), ("a", "A100-80", 6, 1.8))
TWO_PRICES: tuple[Gpus, ...] = (("a", "H100", 4, 6.0), ("a", "H100", 8, 1.5))
TWO_SITES: tuple[Gpus, ...] = (
    ("a", "A100-80", 1, 0.9),
    ("a", "H20", 4, 1.0),
    ("b", "A100-80", 2, 1.8),
    ("b", "L40S", 2, 1.8),
)
FEW: tuple[Gpus, ...] = (("a", "H20", 2, 0.5), ("a", "L40S", 1, 0.9), ("a", "A100-80", 2, 0.9))


def problem(model: str, gpus: tuple[Gpus, ...], batch: Batch, home: str = "a") -> Problem:
    offers = tuple(Offer(site, device(name), count, usd) for site, name, count, usd in gpus)
    routes = ((frozenset("ab"), Route(1e8, 0.01, 0.02)),)
    return Problem(MODELS[model], batch, GRPO, offers, routes, home=home)


def batch(samples: int, group: int = 8, staleness: int = 1, scale: float = 1.0) -> Batch:
    return Batch.of(LENGTHS * scale, samples, 512, 20000, group, staleness)


def with_more(plan: PlacementPlan) -> Iterator[PlacementPlan]:
    """The same pools with more trainer GPUs, and the same trainer with a pool of an offer that is not used."""
    allocator, split = Allocator(plan.problem, "async"), plan.split
    for time in allocator.trainers[split.trainer]:
        if time is not None and time.gpus > split.time.gpus:
            same = [pool for pool in split.generation if pool.offer == split.trainer]
            offer = plan.problem.offers[split.trainer]
            if all(pool.count <= most_replicas(offer, pool.kind.tensor_parallel, time) for pool in same):
                yield evaluate(allocator, replace(split, time=time), plan.objective)
    used = {pool.offer for pool in split.generation}
    for number, kinds in allocator.kinds.items():
        for kind in kinds if number not in used else ():
            beside = split.time if number == split.trainer else None
            most = most_replicas(plan.problem.offers[number], kind.tensor_parallel, beside)
            if most:
                pools = (*split.generation, Replicas(number, most, kind))
                in_order = tuple(sorted(pools, key=lambda one: one.offer))
                yield evaluate(allocator, Split(split.trainer, split.time, in_order), plan.objective)


@pytest.mark.parametrize(
    ("model", "gpus", "samples", "scale"),
    [("1.5b", ONE_SITE, 1024, 1.0), ("3b", FEW, 16, 1.0), ("1.5b", TWO_PRICES, 64, 0.3)],
)
def test_no_larger_trainer_and_no_further_pool_makes_a_plan_much_faster(
    model: str, gpus: tuple[Gpus, ...], samples: int, scale: float
) -> None:
    best = plans(problem(model, gpus, batch(samples, scale=scale)), "async", "throughput")[0]
    for other in with_more(best):
        if other.chosen.seconds < best.chosen.seconds:
            other = replace(other, simulated=True)
        assert other.chosen.seconds > 0.985 * best.chosen.seconds, (best.text, other.text)


def test_a_trainer_on_another_offer_of_the_site_makes_no_plan_cheaper() -> None:
    one = problem("1.5b", ONE_SITE, batch(1024, scale=0.3))
    best, allocator = plans(one, "async", "throughput")[0], Allocator(one, "async")
    alone = [next(kind for kind in allocator.kinds[number] if kind.tensor_parallel == 1) for number in (0, 1)]
    twice = next(kind for kind in allocator.kinds[2] if kind.tensor_parallel == 2)
    time = allocator.trainers[1][4]
    assert time is not None and time.gpus == 4
    pools = Replicas(0, 3, alone[0]), Replicas(1, 4, alone[1]), Replicas(2, 1, twice)
    other = replace(evaluate(allocator, Split(1, time, pools)), simulated=True).chosen
    assert best.chosen.seconds < 0.99 * other.seconds or best.chosen.usd_per_hour <= 1.01 * other.usd_per_hour


def test_the_best_plan_of_each_site_is_refined_before_they_are_compared() -> None:
    one = problem("3b", TWO_SITES, batch(16, staleness=2), home="b")
    best, allocator = plans(one, "async", "throughput")[0], Allocator(one, "async")
    four = next(kind for kind in allocator.kinds[1] if kind.tensor_parallel == 4)
    two = next(kind for kind in allocator.kinds[3] if kind.tensor_parallel == 2)
    time = allocator.trainers[0][1]
    assert time is not None
    there = replace(evaluate(allocator, Split(0, time, (Replicas(1, 1, four), Replicas(3, 1, two)))), simulated=True)
    assert best.chosen.seconds <= (1 + NOISE) * there.chosen.seconds, (best.text, there.text)


def test_a_split_is_simulated_once() -> None:
    one = problem("3b", FEW, batch(16))
    allocator = Allocator(one, "async")
    search = Refinement(allocator, "throughput")
    split = next(allocator.candidates("throughput"))
    first, again = (search.simulated(evaluate(allocator, split)) for _ in range(2))
    assert first is again and first.simulated


def test_gpus_in_reserve_are_said_to_have_been_tried() -> None:
    limits = [
        plan.limit
        for samples in (64, 256, 1024)
        for plan in plans(problem("7b", ONE_SITE, batch(samples, group=1, scale=0.3)), "async", "throughput")
    ]
    assert not any("would not make" in limit for limit in limits)
    assert any("no split that was tried with" in limit and "as well is much faster" in limit for limit in limits), (
        limits
    )
