"""What a schedule waits for: by hand, and as the simulator of whole steps has it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler.cost.decode import PAPER_7B_H800, StepCurve
from scheduler.cost.expected_time import Worker
from scheduler.cost.length_forecast import Forecast
from scheduler.dispatch.baselines import LeastLoaded
from scheduler.dispatch.dispatch_objective import Streamed
from scheduler.dispatch.partition import PromptGroups, plan
from scheduler.dispatch.planned import SkewAware
from scheduler.dispatch.policy import DispatchPolicy, Request
from scheduler.dispatch.registry import make_policy, objective_of, policy_for
from scheduler.schedule.schedules import make_schedule
from scheduler.simulation.generation_simulator import SimulatedInstance, SimulatedRequest, simulate
from scheduler.simulation.pipeline import Pipeline
from scheduler.simulation.saving import Replay, resampled, waited
from scheduler.simulation.stages import Stages


def test_a_group_is_trained_after_its_last_sample_and_after_the_groups_before_it() -> None:
    ends, groups = np.asarray([[1.0, 4.0, 2.0, 3.0]]), ["a", "a", "b", "b"]
    tokens = np.asarray([[10.0, 30.0, 20.0, 40.0]])
    # b is complete at 3 and trained until 3 + 60 / 10 = 9, then a (complete at 4) until 9 + 40 / 10 = 13
    assert Streamed(10.0).seconds(ends, groups, tokens).tolist() == [13.0]
    # a fast trainer has done b at 3.06, waits for a, and has done that at 4.04
    assert Streamed(1000.0).seconds(ends, groups, tokens) == pytest.approx([4.04])
    assert Streamed(float("inf")).seconds(ends, groups, tokens).tolist() == [4.0], "the makespan"
    assert Streamed(1.0).seconds(np.zeros((3, 0)), [], np.zeros((3, 0))).tolist() == [0.0] * 3
    with pytest.raises(ValueError, match="rate above 0"):
        Streamed(0.0)


def test_scenarios_are_judged_one_by_one() -> None:
    ends = np.asarray([[1.0, 2.0], [5.0, 1.0]])
    assert Streamed(1.0).seconds(ends, ["a", "b"], np.full((2, 2), 3.0)).tolist() == [7.0, 8.0]


def workload(seed: int) -> list[SimulatedRequest]:
    lengths = np.random.default_rng(seed).lognormal(6.5, 0.9, 192).round().tolist()
    return [
        SimulatedRequest(f"{n}", length, f"{n // 4}", 50, 0.0, Forecast.exactly(length))
        for n, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("rate", [4_000.0, 1e6])
@pytest.mark.parametrize("seed", range(3))
def test_a_plan_s_cost_is_the_end_of_training_in_the_simulator(seed: int, rate: float) -> None:
    requests = workload(seed)
    fleet = [SimulatedInstance(f"i{n}", PAPER_7B_H800, 24) for n in range(3)]
    policy = SkewAware(False, objective=Streamed(rate))
    groups = [requests[n : n + 4] for n in range(0, len(requests), 4)]
    outcome = Pipeline(policy, fleet, Stages(rate), make_schedule("stream"), len(groups)).run(groups, 1)
    assert policy.plan is not None and policy.plan.cost == pytest.approx(outcome.total, rel=0.02)


def test_a_slow_trainer_is_not_starved_by_longest_first() -> None:
    rate, fleet = 4_000.0, [SimulatedInstance(f"i{n}", PAPER_7B_H800, 24) for n in range(3)]

    def total(policy: DispatchPolicy, seed: int) -> float:
        requests = workload(seed)
        groups = [requests[n : n + 4] for n in range(0, len(requests), 4)]
        return Pipeline(policy, fleet, Stages(rate), make_schedule("stream"), len(groups)).run(groups, 1).total

    ours, makespan, least = [], [], []
    for seed in range(4):
        ours.append(total(SkewAware(objective=Streamed(rate)), seed))
        makespan.append(total(SkewAware(), seed))
        least.append(total(LeastLoaded(), seed))
        assert ours[-1] <= 1.005 * min(least[-1], makespan[-1])
    assert sum(ours) < 0.98 * sum(makespan)


def test_a_streamed_training_needs_groups_and_a_makespan_none() -> None:
    workers = [Worker(StepCurve((1, 8), (1.0, 2.0)), 8)]
    with pytest.raises(ValueError, match="groups"):
        plan(np.ones((2, 1)), workers, objective=Streamed(1.0))
    of = plan(np.asarray([[4.0], [2.0]]), workers, prompts=PromptGroups(["a", "b"], [0, 0]))
    assert of.costs is of.times


def test_the_trainer_s_rate_changes_the_next_plan_under_stream_alone() -> None:
    streamed, other = (make_policy("skew-aware", objective=objective_of(name)) for name in ("stream", "sync"))
    for policy in (streamed, other, make_policy("least-loaded")):
        policy.training_at(50.0)
        policy.join("a", 8, PAPER_7B_H800)
        policy.submit([Request(str(n), "g", Forecast.exactly(100.0)) for n in range(4)])
        policy.decide()
    assert isinstance(streamed, SkewAware) and streamed.plan is not None
    assert streamed.plan.cost >= 400 / 50 + streamed.plan.makespan
    assert isinstance(other, SkewAware) and other.plan is not None and other.plan.cost == other.plan.makespan


def test_every_schedule_has_its_default_and_a_choice_stands_above_it() -> None:
    assert {policy_for(name) for name in ("async", "auto")} == {"least-loaded"}
    assert {policy_for(name) for name in ("colocated", "sync", "stream", "one_step_off")} == {"skew-aware"}
    assert policy_for("async", "skew-aware") == "skew-aware"
    assert objective_of("stream", 5.0) == Streamed(5.0) and objective_of("one_step_off") is None


def test_the_saving_is_of_what_the_schedule_waits_for() -> None:
    requests, fleet = workload(1), [SimulatedInstance(f"i{n}", PAPER_7B_H800, 24) for n in range(3)]
    plain, rate = Replay(fleet).saving(requests), 4_000.0
    streamed = Replay(fleet, objective=Streamed(rate)).saving(requests)
    assert plain.least_loaded == simulate(LeastLoaded(), requests, fleet).makespan
    groups = [requests[n : n + 4] for n in range(0, len(requests), 4)]
    run = Pipeline(LeastLoaded(), fleet, Stages(rate), make_schedule("stream"), len(groups)).run(groups, 1)
    assert streamed.least_loaded == pytest.approx(run.total)


def test_what_does_not_depend_on_forecasts_is_taken_from_the_same_batch_with_others() -> None:
    requests, fleet = workload(1), [SimulatedInstance(f"i{n}", PAPER_7B_H800, 24) for n in range(3)]
    unknown = [replace(request, forecast=None) for request in requests]
    first = Replay(fleet).saving(requests)
    assert Replay(fleet).saving(unknown, first) == Replay(fleet).saving(unknown) != first


def test_resampled_batches_keep_siblings_together_and_have_ids_of_their_own() -> None:
    requests = workload(0)
    some = resampled(requests, 3)
    assert len(some) == len(requests) == len({r.request_id for r in some})
    by_group: dict[str, list[SimulatedRequest]] = {}
    for request in some:
        by_group.setdefault(request.group_id, []).append(request)
    true = {tuple(r.length for r in requests[n : n + 4]) for n in range(0, len(requests), 4)}
    drawn = [tuple(r.length for r in group) for group in by_group.values()]
    assert set(drawn) < true and len(drawn) == 48 > len(set(drawn)), "drawn with replacement"


def test_ratios_of_resampled_batches_are_ours_over_least_loaded() -> None:
    requests, fleet = workload(2), [SimulatedInstance(f"i{n}", PAPER_7B_H800, 24) for n in range(3)]
    ratios = Replay(fleet).resampled_ratios(requests)
    for seed, ratio in enumerate(ratios):
        some = resampled(requests, seed)
        assert ratio == waited(SkewAware(), some, fleet) / waited(LeastLoaded(), some, fleet)
    assert len(set(ratios)) == 3 and max(ratios) < 1.0, "known lengths, slots for half of them"
