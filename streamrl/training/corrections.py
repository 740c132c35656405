"""Off-policy corrections: how far samples are trusted that another policy drew. Pure; nothing here has a gradient.

The weight of a token is w = pi_target / pi_generator, or its sequence's (see `importance_weights`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from streamrl.training.losses import bounded, sequence_means, sequence_sums

Level = Literal["token", "sequence", "geometric"]


class Correction(NamedTuple):
    """Corrected weights."""

    weights: torch.Tensor
    """[N]."""
    masked: torch.Tensor
    """[N] bool: tokens whose weight the mask has set to 0."""
    truncated: torch.Tensor
    """[N] bool: tokens whose weight was above the cap."""


@torch.no_grad()
def importance_weights(log_weights: torch.Tensor, sequence_ids: torch.Tensor, level: Level) -> torch.Tensor:
    """w of each token, [N], from l = log pi_target - log pi_generator.

        token      w_t = exp(l_t)
        sequence   w_t = exp(sum of l over the sequence): unbiased, of high variance
        geometric  w_t = exp(mean of l over the sequence)

    Logs are cut to +-20 (`LOG_RATIO_LIMIT`) after summing.

    Args:
        log_weights: [N].
        sequence_ids: [N].
        level: what one weight is for.
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
    """Truncates or masks importance weights.

    truncate: min(w, high), truncated importance sampling (Ionides 2008; between generator and trainer: AReaL,
    arXiv 2505.24298). mask: w within [low, high], 0 outside (IcePop, ring-1T, arXiv 2510.18855).

    Args:
        weights: [N].
        correction: what to do.
        low: least weight that the mask lets through.
        high: cap, or the largest weight that the mask lets through.
    """
    none = torch.zeros_like(weights, dtype=torch.bool)
    match correction:
        case "none":
            return Correction(weights, none, none)
        case "truncate":
            return Correction(weights.clamp(max=high), none, weights > high)
        case "mask":
            outside = (weights < low) | (weights > high)
            return Correction(weights.masked_fill(outside, 0.0), outside, none)
