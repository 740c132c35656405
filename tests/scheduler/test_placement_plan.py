"""Times and prices of one split: under every schedule, and over links."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.capacity.allocation import Allocator
from scheduler.capacity.placement_plan import evaluate
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
