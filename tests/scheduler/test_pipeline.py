"""The pipeline simulator: times computed by hand, every sample trained once, staleness within its bound."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from scheduler.cost.decode import StepCurve
from scheduler.dispatch.baselines import LeastLoaded
from scheduler.dispatch.registry import make_policy
from scheduler.schedule.rounds import PartialRollouts, Rounds, TailBatching
from scheduler.schedule.schedules import make_schedule
from scheduler.simulation.generation_simulator import SimulatedInstance, SimulatedRequest, Simulation
from scheduler.simulation.pipeline import Pipeline
from scheduler.simulation.stages import PipelineOutcome, SimulatedLink, Stages

UNIT = StepCurve((1, 64), (1.0, 1.0))
"""A second per token, whatever the batch."""
STAGES = Stages(
    train_tokens_s=2.0, optimizer_s=1.0, reward_s=3.0, weights_gb=1.0, link=SimulatedLink(8.0, 1.0), switch_s=1.5
)
"""Half a second per token; a transfer takes 1 + 1 s, and a change of turn on shared devices 1.5 s."""


def groups(lengths: list[list[float]]) -> list[list[SimulatedRequest]]:
    return [
        [SimulatedRequest(f"{g}.{n}", length, str(g)) for n, length in enumerate(row)] for g, row in enumerate(lengths)
    ]


def pipeline(
    schedule: str,
    batch: int,
    staleness: int | None = None,
    slots: int = 64,
    rounds: Rounds | None = None,
    sync_every: int = 1,
) -> Pipeline:
    fleet = [SimulatedInstance("a", UNIT, slots)]
    return Pipeline(LeastLoaded(), fleet, STAGES, make_schedule(schedule, staleness, sync_every), batch, rounds)


def test_sync_is_the_sum_of_its_stages() -> None:
    outcome = pipeline("sync", 2).run(groups([[4, 6], [10, 2], [8, 8], [2, 2]]), 2)
    # generation 10, reward 3, 22 tokens 11, optimizer 1, transfer 2; then 8 + 3 + 10 + 1 + 2
    assert outcome.published == (27.0, 51.0)
    assert outcome.stepped == (25.0, 49.0) and outcome.iteration_times() == [25.0, 24.0]
    assert outcome.busy_until == ((10.0, 12.0), (18.0, 23.0))
    assert outcome.generation_bubble == pytest.approx(1 - 18 / 51)
    assert outcome.training_bubble == pytest.approx(1 - 23 / 51)
    assert outcome.samples == 8 and outcome.tokens == 42
    assert outcome.samples_per_second == pytest.approx(8 / 51)
    assert outcome.cost_per_1k(36.0) == pytest.approx(36 * 51 / 3600 / 8 * 1000)
    assert outcome.staleness == {0: 4} and outcome.left == 0


def test_an_environment_steps_for_as_many_samples_at_once_as_it_has_processes() -> None:
    def stepped(processes: int, schedule: str = "sync") -> PipelineOutcome:
        stages = replace(STAGES, environment_s=4.0, environment_processes=processes)
        fleet = [SimulatedInstance("a", UNIT, 64)]
        return Pipeline(LeastLoaded(), fleet, stages, make_schedule(schedule), 2).run(groups([[2, 4], [6, 20]]), 1)

    # one process: 2 to 6, 6 to 10, 10 to 14, and 20 to 24; reward 3, 32 tokens 16, optimizer 1
    assert stepped(1).stepped == (44.0,)
    crowded = replace(STAGES, environment_s=10.0)
    fleet = [SimulatedInstance("a", UNIT, 64)]
    one = Pipeline(LeastLoaded(), fleet, crowded, make_schedule("sync"), 2).run(groups([[2, 4], [6, 20]]), 1)
    assert one.stepped == (42.0 + 3 + 16 + 1,)  # from 2 on it always steps
    assert stepped(4, "colocated").stepped == (24.0 + 3 + 1.5 + 16 + 1,)
    with pytest.raises(ValueError, match="one process or more"):
        replace(STAGES, environment_processes=0)
    with pytest.raises(ValueError, match="rounds of episodes in environments"):
        Pipeline(LeastLoaded(), fleet, crowded, make_schedule("sync"), 2, TailBatching(2, 2))


def test_stream_trains_while_the_rest_is_generated() -> None:
    outcome = pipeline("stream", 2).run(groups([[4, 6], [10, 2], [8, 8], [2, 2]]), 2)
    # the first group is complete at 9 and trained by 14, the second, complete at 13, by 20; optimizer, transfer: 23.
    # then [2, 2] at 23 + 5 .. 30, [8, 8] at 34 .. 42, + 3
    assert outcome.published == (23.0, 45.0)
    assert outcome.trained == (("0", "1"), ("3", "2"))
    assert outcome.staleness == {0: 4}


def test_colocated_takes_turns_and_needs_no_link() -> None:
    outcome = pipeline("colocated", 2).run(groups([[4, 6], [10, 2], [8, 8], [2, 2]]), 2)
    # generation 10, reward 3, turn 1.5, 22 tokens 11, optimizer 1, turn 1.5; then 8 + 3 + 1.5 + 10 + 1 + 1.5
    assert outcome.stepped == (26.5, 51.5) and outcome.published == (28.0, 53.0)
    assert outcome.staleness == {0: 4}


def test_colocated_trains_all_mini_batches_in_one_turn() -> None:
    outcome = pipeline("colocated", 1, sync_every=2).run(groups([[10.0], [4.0], [6.0]]), 3)
    # 10 + 3 + 1.5, then the groups as they came: 2 + 1, 5 + 1, turn; then 6 + 3 + 1.5 + 3 + 1 + 1.5
    assert outcome.stepped == (17.5, 23.5, 39.5) and outcome.published == (25.0, 41.0)
    assert outcome.trained == (("1",), ("0",), ("2",))


@pytest.mark.parametrize("sync_every", [1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_colocated_never_computes_both_at_once(seed: int, sync_every: int) -> None:
    rng = random.Random(seed)
    batch, steps = rng.randint(1, 4), rng.randint(2, 7)
    lengths = [[float(rng.choice([1, 5, 40])) for _ in range(2)] for _ in range(batch * steps)]
    run = pipeline("colocated", batch, slots=3, sync_every=sync_every)
    outcome = run.run(groups(lengths), steps)
    turns = 2 * STAGES.switch_s * len(outcome.published)
    # every publication also waits for the last reward, 3 s after nothing generates any more
    waits = STAGES.reward_s * len(outcome.published)
    assert outcome.generation_busy + outcome.training_busy + turns + waits == pytest.approx(outcome.total)


@pytest.mark.parametrize(
    ("schedule", "stepped", "published"),
    [("sync", (16.0, 22.0, 37.0), (24.0, 39.0)), ("stream", (10.0, 19.0, 34.0), (21.0, 36.0))],
)
def test_weights_that_are_sent_every_other_step(
    schedule: str, stepped: tuple[float, ...], published: tuple[float, ...]
) -> None:
    outcome = pipeline(schedule, 1, sync_every=2).run(groups([[10.0], [4.0], [6.0]]), 3)
    # complete at 13 and 7; the shorter is trained first, for 2 + 1, the other for 5 + 1, then transfer;
    # the last takes 6 + 3 + 3 + 1, and its weights are sent although the step is odd
    assert outcome.stepped == stepped and outcome.published == published
    assert outcome.staleness == {0: 2, 1: 1}


def test_one_step_off_generates_the_next_batch_while_it_trains() -> None:
    outcome = pipeline("one_step_off", 1).run(groups([[10.0], [20.0], [10.0], [2.0]]), 4)
    # batch 0: 0 .. 10, trained 13 .. 19, published 21; batch 1: 10 .. 30, trained 33 .. 44, published 46
    # batch 2 needs batch 1 generated (30) and version 1 (21): 30 .. 40, trained 44 .. 50, published 52
    # batch 3 needs version 2 (46): 46 .. 48, trained 51 .. 53, published 55
    assert outcome.published == (21.0, 46.0, 52.0, 55.0)
    assert outcome.staleness == {0: 1, 1: 3}


def test_async_overlaps_everything_up_to_its_bound() -> None:
    outcome = pipeline("async", 1, 2, slots=1).run(groups([[10.0]] * 5), 5)
    # one slot: ends at 10, 20, ..; each is trained 3 s later for 6 s, and its weights arrive 2 s after that
    assert outcome.published == (21.0, 31.0, 41.0, 51.0, 61.0)
    # issued: three at version 0, then one with each version that arrives
    assert outcome.staleness == {0: 1, 1: 1, 2: 3}
    assert outcome.generation_busy == 50.0


def test_a_slow_link_sends_one_version_after_the_other_while_training_goes_on() -> None:
    slow = Stages(train_tokens_s=10.0, weights_gb=10.0, link=SimulatedLink(8.0))
    fleet = [SimulatedInstance("a", UNIT, 8)]
    outcome = Pipeline(LeastLoaded(), fleet, slow, make_schedule("async", 3), 1).run(groups([[10.0]] * 3), 3)
    assert outcome.published == (21.0, 31.0, 41.0)
    assert outcome.training_busy == 3.0


def test_a_step_ends_no_sooner_than_its_last_sample_on_one_rank() -> None:
    # 1.5 tokens a second in all, on 3 ranks: of each step's 15 tokens the last 10 take one rank 20 s
    stages, fleet = Stages(1.5, 1.0, train_ranks=3), [SimulatedInstance("a", UNIT, 8)]
    one = Pipeline(LeastLoaded(), fleet, stages, make_schedule("stream"), 2).run(groups([[5.0], [10.0]]), 1)
    assert one.stepped == (10.0 + 20.0 + 1.0,)
    # a group is on as many ranks as it has samples
    alike = Pipeline(LeastLoaded(), fleet, stages, make_schedule("stream"), 1).run(groups([[9.0, 9.0, 9.0]]), 1)
    assert alike.stepped == (9.0 + 18.0 + 1.0,)
    with pytest.raises(ValueError, match="one rank or more"):
        Stages(1.0, train_ranks=0.5)


def test_passes_after_the_first_follow_the_last_group() -> None:
    fleet = [SimulatedInstance("a", UNIT, 8)]

    def stepped(share: float, schedule: str = "stream", ranks: float = 1.0) -> float:
        stages = Stages(1.0, 1.0, train_ranks=ranks, after_batch=share)
        run = Pipeline(LeastLoaded(), fleet, stages, make_schedule(schedule), 2).run(groups([[4.0], [10.0]] * 2), 2)
        assert run.training_busy == 2 * (14.0 + 1.0)
        first, second = run.iteration_times()
        assert first == second
        return first

    assert stepped(0.0) == 10.0 + 10.0 + 1.0  # the first group is trained from 4 to 8 s
    assert stepped(0.5) == 10.0 + 5.0 + 7.0 + 1.0  # from 4 to 6 s; what is left of both follows the last one
    assert stepped(1.0) == 10.0 + 14.0 + 1.0
    assert stepped(0.5, "sync") == stepped(0.0, "sync") == 10.0 + 14.0 + 1.0
    # a pass over both takes two ranks as long as the longer one takes one of them
    assert stepped(0.5, ranks=2.0) == 10.0 + 10.0 + 10.0 + 1.0
    with pytest.raises(ValueError, match="within 0 and 1"):
        Stages(1.0, after_batch=1.5)


def test_instances_pause_to_load_weights() -> None:
    stages = Stages(1e9, load_s=4.0)
    run = Pipeline(LeastLoaded(), [SimulatedInstance("a", UNIT, 8)], stages, make_schedule("async", 1), 1)
    outcome = run.run(groups([[5.0], [20.0], [30.0]]), 2)
    # both begin at 0; the version of the first (5 s) stops the second until 9 s, so that it ends at 24 s
    assert outcome.stepped == pytest.approx((5.0, 24.0))


@pytest.mark.parametrize(("train_rate", "ends"), [(1e9, (5.0, 29.0)), (2.0, (7.5, 41.5))])
def test_an_idle_instance_loads_weights_before_it_begins(train_rate: float, ends: tuple[float, float]) -> None:
    stages = Stages(train_rate, load_s=4.0)
    run = Pipeline(LeastLoaded(), [SimulatedInstance("a", UNIT, 8)], stages, make_schedule("sync"), 1)
    # the second group, of 20 s, is issued as the weights arrive, and begins when they are loaded
    assert run.run(groups([[5.0], [20.0]]), 2).stepped == pytest.approx(ends)


def test_a_pause_passes_while_an_instance_is_idle() -> None:
    simulation = Simulation(LeastLoaded(), [SimulatedInstance("a", UNIT, 8)])
    simulation.pause(4.0, 1.0)
    simulation.submit(groups([[5.0]])[0], 3.0)
    assert simulation.finish_next()[0] == pytest.approx(10.0)
    simulation.pause(4.0, 10.0)
    simulation.submit([SimulatedRequest("late", 5.0)], 20.0)
    assert simulation.finish_next()[0] == pytest.approx(25.0)
    assert simulation.engines["a"].busy == pytest.approx(2.0 + 5.0 + 5.0), "idle while nothing is there to do"


def random_run(
    seed: int, schedule: str, bound: int | None, policy: str, sync_every: int = 1
) -> tuple[PipelineOutcome, int, int]:
    rng = random.Random(seed)
    batch, steps = rng.randint(1, 6), rng.randint(2, 12)
    lengths = [[float(rng.choice([1, 5, 30, 400])) for _ in range(rng.randint(1, 4))] for _ in range(batch * steps)]
    fleet = [SimulatedInstance(f"i{n}", UNIT.scaled(rng.uniform(0.1, 1)), rng.randint(1, 6)) for n in range(3)]
    stages = Stages(
        rng.uniform(1, 200), rng.random(), rng.uniform(0, 20), rng.random(), SimulatedLink(rng.uniform(0.05, 9))
    )
    run = Pipeline(make_policy(policy), fleet, stages, make_schedule(schedule, bound, sync_every), batch)
    return run.run(groups(lengths), steps), batch, steps


@pytest.mark.parametrize("policy", ["least-loaded", "skew-aware", "group-probe"])
@pytest.mark.parametrize(
    ("schedule", "bound", "sync_every"),
    [
        ("colocated", 0, 1),
        ("colocated", 1, 2),
        ("sync", 0, 1),
        ("sync", 2, 3),
        ("stream", 0, 1),
        ("stream", 1, 2),
        ("one_step_off", 1, 1),
        ("async", 1, 1),
        ("async", 1, 2),
        ("async", 3, 2),
        ("async", 5, 1),
    ],
)
def test_every_group_is_trained_once_and_never_staler_than_the_bound(
    schedule: str, bound: int, sync_every: int, policy: str
) -> None:
    worst = 0
    for seed in range(10 if policy == "least-loaded" else 3):  # a policy says when groups end, and nothing of steps
        outcome, batch, steps = random_run(seed, schedule, bound, policy, sync_every)
        assert all(len(step) == batch for step in outcome.trained)
        assert sorted(map(int, itertools.chain(*outcome.trained))) == list(range(batch * steps))
        assert max(outcome.staleness) <= bound and outcome.left == 0
        assert list(outcome.published) == sorted(outcome.published)
        assert len(outcome.published) == -(-steps // sync_every) and len(outcome.stepped) == steps
        worst = max(worst, *outcome.staleness)
    assert worst == bound, "the bound is used"


def test_overlap_never_takes_longer_than_less_of_it() -> None:
    for seed in range(10):
        sync, stream, overlapped = (
            random_run(seed, name, bound, "least-loaded")[0].total
            for name, bound in (("sync", 0), ("stream", 0), ("async", 4))
        )
        assert overlapped <= stream * 1.001 and stream <= sync * 1.001


def test_a_tail_round_takes_what_the_rounds_before_put_off() -> None:
    lengths = [[2.0], [2.0], [50.0], [2.0], [2.0], [60.0], [2.0], [2.0], [2.0]]
    outcome = pipeline("sync", 2, rounds=TailBatching(2, 1.5)).run(groups(lengths), 4)
    assert outcome.trained == (("0", "1"), ("3", "4"), ("2", "5"), ("6", "7"))
    # 2 + 3 + 2 + 1 + 2 = 10 each, and the long ones get on until the round is over, at 5; the tail round goes on from
    # there: 55 + 3 + 55 + 1 + 2; then 10 again
    assert outcome.published == (10.0, 20.0, 136.0, 146.0)
    assert outcome.staleness == {0: 6, 1: 1, 2: 1}
    assert outcome.deferred == 3 and outcome.left == 1
    assert outcome.generation_busy == 5 + 5 + 55 + 2


def test_partial_rollouts_park_what_has_used_up_its_round() -> None:
    outcome = pipeline("sync", 2, rounds=PartialRollouts(2, 5)).run(groups([[3.0], [12.0], [4.0], [2.0]]), 2)
    # round 1: the first ends at 3, the second is parked at 5; reward at 6: too few, so round 2 begins at once. It is
    # parked again at 11, and the round is over when the third has its reward, at 13: 3.5 + 1 + 2. Round 3 begins at
    # 19.5 and ends the second's last 2 tokens, beside the fourth: 2 + 3 + 7 + 1 + 2
    assert outcome.published == (19.5, 34.5)
    assert outcome.trained == (("0", "2"), ("1", "3"))
    assert outcome.staleness == {0: 3, 1: 1} and outcome.deferred == 2 and outcome.left == 0
    assert outcome.generation_busy == 5 + 5 + 2


def partial(max_age: int | None) -> Rounds:
    return PartialRollouts(6, 60, 1.4, max_age)


def tail_batching(max_age: int | None) -> Rounds:
    return TailBatching(6, 1.4, max_age)


@pytest.mark.parametrize("schedule", ["colocated", "sync", "stream"])
@pytest.mark.parametrize("policy", ["least-loaded", "round-robin", "skew-aware", "group-probe"])
@pytest.mark.parametrize("kind", [tail_batching, partial])
def test_rounds_train_every_group_once_or_still_have_it(
    kind: Callable[[int | None], Rounds], policy: str, schedule: str
) -> None:
    # a policy says when samples end, and nothing of ages: the one that plans anew at every end tries two bounds
    for max_age in (None, 1) if policy == "group-probe" else (None, 0, 1, 2):
        rng = random.Random(3)
        lengths = [[float(rng.choice([1, 5, 30, 400])) for _ in range(3)] for _ in range(100)]
        fleet = [SimulatedInstance(f"i{n}", UNIT, 4) for n in range(2)]
        stages = Stages(50.0, reward_s=7.0, switch_s=1.0)
        run = Pipeline(make_policy(policy), fleet, stages, make_schedule(schedule), 6, kind(max_age))
        outcome = run.run(groups(lengths), 8)
        trained = Counter(itertools.chain(*outcome.trained))
        assert all(len(step) == 6 for step in outcome.trained) and max(trained.values()) == 1
        issued = {str(n) for n in range(len(trained) + outcome.left)}
        assert set(trained) <= issued and (outcome.deferred > 0 or max_age == 0)
        if max_age is None:
            assert max(outcome.staleness) > 2, "nothing bounds the age"
            # what is left is less than two rounds can put off
            assert outcome.left < 2 * 9
        else:
            assert max(outcome.staleness) == max_age


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ValueError, match="rate above 0"):
        Stages(0.0)
    with pytest.raises(ValueError, match="bandwidth above 0"):
        Stages(1.0, link=SimulatedLink(0.0))
    with pytest.raises(ValueError, match="must not be negative"):
        Stages(1.0, reward_s=-1.0)
    with pytest.raises(ValueError, match="at least one group"):
        pipeline("sync", 0)
    with pytest.raises(ValueError, match="rounds go with colocated, sync or stream"):
        pipeline("async", 2, rounds=TailBatching(2))
    with pytest.raises(ValueError, match="sync, every 2, 1 and 1 groups"):
        pipeline("sync", 1, rounds=TailBatching(1), sync_every=2)
    with pytest.raises(ValueError, match="of a group have one id"):
        pipeline("sync", 1).run([[SimulatedRequest("a", 1.0), SimulatedRequest("a", 2.0)]], 1)
    with pytest.raises(RuntimeError, match="step 1 of 1 cannot be trained"):
        pipeline("sync", 2, rounds=PartialRollouts(2, 1)).run(groups([[3.0]]), 1)
    with pytest.raises(ValueError, match="at least one request"):
        pipeline("sync", 1).run([[]], 1)
    with pytest.raises(RuntimeError, match="step 2 of 2 cannot be trained"):
        pipeline("sync", 2).run(groups([[1.0]] * 3), 2)
