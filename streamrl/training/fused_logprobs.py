"""Log-probabilities of target tokens on GPUs, from logits that exist in bf16 or fp16 only.

The formulas are those of `token_logprobs.py`. There, each operation writes its fp32 result of the size of the logits;
here torch compiles them into kernels that read the product of the head once or twice and write either a few numbers
per token or the logits' gradient, in the type of the product. The arithmetic in between is fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensor

from streamrl.training.compiled_formulas import compiled_on_gpus

LEAST_SHIFTED = -1e4
"""Bound of logits below the largest, in the entropy: there the exponential is 0, and 0 times -inf is not."""


@dataclass(frozen=True)
class Changes:
    """What becomes of the output projection before a token is drawn: softcap tanh(scale z / softcap) / temperature."""

    scale: float
    softcap: float | None
    temperature: float


def fuses(weight: torch.Tensor) -> bool:
    """Return whether the kernels can be compiled for a head's weight: on a GPU, in a type of 16 bits."""
    half = weight.dtype in (torch.bfloat16, torch.float16)
    return weight.device.type == "cuda" and half and not isinstance(weight, FakeTensor)


@compiled_on_gpus((1,), ())
def log_sums(
    products: torch.Tensor, targets: torch.Tensor, changes: Changes
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reduce each token's logits.

    Args:
        products: output projection [n, V].
        targets: token ids [n].
        changes: what becomes of them.

    Returns:
        log p of the targets; sum_v exp(z_v - max z); max z; the entropy in nats: fp32 [n] each.
    """
    logits, _ = _changed(products, changes)
    largest = logits.amax(-1, keepdim=True)
    shifted = logits - largest
    exponentials = shifted.exp()
    others = torch.where(_is_target(products, targets), 0.0, exponentials).sum(-1)
    mean = (exponentials * shifted.clamp(min=LEAST_SHIFTED)).sum(-1)
    of_targets = shifted.gather(-1, targets[:, None])[:, 0]
    excess = others + torch.expm1(of_targets)  # of the sum over 1, the likeliest token's
    log_total = torch.log1p(excess)
    totals = 1.0 + excess
    return of_targets - log_total, totals, largest[:, 0], log_total - mean / totals


@compiled_on_gpus((1,), (), (), (), ())
def slopes(
    products: torch.Tensor,
    targets: torch.Tensor,
    largest: torch.Tensor,
    of_others: torch.Tensor,
    of_targets: torch.Tensor,
    changes: Changes,
) -> torch.Tensor:
    """Return the gradient in the output projection, [n, V], in its type.

    Args:
        products: output projection [n, V].
        targets: token ids [n].
        largest: max z [n].
        of_others: the gradient in z_v is this times exp(z_v - max z), [n].
        of_targets: the gradient in the target's z, [n].
        changes: what becomes of the projection.
    """
    logits, cap_slope = _changed(products, changes)
    others = (logits - largest[:, None]).exp() * of_others[:, None]
    gradient = torch.where(_is_target(products, targets), of_targets[:, None], others)
    if cap_slope is not None:
        gradient = gradient * cap_slope
    return gradient.to(products.dtype)


def _changed(products: torch.Tensor, changes: Changes) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the logits z in fp32, and the slope of the soft cap (None: there is none)."""
    logits = products.float() * changes.scale
    slope = None
    if changes.softcap is not None:
        bounded = torch.tanh(logits / changes.softcap)
        logits, slope = bounded * changes.softcap, 1.0 - bounded.square()
    return logits / changes.temperature, slope


def _is_target(products: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.arange(products.shape[-1], device=products.device) == targets[:, None]


def _add_product(total: torch.Tensor, gradient: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add gradient^T hidden to the total [V, d], which is fp32, by one kernel where there is one: on GPUs."""
    if total.device.type == "cuda":
        about = total, gradient.t(), hidden, total.dtype
        torch.ops.aten.addmm.dtype_out(*about, out=total)
    else:
        total += gradient.t() @ hidden


class FusedTokenLogprobs(torch.autograd.Function):
    """The autograd function behind `token_logprobs` on GPUs."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        changes: Changes,
        at_once: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute (log-probabilities, entropies), fp32 [N]; products of `at_once` tokens exist at a time."""
        hidden = hidden.to(weight.dtype)
        found = torch.empty(4, len(targets), dtype=torch.float32, device=hidden.device)
        for first in range(0, len(targets), at_once):
            part = slice(first, first + at_once)
            products = torch.nn.functional.linear(hidden[part], weight, bias)
            sums = log_sums(products, targets[part], changes)
            for row, values in zip(found, sums, strict=True):
                row[part] = values
            del products
        logprobs, totals, largest, entropy = found.unbind()
        ctx.save_for_backward(hidden, weight, bias, targets, logprobs, totals, largest)
        ctx.changes, ctx.at_once = changes, at_once
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients by d logp_n / d z_nv = 1[v = target_n] - softmax(z_n)_v."""
        hidden, weight, bias, targets, logprobs, totals, largest = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        inner = grads[0] * (ctx.changes.scale / ctx.changes.temperature)
        of_others, of_targets = -inner / totals, inner * -torch.expm1(logprobs)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        for first in range(0, len(targets), ctx.at_once):
            part = slice(first, first + ctx.at_once)
            products = torch.nn.functional.linear(hidden[part], weight, bias)
            about = targets[part], largest[part], of_others[part], of_targets[part]
            gradient = slopes(products, *about, ctx.changes)
            del products
            if grad_hidden is not None:
                torch.mm(gradient, weight, out=grad_hidden[part])
            if grad_weight is not None:
                _add_product(grad_weight, gradient, hidden[part])
            if grad_bias is not None:
                grad_bias += gradient.sum(0, dtype=torch.float32)
            del gradient
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None, None, None),
        )
