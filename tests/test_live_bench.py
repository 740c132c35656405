"""Whole steps on emulated engines: the schedule's rules, and the time of the simulator. No vLLM."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scheduler.cost.decode import StepCurve
from scheduler.dispatch.policy import DispatchPolicy
from scheduler.dispatch.registry import make_policy
from scheduler.schedule.schedules import make_schedule
from scheduler.simulation.generation_simulator import SimulatedInstance, SimulatedRequest, simulate
from scheduler.simulation.pipeline import Pipeline
from scheduler.simulation.stages import Stages
from streamrl.controller.group_source import sample_ids
from streamrl.rollouts.types import Group, SampleRequest

sys.path.append(str(Path(__file__).parents[1] / "experiments"))
from live_bench import Steps, play, play_steps

STEP_S = 4e-4
"""Seconds of an emulated decode step, whatever the batch."""
FLAT = StepCurve((1, 64), (STEP_S, STEP_S))
SLOTS = 4


class Emulated:
    """An engine whose requests all decode at one speed."""

    def __init__(self, lengths: Mapping[str, int]) -> None:
        self.lengths, self.most, self.running = lengths, 0, 0

    async def generate(self, request: SampleRequest, route: str) -> Any:
        self.running += 1
        self.most = max(self.most, self.running)
        length = self.lengths[request.sample_id]
        await asyncio.sleep(STEP_S * length)  # sleeps: an engine takes so long
        self.running -= 1
        return SimpleNamespace(sample_id=request.sample_id, output_length=length)

    async def release(self, sample_id: str) -> None:
        raise AssertionError("nothing is moved here")

    def produced(self) -> dict[str, int]:
        return {}


def made(number: int) -> Group:
    prompt = np.arange(10, dtype=np.int32)
    return Group(f"g{number}", 1, number, f"p{number}", "", 0, "", prompt, 2)


def joined(name: str = "least-loaded") -> DispatchPolicy:
    policy = make_policy(name)
    for seat in ("a", "b"):
        policy.join(seat, SLOTS, FLAT)
    return policy


GROUPS = [made(number) for number in range(12)]
LENGTHS = {
    name: 100 * (1 + (7 * number + 3 * k) % 5)
    for number, group in enumerate(GROUPS)
    for k, name in enumerate(sample_ids(group))
}
FLEET = [SimulatedInstance(seat, FLAT, SLOTS) for seat in ("a", "b")]


def simulated(group: Group) -> list[SimulatedRequest]:
    return [SimulatedRequest(name, LENGTHS[name], group.group_id, 10) for name in sample_ids(group)]


def test_a_batch_is_generated_once_in_the_simulated_time_at_least() -> None:
    engines = {seat: Emulated(LENGTHS) for seat in ("a", "b")}
    played = asyncio.run(play(engines, joined(), {}, GROUPS, 0))
    assert played.lengths == LENGTHS and played.moves == 0
    assert [engine.most for engine in engines.values()] == [SLOTS, SLOTS]
    expected = simulate(make_policy("least-loaded"), [one for g in GROUPS for one in simulated(g)], FLEET).makespan
    assert played.seconds >= expected


@pytest.mark.parametrize("name", ["sync", "stream", "async"])
def test_steps_are_trained_in_the_simulated_time_at_least(name: str) -> None:
    schedule, rate = make_schedule(name), 30_000.0
    engines = {seat: Emulated(LENGTHS) for seat in ("a", "b")}
    steps = Steps(schedule, [GROUPS[:4], GROUPS[4:8], GROUPS[8:]], rate)
    played = asyncio.run(play_steps(engines, joined(), {}, steps, 0))
    assert played.lengths == LENGTHS and steps.step == 3 and not steps.versions and not steps.complete
    groups = [simulated(group) for group in GROUPS]
    expected = Pipeline(make_policy("least-loaded"), FLEET, Stages(rate), schedule, 4).run(groups, 3).total
    assert played.seconds >= expected


def test_groups_are_issued_and_taken_by_the_schedules_rules() -> None:
    steps = Steps(make_schedule("async"), [GROUPS[:2], GROUPS[2:4], GROUPS[4:6]], 1.0)
    assert steps.issue() == GROUPS[:4] and steps.issue() == []  # one step of staleness: two batches
    for group in (GROUPS[3], GROUPS[3], GROUPS[2], GROUPS[2], GROUPS[0]):
        steps.ended(group)
    assert steps.take() == GROUPS[3] and steps.take() == GROUPS[2]  # whichever is complete
    assert steps.take() is None  # the step has its two groups
    steps.step, steps.taken = 1, 0
    assert steps.issue() == GROUPS[4:6]
    for group in (GROUPS[4], GROUPS[4]):
        steps.ended(group)
    assert steps.take() is None  # the first batch is due, and two of it are open
    steps.ended(GROUPS[0])
    assert steps.take() == GROUPS[0]
