"""The simulator: exact against the closed formula, moves keep tokens, wrong input is refused."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.cost.decode import PAPER_7B_H800, StepCurve, replica_ends, replica_time
from scheduler.cost.length_forecast import Forecast
from scheduler.dispatch.baselines import LeastLoaded, RoundRobin
from scheduler.dispatch.planned import SkewAware
from scheduler.dispatch.policy import Assignment, TokenProgress
from scheduler.simulation.generation_simulator import SimulatedInstance, SimulatedRequest, simulate

LENGTHS = np.random.default_rng(0).lognormal(5, 1, 96).round().clip(1)


def requests(lengths: np.ndarray = LENGTHS, prompt: int = 0) -> list[SimulatedRequest]:
    return [
        SimulatedRequest(str(n), float(length), str(n // 8), prompt, forecast=Forecast.exactly(length))
        for n, length in enumerate(lengths)
    ]


def test_instances_that_take_everything_at_once_need_the_formulas_time() -> None:
    curve = StepCurve(PAPER_7B_H800.batches, PAPER_7B_H800.seconds, per_context_token=1e-7)
    outcome = simulate(RoundRobin(), requests(prompt=30), [SimulatedInstance(f"i{n}", curve, 96) for n in range(3)])
    assert outcome.makespan == pytest.approx(max(replica_time(LENGTHS[n::3], curve, 30) for n in range(3)))
    assert outcome.tokens == LENGTHS.sum()
    assert len(outcome.finished) == 96


@pytest.mark.parametrize("slots", [1, 7, 10, 96])
def test_the_fast_path_gives_the_end_of_every_request(slots: int) -> None:
    curve = StepCurve(PAPER_7B_H800.batches, PAPER_7B_H800.seconds, 3e-6, 2e-4)
    prompts = np.random.default_rng(1).integers(1, 400, len(LENGTHS))
    some = [
        SimulatedRequest(f"{n:02}", length, prompt_tokens=int(prompt))
        for n, (length, prompt) in enumerate(zip(LENGTHS.tolist(), prompts, strict=True))
    ]
    outcome = simulate(RoundRobin(), some, [SimulatedInstance("a", curve, slots)])
    ends = replica_ends(LENGTHS, curve, prompts, slots, prefilled=True)
    assert ends.tolist() == pytest.approx([outcome.finished[f"{n:02}"] for n in range(96)], rel=1e-12)
    assert outcome.busy == {"a": pytest.approx(outcome.makespan)}


def test_a_prompt_is_read_once_per_instance_and_group() -> None:
    curve = StepCurve((1,), (1.0,), per_prefill_token=0.5)
    alone = simulate(
        LeastLoaded(), requests(np.ones(8), 10), [SimulatedInstance("a", StepCurve((1, 8), (1.0, 1.0), 0, 0.5), 8)]
    )
    assert alone.makespan == pytest.approx(10 * 0.5 + 1.0)
    apart = simulate(LeastLoaded(), requests(np.ones(2), 10), [SimulatedInstance(n, curve, 8) for n in "ab"])
    assert apart.makespan == pytest.approx(10 * 0.5 + 1.0)


def test_arrivals_wait_for_their_time() -> None:
    late = [SimulatedRequest("a", 10.0), SimulatedRequest("b", 10.0, arrival=100.0)]
    outcome = simulate(LeastLoaded(), late, [SimulatedInstance("i", StepCurve((1,), (1.0,)), 4)])
    assert outcome.finished == {"a": 10.0, "b": 110.0}
    assert outcome.busy == {"i": 20.0}


class MoveOnce(LeastLoaded):
    """Moves the last request over when the first has ended."""

    def decide(self, produced: TokenProgress | None = None) -> list[Assignment]:
        decisions = super().decide(produced)
        if not decisions and "1" in self.where and self.where["1"].name == "a" and "0" not in self.where:
            assert produced is not None and produced("1") == pytest.approx(10)
            decisions.append(self.start(self.where["1"].running["1"], self.instances["b"]))
        return decisions


def test_a_moved_request_keeps_its_tokens_and_pays_for_reading_them() -> None:
    slow = StepCurve((1,), (1.0,), per_prefill_token=0.1)
    policy = MoveOnce()
    instances = [SimulatedInstance("a", StepCurve((1, 2), (1.0, 1.0), 0, 0.0), 2), SimulatedInstance("b", slow, 1)]
    together = [SimulatedRequest("0", 10.0, "g"), SimulatedRequest("x", 5.0, "h"), SimulatedRequest("1", 30.0, "g", 20)]
    outcome = simulate(policy, together, instances)
    # ten tokens on a, 3 s to read in 20 + 10 tokens, twenty tokens on b
    assert outcome.moves == 1
    assert outcome.finished["1"] == pytest.approx(10 + 3 + 20)


@pytest.mark.parametrize("seed", range(4))
def test_ours_on_known_lengths_is_never_worse_than_least_loaded(seed: int) -> None:
    lengths = np.random.default_rng(seed).lognormal(6, 1.1, 200).round().clip(1, 8000)
    instances = [SimulatedInstance(f"i{n}", PAPER_7B_H800, 64) for n in range(4)]
    ours = simulate(SkewAware(), requests(lengths), instances)
    assert ours.makespan <= simulate(LeastLoaded(), requests(lengths), instances).makespan * 1.0001


def test_no_instance_and_two_of_one_id_are_refused() -> None:
    with pytest.raises(ValueError, match="list of instances is empty"):
        simulate(LeastLoaded(), requests(), [])
    with pytest.raises(ValueError, match="one id"):
        simulate(LeastLoaded(), [SimulatedRequest("a", 1.0)] * 2, [SimulatedInstance("i", PAPER_7B_H800, 4)])
