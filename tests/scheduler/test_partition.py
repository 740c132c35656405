"""Plans: exact for known lengths, never predicted worse than dealing evenly, robust where lengths are uncertain."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

from scheduler.cost.decode import PAPER_7B_H800, StepCurve, replica_time
from scheduler.cost.expected_time import Worker, expected_time
from scheduler.cost.length_forecast import Forecast, scenarios
from scheduler.dispatch.baselines import LeastLoaded
from scheduler.dispatch.dispatch_objective import Streamed
from scheduler.dispatch.partition import (
    SCENARIOS,
    Plan,
    PromptGroups,
    _Clock,
    _orders_of_start,
    _surely_cheaper,
    _Timed,
    plan,
)
from scheduler.dispatch.partition_candidates import blocks, even, greedy, packed, together
from scheduler.dispatch.planned import SkewAware
from scheduler.dispatch.policy import Request
from scheduler.simulation.generation_simulator import SimulatedInstance, SimulatedRequest, simulate

sys.path.append(str(Path(__file__).parents[2] / "experiments"))
from best_partition import best_partition

STEEP = StepCurve((1, 8, 64), (10e-3, 20e-3, 90e-3))


def workers(count: int, slots: int = 256, curve: StepCurve = PAPER_7B_H800) -> list[Worker]:
    return [Worker(curve, slots)] * count


def long_tailed(count: int, seed: int) -> np.ndarray:
    lengths = np.random.default_rng(seed).lognormal(7.0, 0.9, count)
    return np.sort(np.minimum(lengths, 20_000).round())[::-1]


def best_of_all(lengths: np.ndarray, machines: list[Worker]) -> float:
    """Every way to place every request."""
    return min(
        max(
            replica_time([x for x, seat in zip(lengths, seats, strict=True) if seat == n], worker.curve)
            for n, worker in enumerate(machines)
        )
        for seats in itertools.product(range(len(machines)), repeat=len(lengths))
    )


@pytest.mark.parametrize("seed", range(8))
def test_small_plans_are_close_to_the_best_of_all_placements(seed: int) -> None:
    lengths = long_tailed(8, seed)
    machines = [Worker(STEEP, 64), Worker(STEEP.scaled(1.4), 64)]
    assert plan(lengths[:, None], machines).makespan <= 1.03 * best_of_all(lengths, machines)


@pytest.mark.parametrize(("count", "machines", "slots"), [(64, 2, 64), (256, 4, 256), (1024, 16, 256), (40, 3, 40)])
def test_known_lengths_come_within_three_percent_of_the_best_partition(count: int, machines: int, slots: int) -> None:
    for seed in range(4 if count < 1000 else 1):
        lengths = long_tailed(count, seed)
        fleet = workers(machines, slots)
        assert plan(lengths[:, None], fleet).makespan <= 1.03 * best_partition(lengths, fleet).makespan


@pytest.mark.parametrize("spread", [0.0, 0.4, 1.0])
def test_every_request_is_planned_once_and_dealing_evenly_is_never_beaten_by_it(spread: float) -> None:
    lengths = long_tailed(300, 3)
    scores = np.linspace(-1.5, 1.5, 16)
    values = lengths[:, None] * np.exp(spread * scores) if spread else lengths[:, None]
    values = values[np.argsort(-values.mean(axis=1))]
    fleet = [*workers(3), *[Worker(PAPER_7B_H800.scaled(1.7), 64)] * 3]
    chosen = plan(values, fleet, limit=20_000)
    assert sorted(itertools.chain(*chosen.queues)) == list(range(300))
    assert all(list(queue) == sorted(queue) for queue in chosen.queues), "longest first"
    evenly = [replica_time(lengths[queue], w.curve) for queue, w in zip(even(300, [64] * 6), fleet, strict=True)]
    if not spread:
        assert chosen.makespan <= max(evenly)


def test_candidates_hold_every_request_once() -> None:
    lengths = long_tailed(200, 5)
    fleet = [*workers(3), *workers(2, curve=STEEP)]
    candidates = [even(200, [64] * 5), greedy(lengths, fleet), packed(lengths, fleet)]
    candidates.append(blocks(lengths[:, None], fleet)[0])
    for queues in candidates:
        assert queues is not None
        assert sorted(itertools.chain(*queues)) == list(range(200))


def test_noise_that_no_prompt_tells_is_not_isolated() -> None:
    scores = np.linspace(-2, 2, 16)
    values = np.tile(400 * np.exp(0.8 * scores), (256, 1))
    chosen = plan(values, workers(8))
    assert {len(queue) for queue in chosen.queues} == {32}


def test_expected_time_of_alike_uncertain_requests_is_that_of_drawing_them() -> None:
    scores = np.linspace(-1.9, 1.9, 16)
    each = 400 * np.exp(0.6 * scores)
    rng = np.random.default_rng(0)
    for count in (1, 3, 40):
        drawn = np.mean([replica_time(rng.choice(each, count), STEEP) for _ in range(1500)])
        assert expected_time(np.tile(each, (count, 1)), STEEP, 64) == pytest.approx(drawn, rel=0.06)


def test_one_worker_gets_everything_and_none_is_an_error() -> None:
    chosen = plan(long_tailed(5, 0)[:, None], workers(1))
    assert chosen.queues == ((0, 1, 2, 3, 4),)
    assert plan(np.zeros((0, 1)), workers(2)).makespan == 0.0
    with pytest.raises(ValueError, match="list of instances is empty"):
        plan(long_tailed(5, 0)[:, None], [])


@pytest.mark.parametrize("count", [1, 7, 40, 99, 104])
def test_dealing_evenly_keeps_slots_level_as_least_loaded_does(count: int) -> None:
    slots = [32, 4, 16, 52]
    policy = LeastLoaded()
    for seat, most in enumerate(slots):
        policy.join(str(seat), most)
    policy.submit([Request(str(n), str(n)) for n in range(count)])
    policy.decide()
    assert sorted(map(len, even(count, slots))) == sorted(len(i.running) for i in policy.instances.values())


def test_dealing_more_than_the_slots_is_in_proportion_to_them() -> None:
    assert [len(queue) for queue in even(3 * 104, [32, 4, 16, 52])] == [96, 12, 48, 156]
    assert even(5, [1, 1]) == [[0, 3, 4], [1, 2]]
    # one each, b's second slot, then one for a to two for b
    assert even(6, [1, 2]) == [[0, 4], [1, 2, 3, 5]]


@pytest.mark.parametrize("slots", [(150, 8, 60), (100, 8, 30)], ids=["enough slots", "too few"])
@pytest.mark.parametrize("known", [True, False], ids=["known", "forecasts"])
def test_unequal_slots_are_never_predicted_worse_than_dealing_evenly(slots: tuple[int, ...], known: bool) -> None:
    lengths = long_tailed(200, 1)
    fleet = [Worker(PAPER_7B_H800.scaled(1 + n), most) for n, most in enumerate(slots)]
    values = lengths[:, None] * (np.ones(1) if known else np.exp(0.4 * np.linspace(-1.9, 1.9, 16)))
    evenly = even(200, slots)
    spans = []
    for drawn in scenarios(values, 1 if known else SCENARIOS, seed=0):
        parts = [np.sort(drawn[queue])[::-1].tolist() for queue in evenly]
        spans.append(max(replica_time(part, w.curve, slots=w.slots) for part, w in zip(parts, fleet, strict=True)))
    # what exceeds the slots is predicted from the sums where lengths are uncertain, and simulated where they are known
    rounding = 1 + 1e-9 if known or sum(slots) >= 200 else 1.05
    assert plan(values, fleet).makespan <= np.mean(spans) * rounding


def test_plans_are_timed_beside_what_runs_already() -> None:
    lengths, there = long_tailed(40, 2), np.full(20, 3000.0)
    fleet = workers(2, curve=STEEP)
    chosen = plan(lengths[:, None], fleet, running=[there[:, None], np.zeros((0, 1))])
    spans = [
        replica_time(np.concatenate([lengths[list(queue)], part]), STEEP)
        for queue, part in zip(chosen.queues, (there, there[:0]), strict=True)
    ]
    assert chosen.makespan == pytest.approx(max(spans))
    evenly = even(40, [256, 256], [20, 0])
    assert [len(queue) for queue in evenly] == [10, 30], "as least-loaded: both end with 30"
    level = max(
        replica_time(np.concatenate([lengths[evenly[0]], there]), STEEP), replica_time(lengths[evenly[1]], STEEP)
    )
    alone = plan(lengths[:, None], fleet)
    blind = max(
        replica_time(np.concatenate([lengths[list(queue)], part]), STEEP)
        for queue, part in zip(alone.queues, (there, there[:0]), strict=True)
    )
    assert chosen.makespan <= level and chosen.makespan < blind


def test_waiting_requests_are_timed_as_slots_fall_free() -> None:
    lengths = long_tailed(40, 4)
    alone = plan(lengths[:, None], workers(1, slots=8))
    assert alone.makespan == pytest.approx(replica_time(lengths, PAPER_7B_H800, slots=8))


@pytest.mark.parametrize("seed", range(3))
def test_the_predicted_time_of_a_plan_with_waiting_requests_is_the_simulated_one(seed: int) -> None:
    lengths = long_tailed(300, seed)
    fleet = [SimulatedInstance(f"i{n}", PAPER_7B_H800, 24) for n in range(4)]
    policy = SkewAware(migrate=False)
    requests = [SimulatedRequest(str(n), x, str(n), forecast=Forecast.exactly(x)) for n, x in enumerate(lengths)]
    measured = simulate(policy, requests, fleet).makespan
    assert policy.plan is not None
    assert policy.plan.makespan == pytest.approx(measured, rel=0.04)


def test_a_plan_must_be_cheaper_than_even_dealing_beyond_doubt() -> None:
    """The same forecasts on all: whatever looks cheaper does so by the luck of the draws."""
    values = np.tile(400 * np.exp(1.0 * np.linspace(-1.9, 1.9, 16)), (60, 1))
    assert {plan(values, workers(3), seed=seed).kind for seed in range(20)} <= {"even", "greedy"}


def test_of_two_stretches_the_first_holds_the_tail() -> None:
    lengths = np.concatenate([np.full(4, 9000.0), np.full(200, 300.0)])
    spread = lengths[:, None] * np.exp(0.05 * np.linspace(-1.9, 1.9, 16))
    chosen = plan(spread, workers(3, curve=STEEP))
    assert chosen.kind == "blocks" and len(chosen.stretches) > 1
    assert chosen.tail == frozenset(chosen.stretches[0])
    assert set(range(4)) <= {n for seat in chosen.tail for n in chosen.queues[seat]}


def test_siblings_come_together_where_their_prompts_cost_time() -> None:
    groups = [f"g{n // 4}" for n in range(48)]
    values = np.repeat(np.linspace(400, 100, 12), 4)[:, None]
    prompts = PromptGroups(groups, [200] * 48)

    def apart(curve: StepCurve) -> int:
        chosen = plan(values, workers(3, slots=16, curve=curve), prompts=prompts)
        assert sorted(itertools.chain(*chosen.queues)) == list(range(48))
        assert {len(queue) for queue in chosen.queues} == {16}
        return sum(len({groups[n] for n in queue}) for queue in chosen.queues) - 12

    flat = (1, 16), (10e-3, 10.1e-3)
    assert apart(StepCurve(*flat)) > 0
    assert apart(StepCurve(*flat, per_prefill_token=1e-3)) == 0


def test_bringing_siblings_together_keeps_every_request_and_all_sizes() -> None:
    rng = np.random.default_rng(0)
    groups = [f"g{n}" for n in rng.integers(0, 9, 60)]
    queues = [list(range(0, 60, 3)), list(range(1, 60, 3)), list(range(2, 60, 3))]
    dealt = together(queues, [[0, 1], [2]], groups, np.linspace(90, 10, 60), range(60))
    assert dealt[2] == queues[2]
    assert sorted(dealt[0] + dealt[1]) == sorted(queues[0] + queues[1])
    assert [len(queue) for queue in dealt] == [20, 20, 20]
    assert all(queue == sorted(queue) for queue in dealt)


def test_where_anyone_may_run_to_the_limit_the_longest_do_not_start_first() -> None:
    """Each is short or runs to 512, the more often the longer it is expected to be; there are slots for a quarter."""
    rng = np.random.default_rng(0)
    away = np.sort(rng.integers(2, 6, 256))[::-1]
    values = np.asarray([[20.0] * (16 - count) + [512.0] * count for count in away])
    chosen = plan(values, workers(2, slots=32), limit=512, arrivals=rng.permutation(256).tolist())
    assert chosen.ranks != tuple(range(256))
    assert sorted(chosen.ranks) == list(range(256))
    known = np.sort(rng.lognormal(5, 1, 256))[::-1, None]
    assert plan(known, workers(2, slots=32), arrivals=range(256)).ranks == tuple(range(256))


def test_orders_of_start_are_both_by_length_or_that_of_the_smallest_groups() -> None:
    means, groups = np.asarray([9.0, 5.0, 4.0, 1.0]), ["a", "b", "b", "a"]

    def orders(free: int, of: list[str] | None) -> list[list[int]]:
        return [list(order) for order in _orders_of_start(means, free, of)]

    assert orders(4, None) == orders(4, groups) == [[0, 1, 2, 3]]
    assert orders(3, None) == [[0, 1, 2, 3], [3, 2, 1, 0]]
    assert orders(3, groups) == [[1, 2, 0, 3]]


def test_scenarios_of_waiting_requests_are_timed_as_each_of_them_alone() -> None:
    drawn = np.stack([long_tailed(120, seed)[np.random.default_rng(seed).permutation(120)] for seed in range(2)])
    machines = [*workers(2, slots=16), *workers(1, slots=8, curve=STEEP)]
    at_once, waiting = [list(range(0, 16)), list(range(16, 32)), list(range(32, 40))], list(range(40, 120))

    def steps(some: np.ndarray) -> list[np.ndarray]:
        return _Timed(some, machines, [range(0)] * 3)._steps(machines, at_once, waiting)[0]

    together = steps(drawn)
    for number, lengths in enumerate(drawn):
        for mine, alone in zip(together, steps(lengths[None]), strict=True):
            assert mine[number] == pytest.approx(alone[0])
    assert sum(one.sum() for one in together) == pytest.approx(drawn.sum())


def test_a_plan_is_timed_with_the_context_that_requests_begin_with() -> None:
    curve = StepCurve((1, 8), (10e-3, 20e-3), per_context_token=1e-6)
    lengths, begun = np.asarray([400.0, 300.0, 200.0]), np.asarray([5000.0, 0.0, 100.0])
    fleet = [Worker(curve, 8)]
    expected = replica_time(lengths, curve, begun)
    assert plan(lengths[:, None], fleet, contexts=begun).makespan == pytest.approx(expected)
    # as one of them runs already
    running = [lengths[2:, None]]
    assert plan(lengths[:2, None], fleet, running=running, contexts=begun).makespan == pytest.approx(expected)
    assert replica_time(lengths, curve) < expected


def flat(slots: int, **rates: float) -> Worker:
    """Steps of a second, whatever the batch."""
    return Worker(StepCurve((1, 64), (1.0, 1.0), **rates), slots)


def test_what_finds_no_free_slot_beside_running_requests_waits_for_one() -> None:
    # two slots, one of them for 4 more steps; twice 3 steps in the other
    beside = plan(np.asarray([[3.0], [3.0]]), [flat(2)], running=[np.asarray([[4.0]])])
    assert beside.makespan == 6.0
    assert plan(np.asarray([[2.0]]), [flat(1)], running=[np.asarray([[3.0]])]).makespan == 5.0


def test_contexts_of_waiting_requests_are_read_in_equal_parts_by_those_that_share_them() -> None:
    reads = flat(1, per_context_token=0.5)
    # 4 + 2 steps; half of 4^2 / 2 + 2^2 / 2
    assert plan(np.asarray([[4.0], [2.0]]), [reads]).makespan == 11.0
    # 4 steps each and 2 on one of them; half of 4^2 / 2 each, and a quarter of 2^2 / 2
    timed = _Timed(np.asarray([[4.0, 4.0, 2.0]]), [reads, reads], [range(0)] * 2)
    assert timed("even", [[0, 2], [1]], [[0, 1]]).makespan == 6.0 + 4.0 + 0.5


def test_a_prompt_is_prefilled_once_for_the_siblings_on_an_instance() -> None:
    prompts = PromptGroups(["a", "a", "b"], [10, 10, 4])
    chosen = plan(np.full((3, 1), 3.0), [flat(4, per_prefill_token=0.5)], prompts=prompts)
    assert chosen.makespan == 3.0 + 0.5 * 14


def test_tokens_that_siblings_have_already_are_prefilled_for_each_of_them() -> None:
    prompts = PromptGroups(["a", "a", "b"], [10, 10, 4], [0, 90, 6])
    chosen = plan(np.full((3, 1), 3.0), [flat(4, per_prefill_token=0.5)], prompts=prompts)
    assert chosen.makespan == 3.0 + 0.5 * (14 + 96)


def test_what_a_streamed_plan_waits_for_is_slowed_by_the_prompts_that_are_read() -> None:
    prompts = PromptGroups(["a", "b"], [10, 4])
    lengths = np.asarray([[3.0], [1.0]])
    # 3 steps and 7 s of prefill: 10 s; b ends after a third of them; then 13 tokens of a, or 18 of both, are trained
    chosen = plan(lengths, [flat(4, per_prefill_token=0.5)], prompts=prompts, objective=Streamed(1.0))
    assert (chosen.makespan, chosen.cost) == (10.0, pytest.approx(10 + 13))
    # with 4 tokens more of a to read and to train
    prompts = PromptGroups(["a", "b"], [6, 4], [8, 0])
    chosen = plan(lengths, [flat(4, per_prefill_token=0.5)], prompts=prompts, objective=Streamed(1.0))
    assert (chosen.makespan, chosen.cost) == (12.0, pytest.approx(12 + 17))


def test_the_clock_of_an_instance_by_hand() -> None:
    curve = StepCurve((1, 2), (1.0, 2.0))
    clock = _Clock.of(np.asarray([[4.0, 2.0], [1.0, 1.0]]), curve, np.asarray([1.5, 2.0]))
    # two steps of both at 2 s and two of one at 1 s, all half as slow again; one step of both, twice as slow
    assert clock.steps.tolist() == [[0.0, 2.0, 4.0], [0.0, 1.0, 1.0]]
    assert clock.at.tolist() == [[0.0, 6.0, 9.0], [0.0, 4.0, 4.0]]
    asked = np.asarray([[0.0, 1.0, 2.0, 3.0, 4.0, 9.0], [0.0, 0.5, 1.0, 1.0, 7.0, 0.25]])
    assert clock.seconds(asked).tolist() == [[0.0, 3.0, 6.0, 7.5, 9.0, 9.0], [0.0, 2.0, 4.0, 4.0, 4.0, 1.0]]


@pytest.mark.parametrize(
    ("gains", "surely"),
    [
        ([1.0, 3.0], False),  # 2 is twice its standard error, and has to be more
        ([1.0, 3.1], False),
        ([1.0, 2.9], True),
        ([0.4, 3.0, 0.4, 3.0], True),  # 1.7 against twice 1.50 / sqrt(4); without the n - 1: no other answer
        ([1e-10], False),  # a rounding of the cost
        ([1e-7], True),
    ],
)
def test_a_plan_is_surely_cheaper_by_more_than_two_standard_errors(gains: list[float], surely: bool) -> None:
    def costing(costs: np.ndarray) -> Plan:
        return Plan("even", ((),), ((0,),), (), costs, costs)

    assert _surely_cheaper(costing(5.0 - np.asarray(gains)), costing(np.full(len(gains), 5.0))) is surely


def test_the_best_partition_by_hand() -> None:
    linear = [Worker(StepCurve((1, 64), (factor, 64 * factor)), 64) for factor in (1.0, 1.0, 3.0)]
    cut = best_partition([2.0, 6.0, 2.0, 2.0], linear[:2])
    assert (cut.kind, cut.queues, cut.makespan) == ("partition", ((0,), (1, 2, 3)), 6.0)
    dealt = best_partition([5.0, 4.0, 3.0, 3.0], linear[:2])  # there and back; stretches: 9 and 6
    assert (dealt.kind, dealt.queues, dealt.makespan) == ("even", ((0, 3), (1, 2)), 8.0)
    kinds = best_partition([9.0, 3.0, 3.0], linear[1:])
    assert (kinds.kind, kinds.queues, kinds.makespan) == ("partition", ((0, 1), (2,)), 12.0)
