"""Compute advantages from rewards, before samples reach the trainer. Pure, float64; empty inputs give empty outputs.

GAE needs a critic's values, so the trainer computes it (streamrl/training/advantages.py); here it is only whitened. All
other functions get the rewards of survivors only: a void sample is in no mean and no deviation, and G is the number of
survivors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from streamrl.config.algorithm import GroupAdvantage, OverlongConfig
from streamrl.rollouts.types import FloatArray

EPSILON = 1e-6
"""Constant added to a standard deviation before dividing by it."""

WHITENING_EPSILON = 1e-8
"""Constant added to the variance of token advantages before taking its root."""


def is_flat(rewards: Sequence[float]) -> bool:
    """Return whether all rewards are equal (also if there are none), so that they have no relative advantage."""
    return all(reward == rewards[0] for reward in rewards)


def group_advantages(rewards: Sequence[float], kind: GroupAdvantage) -> list[float]:
    """Return the advantages of a group's samples, relative to each other.

    With m the group's mean, s its population standard deviation and G its size:

        group_std      A_i = (r_i - m) / (s + 1e-6)            GRPO, arXiv 2402.03300, sec. 4.1.2
        group_mean     A_i = r_i - m                           Dr. GRPO, arXiv 2503.20783, eq. 3
        leave_one_out  A_i = r_i - mean of the others
                           = G / (G - 1) (r_i - m)             RLOO, arXiv 2402.14740, sec. 3.3

    A group whose rewards are all equal, such as one of a single sample, gets exact zeros and so no gradient.

    Args:
        rewards: one per sample, shape [G].
        kind: one of the three formulas.
    """
    if is_flat(rewards):
        return [0.0] * len(rewards)
    values = np.asarray(rewards, dtype=np.float64)
    centred = values - values.mean()
    if kind == "group_std":
        centred = centred / (values.std() + EPSILON)
    elif kind == "leave_one_out":
        centred = centred * (values.size / (values.size - 1))
    return [float(value) for value in centred]


def batch_advantages(groups: Sequence[Sequence[float]], group_baseline: bool) -> list[list[float]]:
    """Return advantages normalised over the whole batch, in the shape of `groups`.

        A = (r - mean of the batch) / (std of the batch + 1e-6)

    With `group_baseline`, its group's mean is first subtracted from each reward; their batch mean is then 0, and a
    group whose rewards are all equal gets exact zeros. Source: REINFORCE++ and REINFORCE++-baseline, arXiv 2501.03262.
    The std is the population's. If all rewards are equal, all advantages are 0.

    Args:
        groups: the rewards of each group's samples.
        group_baseline: whether to subtract group means.
    """
    if group_baseline:
        centred = [group_advantages(group, "group_mean") for group in groups]
    else:
        flat = [reward for group in groups for reward in group]
        if is_flat(flat):
            return [[0.0] * len(group) for group in groups]
        mean = float(np.mean(flat, dtype=np.float64))
        centred = [[reward - mean for reward in group] for group in groups]
    values = np.asarray([value for group in centred for value in group], dtype=np.float64)
    scale = float(values.std()) + EPSILON if values.size else 1.0
    return [[value / scale for value in group] for group in centred]


def shaped_reward(reward: float, length: int, max_tokens: int, overlong: OverlongConfig | None) -> float:
    """Return the reward minus DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13).

    The punishment is 0 up to `max_tokens - margin` tokens, then grows linearly to `penalty` at `max_tokens`.

    Args:
        reward: the task's reward.
        length: tokens of the completion; of an episode: of its longest answer.
        max_tokens: the limit, `sampling.max_tokens`.
        overlong: margin and penalty; None: no punishment.
    """
    if overlong is None:
        return reward
    margin = min(overlong.margin_tokens or max(1, max_tokens // 5), max_tokens)
    beyond = length - (max_tokens - margin)
    return reward - overlong.penalty * min(max(beyond / margin, 0.0), 1.0)


def effective_sample_size(weight_sum: float, weight_sq_sum: float, n: int) -> float:
    """Return the effective share of `n` weighted samples: (sum w)^2 / (n sum w^2), in [0, 1]; 0 without samples.

    It is 1 if all weights are equal. Source: Kish, Survey Sampling (1965).

    Args:
        weight_sum: sum of the importance weights.
        weight_sq_sum: sum of their squares.
        n: their number.
    """
    if n <= 0 or weight_sq_sum <= 0.0:
        return 0.0
    return min(1.0, weight_sum / weight_sq_sum * (weight_sum / n))


def whitened(advantages: Sequence[FloatArray]) -> list[FloatArray]:
    """Return the token advantages of a batch with mean 0 and variance 1 over all tokens, float32, in the same shapes.

        A = (a - mean) / sqrt(var + 1e-8)       var divides by n - 1

    Source: `masked_whiten` of verl and TRL. Advantages that are not finite stay so and do not count, so that the
    trainer can find the group that they belong to. A single token gets 0.

    Args:
        advantages: of each row of the batch, tokens with a loss only, each [N].
    """
    every = np.concatenate([np.zeros(0), *advantages]).astype(np.float64)
    known = every[np.isfinite(every)]
    mean = known.mean() if known.size else 0.0
    variance = known.var(ddof=1) if known.size > 1 else 0.0
    return [((one - mean) / np.sqrt(variance + WHITENING_EPSILON)).astype(np.float32) for one in advantages]
