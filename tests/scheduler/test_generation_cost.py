"""Batches of a plan: the lengths that stand for their answers."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.capacity.covering import Replicas, generation_seconds
from scheduler.cost.generation_cost import Batch, answers_of, replica_kind, requests_of_share, spread_lengths
from scheduler.cost.hardware import device
from scheduler.cost.length_forecast import Forecast
from scheduler.cost.model_shapes import MODELS
from scheduler.dispatch.registry import make_policy
from scheduler.simulation.generation_simulator import SimulatedInstance, SimulatedRequest, simulate

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("samples", [1, 8, 24, 64, 600, 5000])
def test_a_batch_has_the_tokens_of_its_lengths_and_the_longest_that_it_has_on_average(samples: int) -> None:
    """2 % of 4,096 answers run to the limit: a small batch has one of them now and then, and all have their tokens."""
    lengths = np.where(np.arange(4096) % 50, 500.0, 16_000.0)
    batch = Batch.of(lengths, samples, 20)
    tokens = batch.step_tokens(MODELS["7b"])
    assert batch.mean_length == pytest.approx(lengths.mean())
    assert tokens.tokens == pytest.approx(samples * (lengths.mean() + 20))
    assert tokens.squares == pytest.approx(samples * ((lengths + 20) ** 2).mean(), rel=0.02)
    longest = 500 + 15_500 * (1 - (1 - (lengths > 500).mean()) ** samples)
    assert batch.usual_longest == pytest.approx(longest, rel=0.02)
    alone = requests_of_share(batch, 1.0)
    assert len(alone) == samples and alone.mean() == pytest.approx(lengths.mean())
    assert alone[0] == alone.max() == batch.usual_longest


@pytest.mark.parametrize("length", [777.0, 2000.0, 4096.0])
def test_equal_lengths_stay_equal_however_the_longest_is_rounded(length: float) -> None:
    for samples in range(1, 513):
        batch = Batch.of(np.full(100, length), samples, 100.0)
        assert batch.usual_longest >= batch.mean_length
        for count in {1, min(samples, 4), samples}:
            answers = answers_of(batch, count)
            assert len(answers) == count and np.abs(answers - length).max() <= 1e-6 * length


def test_lengths_are_spread_by_the_means_of_equal_shares() -> None:
    assert spread_lengths([1, 9, 5, 3], 2).tolist() == [7, 2]
    assert spread_lengths([1, 9, 5, 3], 4).tolist() == [9, 5, 3, 1]
    assert spread_lengths([1, 3], 3).tolist() == pytest.approx([3, 2, 1])
    assert spread_lengths([7.3] * 10, 3).tolist() == [7.3] * 3
    assert spread_lengths([1, 3], 4).tolist() == [3, 3, 1, 1]


@pytest.mark.parametrize("lengths", [RNG.lognormal(7.6, 0.8, 4000), 600 * (1 + RNG.pareto(1.2, 4000))])
def test_requests_that_wait_are_counted_longest_first_and_by_load_they_take_longer(lengths: np.ndarray) -> None:
    """The factors of docs/explanation/cost_model.md."""
    drawn = np.clip(lengths, 1, 12_000)
    batch = Batch.of(drawn, 512, 500)
    kind = replica_kind(MODELS["7b"], device("H100"), 1, batch, 64)
    assert kind is not None
    planned_s = generation_seconds([Replicas(0, 2, kind)], False)
    fleet = [SimulatedInstance(name, kind.curve, kind.slots) for name in "ab"]
    some = RNG.choice(spread_lengths(drawn, 512), 512, replace=False).tolist()
    requests = [SimulatedRequest(str(n), x, str(n), 500, forecast=Forecast.exactly(x)) for n, x in enumerate(some)]
    known, by_load = (
        simulate(make_policy(name), requests, fleet).makespan for name in ("longest-first", "least-loaded")
    )
    assert known == pytest.approx(planned_s, rel=0.02)
    assert 1.1 < by_load / planned_s < 1.5
