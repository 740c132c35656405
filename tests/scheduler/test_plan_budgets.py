"""A budget that is too small: the price that the error names is the least of all splits, and enough."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from scheduler.capacity.allocation import Allocator
from scheduler.capacity.placement_plan import evaluate
from scheduler.capacity.plan_search import plans
from scheduler.capacity.problem import Problem, Route
from scheduler.cost.model_shapes import MODELS
from tests.scheduler.test_allocation import every_split, offer, problem

SLOW = (frozenset({"home", "far"}), Route(5e6, 0.2, usd_per_gb=0.02))


def named(one: Problem, schedule: str, budget: float, simulated: bool) -> float:
    """USD per hour of the cheapest plan that the error of a budget names."""
    with pytest.raises(ValueError, match="the cheapest that was found costs") as refused:
        plans(replace(one, budget=budget), schedule, "throughput", simulated)
    found = re.search(r"costs ([\d.]+) USD/h", str(refused.value))
    assert found is not None
    return float(found[1])


@pytest.mark.parametrize("schedule", ["one_step_off", "stream", "sync"])
@pytest.mark.parametrize("ratio", [1.0, 70.0])
def test_the_error_names_the_cheapest_of_all_splits(schedule: str, ratio: float) -> None:
    """Its samples may be dear: over a slow link weights come so seldom that hardly any are made."""
    here = offer("home", "H100", 2, 2.6), offer("home", "A100-80", 2, 1.8)
    one = problem(*here, offer("far", "H20", 1, 0.47), routes=(SLOW,), delta_ratio=ratio)
    allocator = Allocator(one, schedule)
    least = min(evaluate(allocator, split).chosen.usd_per_hour for split in every_split(one, allocator))
    told = named(one, schedule, 0.01, False)
    assert least <= told < least + 0.01 + 1e-9
    assert plans(replace(one, budget=told), schedule, "throughput")[0].chosen.usd_per_hour <= told
    assert named(one, schedule, told - 0.011, False) == told


def test_under_async_the_price_is_that_of_the_simulated_step() -> None:
    here, far = offer("home", "H100", 1, 2.0), replace(offer("far", "H20", 1, 0.5), max_batch=16)
    one = problem(here, far, routes=((SLOW[0], Route(1e9, 0.01, usd_per_gb=0.5)),), delta_ratio=1.0)
    told = named(one, "async", 0.01, True)
    (plan, *_) = plans(replace(one, budget=told), "async", "throughput")
    assert plan.simulated and told - 0.01 <= plan.chosen.usd_per_hour <= told
    assert replace(plan, simulated=False).chosen.usd_per_hour > told


def test_a_price_below_a_dollar_has_more_digits() -> None:
    tiny = replace(problem(offer("home", "cpu", 4, 0.0123)), model=MODELS["0.5b"])
    assert named(tiny, "sync", 0.001, False) == 0.0246
    assert plans(replace(tiny, budget=0.0246), "sync", "cost")[0].chosen.usd_per_hour == pytest.approx(0.0246)
