"""Times and prices of one split: under every schedule, and over links."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.capacity.allocation import Allocator
from scheduler.capacity.covering import LONGEST_STEP_S
from scheduler.capacity.placement_plan import evaluate
from scheduler.capacity.plan_search import plans
from scheduler.capacity.problem import Route
from scheduler.schedule.schedules import SEPARATE
from tests.scheduler.test_allocation import two_sites


@pytest.mark.parametrize("schedule", SEPARATE)
def test_a_step_shown_under_another_schedule_is_the_one_that_is_planned_for_it(schedule: str) -> None:
    """What a run file says of its own schedule, `sync_every`, holds for no other."""
    own = replace(two_sites(), sync_every=4, delta_ratio=1.0)
    own = replace(own, batch=replace(own.batch, staleness=3))
    split = max(Allocator(own, schedule).candidates("throughput"), key=lambda one: len(one.generation))
    shown = replace(evaluate(Allocator(own, schedule), split), simulated=True)
    assert shown.egress_usd > 0
    for other in SEPARATE:
        if other != schedule:
            planned = evaluate(Allocator(replace(own, sync_every=1), other), split)
            assert shown.step(other) == replace(planned, simulated=True).chosen


@pytest.mark.parametrize("schedule", SEPARATE)
@pytest.mark.parametrize("bytes_per_s", [1e3, 1e4, 1e5])
def test_a_site_generates_no_more_than_its_link_takes(schedule: str, bytes_per_s: float) -> None:
    """Such a site with as many replicas as a broad link would want does not shorten a step as one there would."""
    broad = replace(two_sites(), delta_ratio=1e6)
    split = max(Allocator(broad, schedule).candidates("throughput"), key=lambda one: len(one.generation))
    home = broad.offers[split.trainer].site
    assert {broad.offers[pool.offer].site for pool in split.generation} == {"a", "b"}
    narrow = replace(broad, routes=((frozenset("ab"), Route(bytes_per_s)),))
    free, bound = (evaluate(Allocator(one, schedule), split) for one in (broad, narrow))
    over = sum(
        share
        for pool, share in zip(split.generation, bound.shares, strict=True)
        if broad.offers[pool.offer].site != home
    )
    generation = bound.steady_s if schedule == "async" else bound.makespan_s
    assert over * narrow.sample_bytes <= generation * bytes_per_s * (1 + 1e-6)
    assert sum(bound.shares) == pytest.approx(1) and over > 0
    assert bound.chosen.seconds > free.chosen.seconds


def test_a_planned_step_is_no_shorter_than_its_samples_take_over_a_link() -> None:
    one = replace(two_sites(), delta_ratio=1e6, routes=((frozenset("ab"), Route(1e3)),))
    for schedule in SEPARATE:
        for plan in plans(one, schedule, "throughput", simulated=False):
            over = sum(
                share
                for pool, share in zip(plan.split.generation, plan.shares, strict=True)
                if one.offers[pool.offer].site != plan.site
            )
            assert over * one.sample_bytes <= plan.chosen.seconds * 1e3 * (1 + 1e-6), (schedule, plan.text)


def test_a_link_that_takes_no_samples_is_none() -> None:
    one = replace(two_sites(), delta_ratio=1e30, routes=((frozenset("ab"), Route(1e-6)),))
    for schedule in SEPARATE:
        assert {one.offers[pool.offer].site for pool in plans(one, schedule, "throughput")[0].split.generation} == {"a"}
        with pytest.raises(ValueError, match="the cheapest that was found costs"):
            plans(replace(one, budget=0.01), schedule, "throughput")
    over = max(Allocator(two_sites(), "sync").candidates("throughput"), key=lambda split: len(split.generation))
    far = replace(over, generation=tuple(pool for pool in over.generation if one.offers[pool.offer].site == "b"))
    assert evaluate(Allocator(one, "sync"), far).chosen.seconds >= LONGEST_STEP_S
