"""What dispatching by forecasts saves: near the oracle where they are right, nothing where they say nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ranker.distribution import LEVELS
from ranker.held_out import HeldOut
from streamrl.planning.ranker_saving import BATCHES, GROUPS, SAMPLES, _batches, dispatch_saving


def held_out(prompts: int, samples: int, seed: int) -> HeldOut:
    """Long-tailed lengths, foretold nearly exactly, not at all, and (of the first sample) not known."""
    rng = np.random.default_rng(seed)
    unit = np.repeat(rng.permutation(prompts), samples)
    length = np.clip(rng.lognormal(5, 1, prompts), 5, 2000).round()[unit]
    near = length[:, None] * np.linspace(0.99, 1.01, len(LEVELS))
    nothing = np.broadcast_to(np.quantile(length, LEVELS), near.shape)
    unknown = near.copy()
    unknown[:] = np.nan
    return HeldOut(LEVELS, {"model": near, "task": nothing, "other_samples": unknown}, length, unit, 2000)


def test_right_forecasts_capture_what_true_lengths_save() -> None:
    for fleet in dispatch_saving(held_out(40, 4, 0)):
        assert "1 batch of 40 groups (160 requests in all)" in fleet.setting
        assert fleet.oracle < 0.99 and set(fleet.forecasts) == {"model", "task"}
        captured = fleet.forecasts["model"].captured
        nothing = fleet.forecasts["task"].captured
        assert captured is not None and captured > 0.85
        assert nothing is not None and nothing < captured - 0.2
        assert fleet.forecasts["model"].makespan < 1


def test_batches_are_whole_and_apart() -> None:
    held = held_out(3 * GROUPS + 5, 10, 1)
    batches = _batches(held.unit, 0)
    assert len(batches) == 3 <= BATCHES
    for rows in batches:
        assert (np.unique(held.unit[rows], return_counts=True)[1] == SAMPLES).all()
        assert len(np.unique(held.unit[rows])) == GROUPS and len(np.unique(rows)) == len(rows)
    assert len(np.unique(np.concatenate([np.unique(held.unit[rows]) for rows in batches]))) == 3 * GROUPS
    assert [list(rows) for rows in _batches(held.unit, 0)] == [list(rows) for rows in batches]


def test_few_prompts_are_no_batch() -> None:
    held = held_out(15, 4, 2)
    assert dispatch_saving(held) == []
    assert dispatch_saving(replace(held, length=held.length[:0], unit=held.unit[:0])) == []
