"""KL terms, value losses and weights of tokens, which go with any surrogate: pure, for any float type.

As for the surrogates (`streamrl/surrogates.py`), every loss is one value per token. A micro-batch adds to the gradient
that of the *sum* of its token losses times `token_weights`, and the optimizer step divides by the whole batch's
normalizer (`streamrl.rollouts.micro_batch.loss_normalizer`), so the gradient does not depend on how the batch was
split.
"""

from __future__ import annotations

import torch

from streamrl.config.algorithm import AggregationKind, KLEstimator
from streamrl.surrogates import TokenLoss, bounded


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
