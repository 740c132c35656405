"""Policy losses: pure functions of log-probabilities and advantages."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LossResult:
    """Sums over tokens: divided by the batch's token count at the optimizer step, so that any split of the batch
    into micro-batches, in any order, gives the same gradient."""

    loss_sum: torch.Tensor
    """Scalar with gradient."""
    clipped: torch.Tensor
    """Tokens whose ratio was clipped (scalar)."""
    kl_sum: torch.Tensor
    """Sum of the KL estimate to the reference (scalar, 0 without one)."""


def grpo_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    reference_logprobs: torch.Tensor | None = None,
    kl_coef: float = 0.0,
) -> LossResult:
    """Token-level clipped surrogate: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_coef * k3, summed.

    r = exp(logp - old_logp). Source: GRPO (arXiv 2402.03300, eq. 3); clip-higher and one normalisation over all
    tokens of the batch from DAPO (arXiv 2503.14476, eq. 8); k3 = exp(d) - d - 1 with d = ref_logp - logp
    (http://joschu.net/blog/kl-approx.html).

    Args:
        logprobs: [N] current policy, with gradient.
        old_logprobs: [N] policy that the ratio is taken against.
        advantages: [N], one value per token.
        clip_low: lower clipping distance.
        clip_high: upper clipping distance.
        reference_logprobs: [N] frozen model, needed when kl_coef > 0.
        kl_coef: weight of the KL term.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    clipped_ratio = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped_ratio * advantages)
    loss_sum = -surrogate.sum()
    with torch.no_grad():
        clipped = (clipped_ratio * advantages < ratio * advantages).sum()
    kl_sum = torch.zeros((), device=logprobs.device)
    if kl_coef > 0.0:
        if reference_logprobs is None:
            raise ValueError("kl_coef > 0 needs reference_logprobs")
        delta = reference_logprobs - logprobs
        k3 = (torch.exp(delta) - delta - 1.0).sum()
        loss_sum = loss_sum + kl_coef * k3
        kl_sum = k3.detach()
    return LossResult(loss_sum, clipped, kl_sum)
