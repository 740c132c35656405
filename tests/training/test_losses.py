"""The loss against the formula written out in float64, its gradient against finite differences."""

from __future__ import annotations

import math

import pytest
import torch

from streamrl.training.losses import grpo_loss

LOW, HIGH = 0.2, 0.28


def written_out(logp: list[float], old: list[float], adv: list[float], ref: list[float] | None, kl: float) -> float:
    total = 0.0
    for i, (a, b, advantage) in enumerate(zip(logp, old, adv, strict=True)):
        ratio = math.exp(a - b)
        clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
        total -= min(ratio * advantage, clipped * advantage)
        if ref is not None:
            d = ref[i] - a
            total += kl * (math.exp(d) - d - 1)
    return total


# inside the clip; above it with A > 0 (clipped) and A < 0 (not); below it with A < 0 (clipped) and A > 0 (not); A = 0
LOGP = [-1.0, -0.5, -0.5, -2.0, -2.0, -1.3]
OLD = [-1.1, -1.0, -1.0, -1.0, -1.0, -1.3]
ADV = [0.7, 1.5, -1.5, -0.8, 0.8, 0.0]
REF = [-1.2, -0.4, -0.9, -2.2, -1.0, -1.3]


@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_loss_and_gradient(kl: float) -> None:
    def loss(values: torch.Tensor) -> torch.Tensor:
        old, adv, ref = (torch.tensor(x, dtype=torch.float64) for x in (OLD, ADV, REF))
        return grpo_loss(values, old, adv, LOW, HIGH, ref, kl).loss_sum

    logp = torch.tensor(LOGP, dtype=torch.float64, requires_grad=True)
    assert float(loss(logp).detach()) == pytest.approx(written_out(LOGP, OLD, ADV, REF if kl else None, kl), rel=1e-12)
    assert torch.autograd.gradcheck(loss, (logp,), eps=1e-7, atol=1e-6)


def test_only_tokens_beyond_the_clip_in_the_advantages_direction_are_clipped() -> None:
    tensors = [torch.tensor(x, dtype=torch.float64) for x in (LOGP, OLD, ADV)]
    logp = tensors[0].requires_grad_()
    result = grpo_loss(logp, tensors[1], tensors[2], LOW, HIGH)
    result.loss_sum.backward()
    assert int(result.clipped) == 2
    assert [float(g) == 0.0 for g in logp.grad] == [False, True, False, True, False, True]


def test_on_policy_gradient_is_the_policy_gradient() -> None:
    logp = torch.tensor([-1.0, -3.0], dtype=torch.float64, requires_grad=True)
    grpo_loss(
        logp, logp.detach().clone(), torch.tensor([2.0, -1.0], dtype=torch.float64), LOW, HIGH
    ).loss_sum.backward()
    assert logp.grad.tolist() == [-2.0, 1.0]


def test_kl_needs_a_reference_and_empty_batches_are_zero() -> None:
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="reference_logprobs"):
        grpo_loss(one, one, one, LOW, HIGH, None, 0.1)
    none = torch.zeros(0)
    assert float(grpo_loss(none, none, none, LOW, HIGH).loss_sum) == 0.0


def test_a_ratio_overflow_with_positive_advantage_is_clipped_to_a_finite_loss() -> None:
    result = grpo_loss(torch.tensor([0.0]), torch.tensor([-200.0]), torch.tensor([1.0]), LOW, HIGH)
    assert float(result.loss_sum) == pytest.approx(-(1 + HIGH))
