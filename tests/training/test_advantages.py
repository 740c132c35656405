"""GAE on cases done by hand and against the sum that defines it; each sequence of a row is on its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.training.advantages import gae, token_rewards


def vector(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_gae_by_hand() -> None:
    ids = torch.tensor([0, 0, 0, 1])
    rewards = token_rewards(vector([1.0, 1.0, 1.0, -2.0]), ids)
    assert rewards.tolist() == [0.0, 0.0, 1.0, -2.0]
    advantages, returns = gae(rewards, vector([0.5, 0.25, 0.75, 3.0]), ids, gamma=1.0, lam=0.5)
    # deltas: 0.25 - 0.5 = -0.25, 0.75 - 0.25 = 0.5, 1 - 0.75 = 0.25; -2 - 3 = -5
    assert advantages.tolist() == [-0.25 + 0.5 * (0.5 + 0.5 * 0.25), 0.5 + 0.5 * 0.25, 0.25, -5.0]
    assert returns.tolist() == [0.5 + 0.0625, 0.25 + 0.625, 1.0, -2.0]


def test_gae_with_a_discount_by_hand() -> None:
    # deltas: 0 + 0.5 * 4 - 2 = 0, 8 - 4 = 4; A_0 = 0 + 0.5 * 0.5 * 4
    advantages, _ = gae(vector([0.0, 8.0]), vector([2.0, 4.0]), torch.tensor([0, 0]), gamma=0.5, lam=0.5)
    assert advantages.tolist() == [1.0, 4.0]


def test_penalties_are_taken_off_every_token() -> None:
    rewards = token_rewards(vector([3.0, 3.0, 5.0]), torch.tensor([0, 0, 1]), vector([0.5, 0.25, 1.0]))
    assert rewards.tolist() == [-0.5, 2.75, 4.0]


def test_lambda_1_gives_the_rewards_and_lambda_0_the_critic() -> None:
    ids = torch.tensor([0, 0, 0])
    values, rewards = vector([0.5, 0.25, 0.75]), vector([0.0, 0.0, 1.0])
    assert gae(rewards, values, ids, 1.0, 1.0)[1].tolist() == pytest.approx([1.0, 1.0, 1.0])
    assert gae(rewards, values, ids, 1.0, 0.0)[1].tolist() == pytest.approx([0.25, 0.75, 1.0])


def test_no_tokens() -> None:
    none, ids = vector([]), torch.zeros(0, dtype=torch.int64)
    assert [len(part) for part in gae(token_rewards(none, ids), none, ids, 1.0, 0.95)] == [0, 0]


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    gamma=st.floats(0.1, 1.0),
    lam=st.floats(0.0, 1.0),
    seed=st.integers(0, 1000),
)
def test_gae_is_the_discounted_sum_of_the_deltas(lengths: list[int], gamma: float, lam: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    rewards, values = torch.randn(2, len(ids), generator=generator, dtype=torch.float64)
    advantages, returns = gae(rewards, values, ids, gamma, lam)
    start = 0
    for length in lengths:
        r, v = rewards[start : start + length].tolist(), [*values[start : start + length].tolist(), 0.0]
        for t in range(length):
            expected = sum((gamma * lam) ** (k - t) * (r[k] + gamma * v[k + 1] - v[k]) for k in range(t, length))
            assert float(advantages[start + t]) == pytest.approx(expected, rel=1e-9, abs=1e-12)
            assert float(returns[start + t]) == pytest.approx(expected + v[t], rel=1e-9, abs=1e-12)
        start += length


def test_no_gradient_flows_through_rewards_or_advantages() -> None:
    ids, scores = torch.tensor([0, 0]), torch.tensor([1.0, 1.0], requires_grad=True)
    rewards = token_rewards(scores, ids, 0.5 * scores)
    advantages, returns = gae(scores, 0.5 * scores, ids, 1.0, 0.95)
    assert [part.requires_grad for part in (rewards, advantages, returns)] == [False] * 3
