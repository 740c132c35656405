"""Batches of a plan: the lengths that stand for their answers."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.cost.generation_cost import Batch, requests_of_share, spread_lengths


@pytest.mark.parametrize("samples", [1, 8, 24, 64, 600, 5000])
def test_a_batch_has_the_tokens_of_its_lengths_and_the_longest_that_it_has_on_average(samples: int) -> None:
    """2 % of 4,096 answers run to the limit: a small batch has one of them now and then, and all have their tokens."""
    lengths = np.where(np.arange(4096) % 50, 500.0, 16_000.0)
    batch = Batch.of(lengths, samples, 20)
    tokens = batch.step_tokens
    assert batch.mean_length == pytest.approx(lengths.mean())
    assert tokens.tokens == pytest.approx(samples * (lengths.mean() + 20))
    assert tokens.squares == pytest.approx(samples * ((lengths + 20) ** 2).mean(), rel=0.02)
    longest = 500 + 15_500 * (1 - (1 - (lengths > 500).mean()) ** samples)
    assert batch.usual_longest == pytest.approx(longest, rel=0.02)
    alone = requests_of_share(batch, 1.0)
    assert len(alone) == samples and alone.mean() == pytest.approx(lengths.mean())
    assert alone[0] == alone.max() == batch.usual_longest


def test_lengths_are_spread_by_the_means_of_equal_shares() -> None:
    assert spread_lengths([1, 9, 5, 3], 2).tolist() == [7, 2]
    assert spread_lengths([1, 9, 5, 3], 4).tolist() == [9, 5, 3, 1]
    assert spread_lengths([1, 3], 3).tolist() == pytest.approx([3, 2, 1])
    assert spread_lengths([7.3] * 10, 3).tolist() == [7.3] * 3
    assert spread_lengths([1, 3], 4).tolist() == [3, 3, 1, 1]
