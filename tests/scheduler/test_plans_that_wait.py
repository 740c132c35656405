"""Plans whose steps wait for new weights: another site, or a faster link, makes none of them slower."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from scheduler.capacity.allocation import Allocator
from scheduler.capacity.placement_plan import PlacementPlan, evaluate
from scheduler.capacity.plan_search import plans
from scheduler.capacity.problem import Offer, Problem, Route
from scheduler.cost.generation_cost import Batch
from scheduler.cost.hardware import device
from scheduler.cost.model_shapes import MODELS
from scheduler.cost.trainer_work import GRPO
from tests.scheduler.test_allocation import every_split, offer, problem
from tests.scheduler.test_plan_search import LENGTHS

HOME = (Offer("home", device("A100-80"), 8, 1.8), Offer("home", device("H20"), 8, 1.0))
FAR = Offer("far", device("H20"), 2, 1.0, trains=False)
FARTHER = Offer("farther", device("H20"), 4, 1.0, trains=False)
CLOSE = 1.002
"""Ratio of steps that count as equal: of a plan's, some weights count as coming together."""


def best(offers: tuple[Offer, ...], links: dict[str, float], schedule: str, delta_ratio: float) -> PlacementPlan:
    routes = tuple((frozenset(("home", site)), Route(rate)) for site, rate in links.items())
    batch = Batch.of(LENGTHS * 0.2, 1024, 512)
    one = Problem(MODELS["7b"], batch, GRPO, offers, routes, home="home", delta_ratio=delta_ratio)
    return plans(one, schedule, "throughput")[0]


@pytest.mark.parametrize("delta_ratio", [1.0, 70.0])
@pytest.mark.parametrize("schedule", ["sync", "stream"])
def test_no_site_and_no_faster_link_makes_a_plan_slower(schedule: str, delta_ratio: float) -> None:
    alone = before = best(HOME, {}, schedule, delta_ratio)
    for rate in (1e6, 1e7, 1e8, 1e9, 1e10, 1e12):
        faster = best((*HOME, FAR), {"far": rate}, schedule, delta_ratio)
        assert faster.chosen.seconds <= CLOSE * before.chosen.seconds, (rate, faster.text, before.text)
        both = best((*HOME, FAR, FARTHER), {"far": rate, "farther": rate / 10}, schedule, delta_ratio)
        assert both.chosen.seconds <= CLOSE * faster.chosen.seconds, (rate, both.text, faster.text)
        before = faster
    assert before.chosen.seconds < alone.chosen.seconds and len({pool.offer for pool in before.split.generation}) > 1


@pytest.mark.parametrize("schedule", ["sync", "stream"])
def test_weights_may_take_longer_than_generation_where_that_is_the_faster_step(schedule: str) -> None:
    """Few replicas at home: a far site shortens generation by more than its weights take."""
    few = (replace(HOME[0], generates=False), replace(HOME[1], count=1))
    many = replace(FAR, device=device("H100"), count=64)
    alone = best(few, {}, schedule, 1.0)
    found = best((*few, many), {"far": 2e8}, schedule, 1.0)
    assert math.isfinite(found.transfer_s) and found.transfer_s > found.makespan_s
    assert found.chosen.seconds < alone.chosen.seconds


@pytest.mark.parametrize("rate", [1e6, 1e7, 1e8, 1e9])
def test_the_fastest_plan_is_the_fastest_of_all_splits_with_their_weights(rate: float) -> None:
    offers = (offer("a", "H100", 3), offer("b", "H20", 3), offer("a", "L40S", 2), offer("b", "L40S", 1))
    one = problem(*offers, routes=((frozenset("ab"), Route(rate)),), delta_ratio=10.0)
    allocator = Allocator(one, "sync")
    brute = min(evaluate(allocator, split).chosen.seconds for split in every_split(one, allocator))
    assert min(plan.chosen.seconds for plan in plans(one, "sync", "throughput")) <= CLOSE * brute
