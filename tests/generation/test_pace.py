"""How an instance's steps compare with its curve, and how the curve and the plans follow."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.cost.decode import StepCurve
from scheduler.dispatch.baselines import LeastLoaded
from scheduler.dispatch.straggler import STRETCHES
from scheduler.simulation.generation_simulator import SimulatedInstance
from streamrl.config.cluster import GenerationPool
from streamrl.config.run import RunConfig
from streamrl.generation.instance.running_requests import Worked
from streamrl.generation.site.instance_monitor import InstanceWatch
from streamrl.generation.site.instance_weights import InstanceWeights
from streamrl.generation.site.pace import ENOUGH, KEPT, LEAST_TOKENS, Pace, Stretches, WorkedCurve, pace
from streamrl.generation.site.step_curves import CHANGE, FleetCurves, differ
from tests.generation.dispatching import dispatcher

CURVE = StepCurve.measured({1: 0.01, 10: 0.02, 20: 0.03})


def test_steps_as_long_as_the_curve_says_have_pace_1() -> None:
    before = Worked(1000, 50.0, 20.0)
    # 3 s with 10 requests: 150 steps of 20 ms, 10 tokens each
    assert pace(CURVE, before, Worked(2500, 80.0, 23.0)) == pytest.approx(1.0)
    assert pace(CURVE, before, Worked(1750, 80.0, 23.0)) == pytest.approx(2.0)


def test_context_is_part_of_what_the_curve_says() -> None:
    curve = StepCurve(CURVE.batches, CURVE.seconds, per_context_token=1e-5)
    # 150 steps of 10 requests: 20 ms, and 10 ms for a mean of 1,000 tokens of context
    before, now = Worked(0, 0.0, 0.0, context=500), Worked(1500, 45.0, 4.5, context=1500)
    assert pace(curve, before, now) == pytest.approx(1.0)
    assert pace(CURVE, before, now) == pytest.approx(1.5)
    assert pace(curve, Worked(), Worked(1500, 45.0, 4.5, context=1000)) == pytest.approx(1.0)  # nothing ran before


def test_idle_time_does_not_count() -> None:
    assert pace(CURVE, Worked(), Worked(100, 1.0, 1.0)) == pytest.approx(1.0)


def test_too_little_work_says_nothing() -> None:
    assert pace(CURVE, Worked(), Worked(LEAST_TOKENS - 1, 1.0, 1.0)) is None
    assert pace(CURVE, Worked(5, 1.0, 1.0), Worked(5, 1.0, 1.0)) is None


def test_a_slow_instance_is_judged_over_several_heartbeats() -> None:
    stretches = Stretches(CURVE, Worked())
    told = [stretches.heartbeat(Worked(10 * n, 10.0 * n, 1.0 * n, 500), {"g.0"}, updated=False) for n in range(1, 7)]
    assert told[:2] == [None, None]  # too little; prompts were prefilled
    assert stretches.newest == Pace(3, pytest.approx(50.0), pytest.approx(10.0), 500.0)
    assert told[3] == Pace(2, pytest.approx(50.0), pytest.approx(10.0), 500.0) and told[2] is told[4] is None


def test_a_prompt_that_was_prefilled_anywhere_in_a_stretch_counts() -> None:
    stretches = Stretches(CURVE, Worked())
    for n, running in enumerate([{"a"}, {"a"}, {"a", "b"}, {"a"}], start=1):
        told = stretches.heartbeat(Worked(8 * n, 1.0 * n, 1.0 * n), running, updated=False)
    assert told is None and stretches.newest is not None and stretches.newest.number == 2


def test_updates_and_idle_time_end_a_stretch() -> None:
    for running, updated in (({"a"}, True), (set(), False)):
        stretches = Stretches(CURVE, Worked())
        stretches.heartbeat(Worked(10, 1.0, 1.0), {"a"}, updated=False)
        stretches.heartbeat(Worked(11, 9.0, 9.0), running, updated)
        stretches.heartbeat(Worked(21, 10.0, 10.0), {"a"}, updated=False)
        assert stretches.newest is None
        stretches.heartbeat(Worked(31, 11.0, 11.0), {"a"}, updated=False)
        assert stretches.newest == Pace(1, pytest.approx(0.1 / 0.01), 1.0, 0.0)
    last = Stretches(CURVE, Worked())
    last.heartbeat(Worked(20, 1.0, 1.0), set(), updated=False)
    assert last.newest is not None, "what has just ended is judged"


@pytest.mark.parametrize("slow", [False, True])
def test_instances_are_compared_by_what_plans_expect_not_by_what_each_measured_at_its_start(slow: bool) -> None:
    """One of two like instances, 'a', measured its steps as twice too long at its start, or is really that slow."""
    own = {"a": CURVE.scaled(2.0), "b": CURVE}
    seconds = {"a": 0.04 if slow else 0.02, "b": 0.02}
    peers = {name: SimpleNamespace(meta={"curve": curve.to_json()}, state={}) for name, curve in own.items()}
    work, _ = dispatcher(LeastLoaded(), {})
    fleet: Any = SimpleNamespace(ready=["a", "b"], hub=SimpleNamespace(peers=peers), dispatcher=work)
    watch = InstanceWatch(fleet)

    async def body() -> None:
        for name in "ab":
            await work.join(name, 16, CURVE.scaled(1.5), "regular")
        for number in range(1, STRETCHES + 2):
            for name, peer in peers.items():
                peer.state["pace"] = [number, seconds[name] / float(own[name].step(10, 0)), 10.0, 0.0]
            await watch._compare()

    asyncio.run(body())
    assert watch.slow.factors == ({"a": pytest.approx(2.0)} if slow else {})


def test_an_idle_instance_is_not_called_slow_when_plans_change_their_curve() -> None:
    peers = {name: SimpleNamespace(meta={"curve": CURVE.to_json()}, state={}) for name in "ab"}
    planned = {"curve": CURVE}
    slowed: list[str] = []

    async def slow(name: str, factor: float) -> None:
        slowed.append(name)

    work = SimpleNamespace(curve_of=lambda name: planned["curve"], slow=slow)
    watch = InstanceWatch(SimpleNamespace(ready=["a", "b"], hub=SimpleNamespace(peers=peers), dispatcher=work))  # type: ignore[arg-type]

    async def body() -> None:
        for number in range(1, 2 * STRETCHES + 2):
            for name in "ab" if number <= STRETCHES + 1 else "a":
                peers[name].state["pace"] = [number, 2.0, 10.0, 0.0]
            await watch._compare()
            if number == STRETCHES + 1:
                planned["curve"] = CURVE.scaled(2.0)  # from now on 'b' has nothing to do

    asyncio.run(body())
    assert not slowed


def test_the_curve_is_corrected_where_work_was_measured_and_scaled_elsewhere() -> None:
    worked = WorkedCurve(StepCurve.measured({1: 0.01, 16: 0.04}, per_prefill_token=0.001), [1, 2, 4, 8, 16])
    for _ in range(ENOUGH - 1):
        worked.saw(4.2, 0.9)
    assert worked.curve == worked.start  # too little
    for _ in range(ENOUGH + 1):
        worked.saw(3.9, 0.9)
        worked.saw(15.0, 1.1)
        worked.saw(16.0, 1.1)
    assert worked.curve.batches == (1, 2, 4, 8, 16)
    assert float(worked.curve.base(4)) == pytest.approx(0.9 * 0.016)
    assert float(worked.curve.base(16)) == pytest.approx(1.1 * 0.04)
    assert float(worked.curve.base(8)) == pytest.approx(1.1 * 0.024)  # the median of all
    assert worked.curve.per_prefill_token == pytest.approx(1.1 * 0.001)


def test_a_doubtful_start_gives_way_to_the_first_sizes_that_work_has_shown() -> None:
    start = StepCurve.measured({1: 0.1, 4: 0.1, 16: 0.1})
    worked = WorkedCurve(start, [2, 8], doubts="repeats differ")
    assert worked.doubts == "repeats differ"
    for _ in range(ENOUGH - 1):
        worked.saw(4.0, 0.2)
        worked.saw(16.0, 0.5)
    assert worked.doubts and set(worked.curve.batches) == {1, 2, 4, 8, 16}
    worked.saw(4.0, 0.2)
    worked.saw(16.0, 0.5)
    assert worked.doubts == ""
    assert worked.curve.batches == (4, 16) and worked.curve.seconds == pytest.approx((0.02, 0.05))
    assert float(worked.curve.base(8)) == pytest.approx(0.03)  # between both, whatever the start said


def test_old_work_is_forgotten() -> None:
    worked = WorkedCurve(StepCurve.measured({1: 0.01, 16: 0.04}), [])
    for ratio in [3.0] * KEPT + [1.0] * KEPT:
        worked.saw(16.0, ratio)
    assert worked.curve == worked.start


def test_instances_of_one_kind_share_their_mean_correction_and_others_do_not() -> None:
    pools = {name: GenerationPool(name=name, gpu=gpu) for name, gpu in (("a", "cpu"), ("b", "cpu"), ("c", "H100"))}
    curves = FleetCurves(pools)
    for pool in pools:
        curves.measured(pool, CURVE)
    assert curves.simulated("a-0", "a", 4).curve == CURVE
    curves.worked("a-0", "a", CURVE.scaled(2.0))
    curves.worked("b-0", "b", CURVE.scaled(4.0))
    for name, pool in (("a-0", "a"), ("b-1", "b")):
        assert curves.simulated(name, pool, 4).curve.seconds == pytest.approx(CURVE.scaled(3.0).seconds)
    assert curves.simulated("c-0", "c", 4).curve == CURVE
    for name in ("a-1", "b-1", "a-2"):  # what has left no longer counts
        curves.worked(name, name[0], CURVE.scaled(7.0))
        curves.forget(name)
        assert curves.simulated("a-0", "a", 4).curve.seconds == pytest.approx(CURVE.scaled(3.0).seconds)
    curves.worked("a-0", "a", CURVE.scaled(4.0))  # in place of what it has told before
    assert curves.simulated("b-0", "b", 4).curve.seconds == pytest.approx(CURVE.scaled(4.0).seconds)


def test_doubtful_measurements_do_not_count_beside_others_and_disagreement_is_said() -> None:
    pools = {name: GenerationPool(name=name) for name in ("a", "b")}
    curves = FleetCurves(pools)
    curves.measured("a", CURVE.scaled(9.0), doubts="repeats differ")
    assert curves.simulated("a-0", "a", 4).curve == CURVE.scaled(9.0)  # there is no other
    curves.measured("b", CURVE)
    assert curves.simulated("a-0", "a", 4).curve == CURVE and curves.note("a") == ""
    curves.measured("b", CURVE.scaled(2.0))
    assert curves.simulated("a-0", "a", 4).curve.seconds == pytest.approx(CURVE.scaled(1.5).seconds)
    assert "measured 10 to 20 ms for a step of batch 1; plans use the mean" in curves.note("a")
    curves.worked("a-0", "a", CURVE.scaled(9.0), doubtful=True)  # not enough work yet
    assert curves.simulated("a-0", "a", 4).curve.seconds == pytest.approx(CURVE.scaled(1.5).seconds)
    curves.worked("a-0", "a", CURVE)
    assert curves.note("a") == ""


def test_a_kind_is_doubtful_until_another_measurement_or_enough_work() -> None:
    curves = FleetCurves({"a": GenerationPool(name="a")})
    curves.measured("a", CURVE.scaled(9.0), doubts="repeats differ")
    assert curves.simulated("a-0", "a", 4).doubtful
    curves.worked("a-0", "a", CURVE.scaled(8.0), doubtful=True)
    assert curves.simulated("a-0", "a", 4) == SimulatedInstance("a-0", CURVE.scaled(8.0), 4, "a", doubtful=True)
    curves.worked("a-0", "a", CURVE.scaled(8.0))
    assert not curves.simulated("a-0", "a", 4).doubtful


def test_the_end_of_doubts_is_told_even_if_the_step_times_stay() -> None:
    curves = FleetCurves({"a": GenerationPool(name="a")})
    curves.measured("a", CURVE, doubts="repeats differ")
    peer = SimpleNamespace(state={"curve": CURVE.to_json(), "doubtful": True})
    fleet: Any = SimpleNamespace(
        context=SimpleNamespace(run=RunConfig()),
        present=["a-0"],
        lives={"a-0": SimpleNamespace(pool="a")},
        hub=SimpleNamespace(peers={"a-0": peer}),
        dispatcher=SimpleNamespace(knows=lambda name: True, curve_of=lambda name: CURVE),
        curves=curves,
        simulated=lambda name: curves.simulated(name, "a", 4),
    )
    weights = InstanceWeights(fleet, lambda version: asyncio.sleep(0))
    assert not weights._refine()
    peer.state["doubtful"] = False
    assert weights._refine()
    assert not weights._refine()


def test_curves_differ_by_what_context_costs() -> None:
    assert not differ(CURVE, StepCurve(CURVE.batches, CURVE.seconds, per_context_token=1e-8))
    assert differ(CURVE, StepCurve(CURVE.batches, CURVE.seconds, per_context_token=2e-6))


def test_curves_differ_if_any_step_time_does_by_more_than_is_passed_on() -> None:
    assert not differ(CURVE, CURVE.scaled(1 + CHANGE / 2))
    assert differ(CURVE, CURVE.scaled(1 + 2 * CHANGE)) and differ(CURVE.scaled(1 + 2 * CHANGE), CURVE)
    assert differ(CURVE, StepCurve.measured({1: 0.01, 10: 0.025, 20: 0.03}))
    assert not differ(CURVE, StepCurve.measured({1: 0.01, 20: 0.0311}))


def test_plans_go_by_the_newest_curve_also_of_one_that_is_held_or_slow() -> None:
    work, _ = dispatcher(LeastLoaded(), {})

    async def body() -> None:
        await work.join("a", 4, CURVE, "regular")
        await work.slow("a", 2.0)
        work.measured("a", CURVE.scaled(3.0))
        assert work.policy.instances["a"].curve == CURVE.scaled(6.0)  # type: ignore[attr-defined]
        await work.slow("a", 1.0)
        assert work.policy.instances["a"].curve.seconds == pytest.approx(CURVE.scaled(3.0).seconds)  # type: ignore[attr-defined]
        await work.hold("a", requeue=False, why="weights")
        work.measured("a", CURVE)
        await work.unhold("a", "weights")
        assert work.policy.instances["a"].curve == CURVE == work.curve_of("a")  # type: ignore[attr-defined]

    asyncio.run(body())
