"""A proof, before an AdamW step, that the step leaves weights and moments finite. So nothing ever has to be undone.

    m' = b1 m + (1 - b1) g        |m'| <= max(|m|, |g|)
    v' = b2 v + (1 - b2) g^2      v'   <= max(v, g^2)
    p' = p (1 - lr wd) - lr (m' / (1 - b1^t)) / (sqrt(v' / (1 - b2^t)) + eps)
                                  |p'| <= |p| (1 + lr wd) + lr |m'| / ((1 - b1) eps)

(Loshchilov and Hutter, arXiv 1711.05101, algorithm 2.) If these bounds and the quotient |m'| / eps fit into fp32, every
value on the way is finite. They fit with room to spare in any real training: with eps 1e-8 and gradients clipped to 1
the last term is lr * 1e9. What fails the test is NaN, inf, or a value within a few orders of magnitude of fp32's limit.
"""

from __future__ import annotations

import math

import torch

from streamrl.config.optimizer import OptimizerConfig

LARGEST = torch.finfo(torch.float32).max / 4
"""Limit on every bound; the factor covers rounding."""


def stays_finite(
    weight: float, gradient: float, moments: tuple[float, float], lr: float, options: OptimizerConfig
) -> bool:
    """Return whether an AdamW step on fp32 tensors provably leaves them finite.

    Args:
        weight: largest absolute value of the weights.
        gradient: bound on the absolute values of the gradient, after clipping.
        moments: largest absolute values of AdamW's two moments; 0 before the first step.
        lr: learning rate of the step.
        options: the other options of AdamW.
    """
    inputs = (weight, gradient, *moments, lr)
    if not all(map(math.isfinite, inputs)):
        return False
    first, second = max(moments[0], gradient), max(moments[1], gradient * gradient)
    share = 1.0 - options.betas[0]
    quotient = first / options.eps / share if share > 0 else math.inf
    moved = weight * (1.0 + lr * options.weight_decay) + lr * quotient
    return max(first, second, quotient, moved) < LARGEST
