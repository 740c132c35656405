"""Advantages, shaped rewards and normalizers on cases done by hand; their edge cases by property."""

from __future__ import annotations

from statistics import mean, pstdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config.algorithm import GROUP_ADVANTAGES, GroupAdvantage, OverlongConfig
from streamrl.rollouts.advantage import (
    batch_advantages,
    effective_sample_size,
    group_advantages,
    is_flat,
    shaped_reward,
    whitened,
)
from streamrl.rollouts.micro_batch import loss_normalizer
from streamrl.rollouts.train_groups import train_groups
from streamrl.rollouts.void import MOST_REWARD
from tests.rollouts.test_rollouts import make_group

rewards_of_a_group = st.lists(st.floats(-10, 10), max_size=8)


def test_group_advantages_by_hand() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0], "group_std") == pytest.approx([1.0, -1.0, -1.0, 1.0], rel=1e-5)
    assert group_advantages([3.0, 0.0], "group_mean") == [1.5, -1.5]
    # each minus the mean of the two others
    assert group_advantages([3.0, 0.0, 6.0], "leave_one_out") == pytest.approx([0.0, -4.5, 4.5])


def test_the_largest_rewards_have_an_advantage() -> None:
    assert group_advantages([MOST_REWARD, -MOST_REWARD], "group_std") == pytest.approx([1.0, -1.0])


@pytest.mark.parametrize("kind", GROUP_ADVANTAGES)
def test_equal_rewards_one_sample_and_none_have_no_advantage_exactly(kind: GroupAdvantage) -> None:
    assert group_advantages([0.1] * 8, kind) == [0.0] * 8  # a rounding of 0 would be a gradient
    assert group_advantages([5.0], kind) == [0.0]
    assert group_advantages([], kind) == []
    assert is_flat([0.1] * 8) and is_flat([]) and is_flat([5.0]) and not is_flat([0.0, 1e-9])


@given(rewards_of_a_group)
def test_group_advantages_are_their_formulas(rewards: list[float]) -> None:
    if is_flat(rewards):
        return
    n = len(rewards)
    spread = pstdev(rewards) + 1e-6
    expected = {
        "group_std": [(r - mean(rewards)) / spread for r in rewards],
        "group_mean": [r - mean(rewards) for r in rewards],
        "leave_one_out": [r - (sum(rewards) - r) / (n - 1) for r in rewards],
    }
    for kind in GROUP_ADVANTAGES:
        found = group_advantages(rewards, kind)
        assert found == pytest.approx(expected[kind], rel=1e-6, abs=1e-8)
        assert sum(found) == pytest.approx(0.0, abs=1e-6)


def test_batch_advantages_by_hand() -> None:
    # mean 1, deviation 1
    assert batch_advantages([[0.0, 2.0], [2.0, 0.0]], False) == [
        pytest.approx([-1.0, 1.0], rel=1e-5),
        pytest.approx([1.0, -1.0], rel=1e-5),
    ]
    # a group of its own level is compared with itself: centred -1, 1, 0, 0, deviation sqrt(1/2)
    found = batch_advantages([[0.0, 2.0], [7.0, 7.0]], True)
    assert found[0] == pytest.approx([-(2**0.5), 2**0.5], rel=1e-5)
    assert found[1] == [0.0, 0.0]


@given(st.lists(rewards_of_a_group, max_size=5), st.booleans())
def test_batch_advantages_keep_the_shape_and_are_normalised(groups: list[list[float]], baseline: bool) -> None:
    found = batch_advantages(groups, baseline)
    assert [len(group) for group in found] == [len(group) for group in groups]
    values = np.array([value for group in found for value in group])
    assert np.isfinite(values).all()
    if values.size:
        assert abs(values.mean()) < 1e-6
        assert values.std() < 1.0 + 1e-9


def test_a_batch_of_equal_rewards_has_no_advantage_exactly() -> None:
    assert batch_advantages([[0.1] * 3, [0.1] * 4], False) == [[0.0] * 3, [0.0] * 4]
    assert batch_advantages([[0.1] * 3, [0.7] * 4], True) == [[0.0] * 3, [0.0] * 4]
    assert batch_advantages([], True) == [] and batch_advantages([[], []], False) == [[], []]


@pytest.mark.parametrize(("length", "expected"), [(0, 1.0), (60, 1.0), (70, 0.75), (80, 0.5), (100, 0.0), (120, 0.0)])
def test_the_overlong_penalty_grows_over_the_margin(length: int, expected: float) -> None:
    assert shaped_reward(1.0, length, 100, OverlongConfig(margin_tokens=40)) == pytest.approx(expected)


def test_overlong_defaults_and_limits() -> None:
    assert shaped_reward(1.0, 100, 100, None) == 1.0
    assert shaped_reward(1.0, 80, 100, OverlongConfig()) == 1.0  # margin: a fifth
    assert shaped_reward(1.0, 90, 100, OverlongConfig(penalty=4.0)) == pytest.approx(-1.0)
    assert shaped_reward(1.0, 5, 10, OverlongConfig(margin_tokens=1000)) == pytest.approx(0.5)  # cut to the limit
    assert shaped_reward(0.0, 1, 1, OverlongConfig()) == -1.0
    assert shaped_reward(1.0, 94, 104, OverlongConfig()) == 0.5  # the fifth is whole tokens: 20, from 84 on
    assert [shaped_reward(0.0, length, 4, OverlongConfig()) for length in (3, 4)] == [0.0, -1.0]  # and one at least


def test_effective_sample_size_by_hand() -> None:
    assert effective_sample_size(3.0, 3.0, 3) == 1.0
    assert effective_sample_size(6.0, 36.0, 3) == pytest.approx(1 / 3)  # one weight of 6, two of 0
    assert effective_sample_size(0.0, 0.0, 3) == effective_sample_size(0.0, 0.0, 0) == 0.0
    assert effective_sample_size(1.0, 1.0, 0) == 0.0
    assert effective_sample_size(5e8 * 9, 25e16 * 9, 9) == pytest.approx(1.0)


@given(st.lists(st.floats(1e-3, 1e8), min_size=1, max_size=20))
def test_effective_sample_size_is_a_share(weights: list[float]) -> None:
    share = effective_sample_size(sum(weights), sum(w * w for w in weights), len(weights))
    assert 1 / len(weights) - 1e-9 <= share <= 1.0


def test_whitening_by_hand() -> None:
    parts = [np.array([1.0, 2.0], np.float32), np.zeros(0, np.float32), np.array([6.0], np.float32)]
    found = whitened(parts)  # mean 3, variance (4 + 1 + 9) / 2
    assert [part.dtype for part in found] == [np.float32] * 3
    assert [part.tolist() for part in found] == [
        pytest.approx([-2 / 7**0.5, -1 / 7**0.5]),
        [],
        pytest.approx([3 / 7**0.5]),
    ]
    broken = whitened([*parts, np.array([np.nan, np.inf], np.float32)])
    assert [part.tolist() for part in broken[:3]] == [part.tolist() for part in found]
    assert np.isnan(broken[3][0]) and broken[3][1] == np.inf
    assert whitened([np.array([5.0])])[0].tolist() == whitened([np.full(2, 5.0)])[0].tolist()[:1] == [0.0]
    assert whitened([]) == []
    assert whitened([np.array([1.0, 3.0])])[0].tolist() == pytest.approx([-(2**-0.5), 2**-0.5])  # mean 2, variance 2


def test_loss_normalizers() -> None:
    assert loss_normalizer("token", 120, 8, 64) == 120.0
    assert loss_normalizer("sequence", 120, 8, 64) == 8.0
    assert loss_normalizer("constant", 120, 8, 64) == 512.0
    assert loss_normalizer("token", 0, 0, 64) == loss_normalizer("sequence", 0, 0, 64) == 1.0


def test_only_kept_samples_are_sent() -> None:
    group = make_group("g", rewards=(0.0, 1.0, 2.0))
    group.advantages = {f"g.{number}": float(number) for number in range(3)}
    assert [s.advantage for s in train_groups(group)[0].sequences] == [0.0, 1.0, 2.0]
    assert [s.advantage for s in train_groups(group, {"g.0", "g.2"})[0].sequences] == [0.0, 2.0]
    assert train_groups(group, set()) == []
