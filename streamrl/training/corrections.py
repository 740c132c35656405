"""Off-policy corrections: weights of samples that another policy drew. Pure; nothing here has a gradient.

The weight of a token is w = pi_target / pi_generator, or its sequence's (see `importance_weights`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from streamrl.surrogates import bounded, sequence_means, sequence_sums

Level = Literal["token", "sequence", "geometric"]


class Correction(NamedTuple):
    """Importance weights after correction."""

    weights: torch.Tensor
    """Corrected weights, [N]."""
    masked: torch.Tensor
    """Tokens whose weight the mask has set to 0, [N] bool."""
    truncated: torch.Tensor
    """Tokens whose weight was above the cap, [N] bool."""


@torch.no_grad()
def importance_weights(log_weights: torch.Tensor, sequence_ids: torch.Tensor, level: Level) -> torch.Tensor:
    """Return w of each token, [N], from l = log pi_target - log pi_generator.

        token      w_t = exp(l_t)
        sequence   w_t = exp(sum of l over the sequence): unbiased, of high variance
        geometric  w_t = exp(mean of l over the sequence)

    Logs are clamped to +-20 (`LOG_RATIO_LIMIT`) after summing.

    Args:
        log_weights: [N].
        sequence_ids: [N].
        level: the unit that gets one weight.
    """
    match level:
        case "token":
            logs = log_weights
        case "sequence":
            logs = sequence_sums(log_weights, sequence_ids)[sequence_ids]
        case "geometric":
            logs = sequence_means(log_weights, sequence_ids)[sequence_ids]
    return torch.exp(bounded(logs))


@torch.no_grad()
def correct(
    weights: torch.Tensor, correction: Literal["none", "truncate", "mask"], low: float, high: float
) -> Correction:
    """Truncate or mask importance weights, or replace them by 1.

    none: 1. truncate: min(w, high), truncated importance sampling (Ionides 2008; between generator and trainer: AReaL,
    arXiv 2505.24298). mask: w within [low, high], 0 outside (IcePop, ring-1T, arXiv 2510.18855).

    Args:
        weights: [N].
        correction: kind of correction.
        low: least weight that the mask keeps.
        high: cap, or the largest weight that the mask keeps.
    """
    none = torch.zeros_like(weights, dtype=torch.bool)
    match correction:
        case "none":
            return Correction(torch.ones_like(weights), none, none)
        case "truncate":
            return Correction(weights.clamp(max=high), none, weights > high)
        case "mask":
            outside = (weights < low) | (weights > high)
            return Correction(weights.masked_fill(outside, 0.0), outside, none)
