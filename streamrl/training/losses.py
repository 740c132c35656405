"""Token losses: pure functions of log-probabilities, advantages and values, for any float type.

A batch is a row of N tokens of whole sequences; `sequence_ids` [N] tells them apart (0, 0, 0, 1, 1, 2, ...). Tokens of
one sequence need not follow one another: the rows of an episode may be one sequence. Every loss is one value per
token. A micro-batch adds to the gradient that of the *sum* of its token losses times `token_weights`, and the optimizer
step divides by the whole batch's normalizer (`streamrl.rollouts.micro_batch.loss_normalizer`), so the gradient does not
depend on how the batch was split.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from streamrl.config.algorithm import AggregationKind, KLEstimator

LOG_RATIO_LIMIT = 20.0
"""Bound of log-ratios, which are clamped before exp: e^20 = 5e8 is far beyond every clip, and its square fits float32.

Beyond the bound a ratio is constant, without a gradient.
"""


class TokenLoss(NamedTuple):
    """A policy loss by token."""

    loss: torch.Tensor
    """Loss, [N], with gradient."""
    clipped: torch.Tensor
    """Tokens whose ratio the clip has changed, [N] bool; with `clip` and `sequence_clip` they have no gradient."""


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """Clamp the log-ratio to +-`LOG_RATIO_LIMIT`."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_lengths(sequence_ids: torch.Tensor) -> torch.Tensor:
    """Return the number of tokens of each sequence, [S] int64."""
    return torch.bincount(sequence_ids)


def sequence_sums(values: torch.Tensor, sequence_ids: torch.Tensor) -> torch.Tensor:
    """Sum each sequence's values: [N] -> [S]."""
    return values.new_zeros(len(sequence_lengths(sequence_ids))).index_add(0, sequence_ids, values)


def sequence_means(values: torch.Tensor, sequence_ids: torch.Tensor) -> torch.Tensor:
    """Average each sequence's values: [N] -> [S]."""
    return sequence_sums(values, sequence_ids) / sequence_lengths(sequence_ids)


def clip_loss(log_ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float) -> TokenLoss:
    """Return -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), with r = exp(log_ratio).

    Source: PPO, arXiv 1707.06347, eq. 7; GRPO, arXiv 2402.03300, eq. 3; separate distances up and down: DAPO,
    arXiv 2503.14476, eq. 8.

    Args:
        log_ratio: [N] current minus old log-probability, with gradient.
        advantages: [N].
        clip_low: lower clipping distance.
        clip_high: upper clipping distance.
    """
    ratio = torch.exp(bounded(log_ratio))
    surrogate = ratio * advantages
    limited = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return TokenLoss(-torch.minimum(surrogate, limited), (limited < surrogate).detach())


def sequence_clip_loss(
    log_ratio: torch.Tensor, advantages: torch.Tensor, sequence_ids: torch.Tensor, clip_low: float, clip_high: float
) -> TokenLoss:
    """Return `clip_loss` with one ratio per sequence, s = exp(mean of its tokens' log_ratio), equal for its tokens.

    With aggregation `sequence` this is GSPO's objective (arXiv 2507.18071, eq. 5-7).

    Args:
        log_ratio: [N], with gradient.
        advantages: [N], the same for all tokens of a sequence.
        sequence_ids: [N].
        clip_low: lower clipping distance.
        clip_high: upper clipping distance.
    """
    return clip_loss(sequence_means(log_ratio, sequence_ids)[sequence_ids], advantages, clip_low, clip_high)


def detached_clip_loss(
    logprobs: torch.Tensor, log_ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> TokenLoss:
    """Return -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log p, where sg stops the gradient.

    Every token keeps its gradient through log p. Source: CISPO, arXiv 2506.13585, eq. 4-5 (there without a lower bound:
    clip_low = 1).

    Args:
        logprobs: [N], with gradient.
        log_ratio: [N]; no gradient flows into it.
        advantages: [N].
        clip_low: lower clipping distance.
        clip_high: upper clipping distance.
    """
    ratio = torch.exp(bounded(log_ratio.detach()))
    limited = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return TokenLoss(-limited * advantages * logprobs, limited != ratio)


def soft_gate_loss(log_ratio: torch.Tensor, advantages: torch.Tensor, positive: float, negative: float) -> TokenLoss:
    """Return -(4 / tau) sigmoid(tau (r - 1)) A, with r = exp(log_ratio).

    tau is `positive` for tokens with A > 0, else `negative`. At r = 1 the gradient is that of r A; it fades smoothly as
    r moves away. Source: SAPO, arXiv 2511.20347.

    Args:
        log_ratio: [N] current minus old log-probability, with gradient.
        advantages: [N].
        positive: temperature.
        negative: temperature.
    """
    ratio = torch.exp(bounded(log_ratio))
    temperature = torch.full_like(ratio, negative).masked_fill(advantages > 0, positive)
    gated = 4.0 / temperature * torch.sigmoid(temperature * (ratio - 1.0))
    return TokenLoss(-gated * advantages, torch.zeros_like(ratio, dtype=torch.bool))


def reinforce_loss(logprobs: torch.Tensor, advantages: torch.Tensor) -> TokenLoss:
    """Return -A log p, the plain policy gradient (Williams 1992; for language models arXiv 2402.14740, eq. 6).

    Args:
        logprobs: [N], with gradient.
        advantages: [N].
    """
    return TokenLoss(-advantages * logprobs, torch.zeros_like(logprobs, dtype=torch.bool))


def kl_estimate(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """Estimate KL(policy || reference) at each sampled token, [N].

    With d = logp - logp_ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (http://joschu.net/blog/kl-approx.html).
    As a loss on samples of the policy, k1 has gradient 0 in expectation, and k2 the gradient of the KL itself
    (arXiv 2506.09477).

    Args:
        logprobs: [N].
        reference_logprobs: [N].
        estimator: k1, k2 or k3.
    """
    difference = bounded(logprobs - reference_logprobs)
    match estimator:
        case "k1":
            return difference
        case "k2":
            return 0.5 * difference.square()
        case "k3":
            return torch.expm1(-difference) + difference


def value_loss(values: torch.Tensor, returns: torch.Tensor) -> TokenLoss:
    """Return (V - R)^2 / 2 of each token (PPO, arXiv 1707.06347, eq. 9).

    Args:
        values: [N], with gradient.
        returns: [N], constants.
    """
    return TokenLoss(0.5 * (values - returns).square(), torch.zeros_like(values, dtype=torch.bool))


def clipped_value_loss(
    values: torch.Tensor, returns: torch.Tensor, old_values: torch.Tensor, distance: float
) -> TokenLoss:
    """Return max((V - R)^2, (V_clip - R)^2) / 2, with V_clip = clip(V, V_old - distance, V_old + distance).

    Where the clipped value has the larger error, the token has no gradient: it has moved far enough towards its return.
    Source: OpenAI's baselines, `ppo2`; arXiv 2005.12729, sec. 3; verl, TRL and OpenRLHF have the same.

    Args:
        values: [N], with gradient.
        returns: [N], constants.
        old_values: [N], values from before the step's first update, constants.
        distance: clipping distance.
    """
    limited = torch.clamp(values, old_values - distance, old_values + distance)
    error, limited_error = (values - returns).square(), (limited - returns).square()
    return TokenLoss(0.5 * torch.maximum(error, limited_error), (limited_error > error).detach())


def token_weights(sequence_tokens: torch.Tensor, aggregation: AggregationKind, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight of each token's loss in the batch's sum, [N].

    For `sequence` it is 1 over its sequence's length (GRPO, arXiv 2402.03300, eq. 3), else 1 (DAPO, arXiv 2503.14476,
    eq. 8; Dr. GRPO, arXiv 2503.20783).

    Args:
        sequence_tokens: [N], length of each token's sequence; of an episode, of all its rows.
        aggregation: how the batch's tokens are averaged.
        dtype: type of the result.
    """
    if aggregation == "sequence":
        return 1.0 / sequence_tokens.to(dtype)
    return torch.ones(sequence_tokens.shape, dtype=dtype, device=sequence_tokens.device)
