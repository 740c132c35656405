"""Objective of one micro-batch: surrogate, off-policy correction, KL term and aggregation combined. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from streamrl.config.algorithm import Algorithm, PPOConfig
from streamrl.surrogates import SURROGATES, LossInputs, bounded, sequence_lengths, sequence_means, sequence_sums
from streamrl.training.advantages import gae, token_rewards
from streamrl.training.corrections import correct, importance_weights
from streamrl.training.losses import clipped_value_loss, kl_estimate, token_weights, value_loss
from streamrl.training.packing import PackedBatch


@dataclass
class MicroStats:
    """Sums over the tokens of one micro-batch; those of all micro-batches and ranks add up to the batch's.

    Fields that end in `_max` are maxima instead.
    """

    tokens: int = 0
    row_tokens: int = 0
    """Tokens with prompts; a prompt counts once for all completions that share it in a row."""
    flops: float = 0.0
    """Operations of the forward and backward passes, without recomputation (0: the cost model does not know the
    model's kind)."""
    sequences: int = 0
    """Sequences with at least one token."""
    loss_sum: float = 0.0
    """The policy's loss as differentiated; divided by the batch's normalizer it is the batch's loss."""
    clipped: float = 0.0
    """Tokens whose ratio the clip has changed."""
    kl_sum: float = 0.0
    """Unweighted KL estimate to the reference (0 without one)."""
    entropy_sum: float = 0.0
    entropy_tokens: int = 0
    outside: float = 0.0
    """Tokens that the policy's own truncation would not have sampled."""
    mismatch_sum: float = 0.0
    """Trainer-generator mismatch: |trainer log-prob - generator log-prob|."""
    ratio_sum: float = 0.0
    """The surrogate's ratio of each token, or its sequence's: trainer / generator, or trainer / proximal."""
    ratio_max: float = 0.0
    """Largest ratio trainer / generator of a token (at most e^20)."""
    weight_sum: float = 0.0
    """Weight w = trainer / generator of each token, whatever the correction."""
    weight_sq_sum: float = 0.0
    seq_weight_sum: float = 0.0
    """Product of w over a sequence's tokens, its log clamped to +-20; summed over sequences."""
    seq_weight_sq_sum: float = 0.0
    masked: float = 0.0
    """Tokens whose weight a mask has set to 0."""
    truncated: float = 0.0
    """Tokens whose weight was above the cap."""
    value_loss_sum: float = 0.0
    """The critic's loss as differentiated (this and the fields below: 0 without a critic)."""
    value_sq_error_sum: float = 0.0
    """Squared error (return - value)^2: explained variance = 1 - mean of this / variance of the returns."""
    value_clipped: float = 0.0
    """Tokens whose value the critic's clip has changed, so that they have no gradient."""
    return_sum: float = 0.0
    return_sq_sum: float = 0.0


def merged(parts: Sequence[MicroStats]) -> MicroStats:
    """Return the statistics of all parts together."""
    values = [asdict(part) for part in parts]
    return MicroStats(
        **{name: (max if name.endswith("_max") else sum)(value[name] for value in values) for name in values[0]}
    )


@dataclass(frozen=True)
class Objective:
    """A loss and its statistics."""

    loss_sum: torch.Tensor
    """Summed loss, a scalar with gradient."""
    sums: dict[str, torch.Tensor]
    """Statistics, scalars without gradient, by their names in `MicroStats`."""


def policy_objective(
    algorithm: Algorithm,
    logprobs: torch.Tensor,
    generator_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    sequence_ids: torch.Tensor,
    proximal_logprobs: torch.Tensor | None = None,
    reference_logprobs: torch.Tensor | None = None,
    sequence_tokens: torch.Tensor | None = None,
    entropies: torch.Tensor | None = None,
) -> Objective:
    """Return the sum over tokens of a_t (w_t L_t + kl.coef KL_t - entropy_coef H_t).

    L is the surrogate's loss and a the aggregation's weight (`token_weights`). The KL term is there only with placement
    `loss`. w is a constant:

        ratio_to proximal    L's ratio is policy / proximal; w = proximal / generator, corrected
                             (decoupled PPO, arXiv 2110.00641 and 2505.24298)
        ratio_to generator   L's ratio is policy / generator and contains the weight: w = 0 where policy / generator is
                             masked, else 1
        L without a ratio    w = policy / generator, corrected

    With correction `none` w is 1 in each. The KL term and the entropy bonus (PPO, arXiv 1707.06347, eq. 9) are not
    weighted by w.

    Args:
        algorithm: the run file's `algorithm`.
        logprobs: [N] of the policy in training, with gradient.
        generator_logprobs: [N] of the policy that drew the tokens.
        advantages: [N].
        sequence_ids: [N]; tokens of one sequence need not follow one another.
        proximal_logprobs: [N] for ratio_to: proximal; None: the policy in training is itself the proximal one.
        reference_logprobs: [N], needed with kl.coef > 0.
        sequence_tokens: [N], length of each token's sequence for the aggregation, where some of its tokens are
            elsewhere; None: all are here.
        entropies: [N] of the policy in training, with gradient; needed with entropy_coef > 0.

    Raises:
        ValueError: there is a KL term but no reference, or an entropy bonus but no entropies.
    """
    options, surrogate = algorithm.off_policy, SURROGATES[algorithm.surrogate]
    current = logprobs.detach()
    if options.ratio_to == "proximal":
        old = target = current if proximal_logprobs is None else proximal_logprobs
    else:
        old, target = generator_logprobs, current
    corrected = correct(
        importance_weights(target - generator_logprobs, sequence_ids, options.level),
        options.correction,
        options.low,
        options.high,
    )
    in_ratio = options.ratio_to == "generator" and surrogate.has_ratio
    weights = (~corrected.masked).to(logprobs.dtype) if in_ratio else corrected.weights
    token_loss = surrogate.loss(LossInputs(logprobs, logprobs - old, advantages, sequence_ids), algorithm)
    losses = token_loss.loss * weights  # both are finite: log-ratios are bounded
    kl_sum = logprobs.new_zeros(())
    if algorithm.needs_reference:
        if reference_logprobs is None:
            raise ValueError("kl.coef > 0 needs reference_logprobs")
        kl = kl_estimate(logprobs, reference_logprobs, algorithm.kl.estimator)
        kl_sum = kl.detach().sum()
        if algorithm.kl.placement == "loss":
            losses = losses + algorithm.kl.coef * kl
    if algorithm.entropy_coef > 0:
        if entropies is None:
            raise ValueError("entropy_coef > 0 needs entropies")
        losses = losses - algorithm.entropy_coef * entropies
    lengths = sequence_lengths(sequence_ids)[sequence_ids] if sequence_tokens is None else sequence_tokens
    loss_sum = (losses * token_weights(lengths, algorithm.aggregation, logprobs.dtype)).sum()
    sums = {
        "loss_sum": loss_sum.detach(),
        "clipped": token_loss.clipped.sum(),
        "kl_sum": kl_sum,
        "ratio_sum": _ratio_sum(current - old, sequence_ids, surrogate.by_sequence),
        "masked": corrected.masked.sum(),
        "truncated": corrected.truncated.sum(),
    }
    return Objective(loss_sum, sums | _mismatch_sums(current - generator_logprobs, sequence_ids))


@torch.no_grad()
def _ratio_sum(log_ratios: torch.Tensor, sequence_ids: torch.Tensor, by_sequence: bool) -> torch.Tensor:
    """Return the sum of the surrogate's ratios, each of a token, or with `by_sequence` of its sequence."""
    if by_sequence:
        log_ratios = sequence_means(log_ratios, sequence_ids)[sequence_ids]
    return torch.exp(bounded(log_ratios)).double().sum()


@torch.no_grad()
def _mismatch_sums(log_ratios: torch.Tensor, sequence_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the statistics of how far trainer and generator differ, whatever the correction.

    Args:
        log_ratios: [N], the trainer's log-probability minus the generator's.
        sequence_ids: [N].
    """
    ratios = torch.exp(bounded(log_ratios)).double()
    sequence_ratios = torch.exp(bounded(sequence_sums(log_ratios, sequence_ids))).double()
    sequence_ratios *= sequence_lengths(sequence_ids) > 0  # a number that no token has would count as a ratio of 1
    return {
        "mismatch_sum": log_ratios.abs().sum(),
        "ratio_max": ratios.max() if len(ratios) else ratios.new_zeros(()),
        "weight_sum": ratios.sum(),
        "weight_sq_sum": ratios.square().sum(),
        "seq_weight_sum": sequence_ratios.sum(),
        "seq_weight_sq_sum": sequence_ratios.square().sum(),
    }


def value_objective(
    algorithm: PPOConfig,
    values: torch.Tensor,
    returns: torch.Tensor,
    sequence_tokens: torch.Tensor,
    old_values: torch.Tensor | None = None,
) -> Objective:
    """Return the sum of the critic's token losses, weighted like the policy's.

    Args:
        algorithm: the run file's `algorithm`.
        values: [N], with gradient.
        returns: [N].
        sequence_tokens: [N], length of each token's sequence.
        old_values: [N], values from before the step's first update; None: they are the current ones.
    """
    weights = token_weights(sequence_tokens, algorithm.aggregation, values.dtype)
    distance = algorithm.critic.value_clip
    if distance is None or old_values is None:
        token_loss = value_loss(values, returns)
    else:
        token_loss = clipped_value_loss(values, returns, old_values, distance)
    loss_sum = (token_loss.loss * weights).sum()
    exact = returns.double()  # the variance is a difference of these sums, which may be much larger
    sums = {
        "value_loss_sum": loss_sum.detach(),
        "value_sq_error_sum": (exact - values.detach().double()).square().sum(),
        "value_clipped": token_loss.clipped.sum(),
        "return_sum": exact.sum(),
        "return_sq_sum": exact.square().sum(),
    }
    return Objective(loss_sum, sums)


def value_advantages(
    algorithm: PPOConfig,
    batch: PackedBatch,
    values: torch.Tensor,
    logprobs: torch.Tensor | None,
    reference: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (GAE advantages, returns), both [N]; with `kl.placement: reward` the KL is part of the rewards.

    Args:
        algorithm: the run file's `algorithm`.
        batch: its `advantages` are its sequences' rewards.
        values: [N], the critic's.
        logprobs: [N], the policy's; None: not known.
        reference: [N], the reference's; None: there is none.
    """
    kl, penalties = algorithm.kl, None
    if logprobs is not None and reference is not None and kl.placement == "reward":
        penalties = kl.coef * kl_estimate(logprobs, reference, kl.estimator)
    rewards = token_rewards(batch.advantages, batch.row_ids, penalties)
    return gae(rewards, values, batch.row_ids, algorithm.gamma, algorithm.lam)
