"""Steps under `async`: what rates alone leave out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler.capacity import steady_step as module
from scheduler.capacity.covering import Replicas
from scheduler.capacity.steady_step import steady_step
from scheduler.cost.generation_cost import Batch, ReplicaKind, replica_kind
from scheduler.cost.hardware import device
from scheduler.cost.model_shapes import MODELS
from scheduler.cost.training_cost import TrainerTime

EQUAL = Batch.of(np.full(128, 1000.0), 128, 0)
TAILED = Batch.of(np.asarray([400.0] * 120 + [8000.0] * 8), 128, 0)


def trainer(seconds: float, ranks: int = 1) -> TrainerTime:
    return TrainerTime(ranks, 1, seconds, 0.0, 0.0)


FAST = trainer(1e-3)
"""A stage that nobody waits for."""


def kind(batch: Batch) -> ReplicaKind:
    found = replica_kind(MODELS["1.5b"], device("H100"), 1, batch)
    assert found is not None
    return found


def test_a_slow_trainer_sets_the_pace() -> None:
    found = steady_step([Replicas(0, 2, kind(EQUAL))], EQUAL, trainer(500.0), weights_s=0.0)
    assert found.seconds == pytest.approx(500.0, rel=0.01)
    assert found.generation_bubble > 0.5 and found.staleness == pytest.approx(1.0)


def test_equal_lengths_take_what_the_batch_takes() -> None:
    pool = Replicas(0, 1, kind(EQUAL))
    curve = pool.kind.curve
    found = steady_step([pool], EQUAL, FAST, weights_s=0.0)
    # one step of staleness: two batches are in flight, of which the slots hold one
    alone = 1000 * float(curve.base(128)) + 128 * curve.per_context_token * 1000**2 / 2
    assert found.seconds == pytest.approx(alone, rel=0.02)
    assert found.generation_bubble == pytest.approx(0.0, abs=0.02)


def test_passes_after_the_first_keep_a_step_longer() -> None:
    pools = [Replicas(0, 1, kind(TAILED))]
    alone = steady_step(pools, TAILED, FAST, weights_s=0.0).seconds
    seconds = [
        steady_step(pools, TAILED, replace(trainer(0.9 * alone), after_batch=share), weights_s=0.0).seconds
        for share in (0.0, 0.5, 1.0)
    ]
    assert 1.1 * seconds[0] < 1.05 * seconds[1] < seconds[2]


@pytest.mark.parametrize(("processes", "wanted"), [(1, 64.0), (4, 16.0), (100, 500.0)])
def test_environments_without_enough_processes_set_the_pace(processes: int, wanted: float) -> None:
    batch = replace(EQUAL, environment_s=0.5, environment_processes=processes)
    slow = 500.0 if processes == 100 else 1e-3
    pool = Replicas(0, 8, kind(EQUAL))
    found = steady_step([pool], batch, trainer(slow), weights_s=0.0)
    alone = steady_step([pool], EQUAL, trainer(slow), weights_s=0.0)
    assert found.seconds == pytest.approx(max(wanted, alone.seconds), rel=0.03)


def test_the_end_of_a_batch_that_is_played_in_environments() -> None:
    # ends at 2, 4, 6 and 8 s, from which on 4, 3, 2 and 1 samples are left
    batch = Batch((4.0, 3.0, 2.0, 1.0), 4)
    cases = [(1.0, 1, 9.0, 8.0), (3.0, 1, 14.0, 12.0), (3.0, 4, 11.0, 8.0), (0.0, 1, 8.0, 8.0)]
    for seconds, processes, alone, across in cases:
        played = replace(batch, environment_s=seconds, environment_processes=processes)
        assert (played.played_s(8.0, False), played.played_s(8.0, True)) == (alone, across)
    for wrong in ({"environment_s": -1.0}, {"environment_processes": 0}):
        with pytest.raises(ValueError, match="environment_s >= 0 and environment_processes >= 1"):
            replace(batch, **wrong)


def test_thinned_environments_load_their_processes_as_much() -> None:
    many = Batch.of(np.full(128, 100.0), 1024, 0)
    for processes in (2, 24):
        batch = replace(many, environment_s=0.5, environment_processes=processes)
        found = steady_step([Replicas(0, 64, kind(many))], batch, FAST, weights_s=0.0)
        assert found.seconds == pytest.approx(512 / processes, rel=0.05)


def test_a_group_is_worth_its_last_sample() -> None:
    # nearly every group of 16 has a long answer, so each step waits for some
    pool = Replicas(0, 4, kind(TAILED))
    single, grouped = (
        steady_step([pool], replace(TAILED, group=group), trainer(16.0), weights_s=0.0) for group in (1, 16)
    )
    assert grouped.seconds > 1.05 * single.seconds > 1.05 * 16.0


def test_more_staleness_waits_for_less_and_weights_that_come_late_for_more() -> None:
    pools, batch = [Replicas(0, 4, kind(TAILED))], replace(TAILED, group=8)
    now = steady_step(pools, batch, trainer(2.0), weights_s=0.0)
    older = steady_step(pools, replace(batch, staleness=4), trainer(2.0), weights_s=0.0)
    late = steady_step(pools, batch, trainer(2.0), weights_s=20.0)
    assert older.seconds < now.seconds < late.seconds
    assert older.staleness > now.staleness


def test_thinned_batches_take_as_long_as_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = replace(TAILED, samples=512)
    pools = [Replicas(0, 3, kind(batch))]
    thin = steady_step(pools, batch, trainer(4.0), weights_s=0.5)
    monkeypatch.setattr(module, "REQUESTS", 512)
    assert thin.seconds == pytest.approx(steady_step(pools, batch, trainer(4.0), 0.5).seconds, rel=0.06)


@pytest.mark.parametrize("slots", [4, 23, 95])
def test_few_slots_are_thinned_no_further_than_they_can_be_divided(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = replace(TAILED, samples=1024)
    found = replica_kind(MODELS["1.5b"], device("H100"), 1, batch, slots)
    assert found is not None and found.slots == slots
    pools = [Replicas(0, 8, found)]
    thin = steady_step(pools, batch, trainer(1.0), weights_s=0.0)
    monkeypatch.setattr(module, "REQUESTS", 1024)
    assert thin.seconds == pytest.approx(steady_step(pools, batch, trainer(1.0), 0.0).seconds, rel=0.12)


def test_a_long_answer_that_comes_last_is_trained_by_one_rank() -> None:
    # one answer in 128 is 20 times as long as the others, and comes last; of 16 ranks one trains on it
    batch = Batch.of(np.asarray([400.0] * 127 + [8000.0]), 128, 0)
    pools = [Replicas(0, 4, kind(batch))]
    single, sixteen = (steady_step(pools, batch, trainer(8.0, ranks), 0.0).seconds for ranks in (1, 16))
    # it has up to a step longer to come, so that not every step waits for all of its training
    assert single + 1.0 < sixteen < single + 8.0


def test_all_replicas_pause_to_load_weights() -> None:
    pool = Replicas(0, 1, kind(EQUAL))
    plain, paused = (steady_step([pool], EQUAL, FAST, 0.0, load_s).seconds for load_s in (0.0, 3.0))
    assert paused == pytest.approx(plain + 3.0, rel=0.01)


@pytest.mark.parametrize("staleness", [2, 4, 8])
def test_a_large_staleness_is_seen_in_steps_beyond_the_start_up(
    staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools, batch = [Replicas(0, 4, kind(TAILED))], replace(TAILED, group=8, staleness=staleness)
    found = steady_step(pools, batch, trainer(16.0), weights_s=0.0)
    monkeypatch.setattr(module, "MEASURED", 30)
    long = steady_step(pools, batch, trainer(16.0), weights_s=0.0)
    assert found.seconds == pytest.approx(long.seconds, rel=0.05)
    assert found.staleness == pytest.approx(long.staleness, abs=0.3)


def test_weights_that_come_every_few_steps_pause_the_replicas_less_often() -> None:
    pools, batch = [Replicas(0, 1, kind(EQUAL))], replace(EQUAL, staleness=3)
    each, every = (steady_step(pools, batch, FAST, 0.0, 3.0, sync_every).seconds for sync_every in (1, 2))
    assert each - every == pytest.approx(3.0 / 2, rel=0.01)
