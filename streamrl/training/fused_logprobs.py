"""Log-probabilities of target tokens by kernels that read the head's product in its own type.

The formulas are those of `token_logprobs.py`. There, each operation writes its fp32 result of the size of the logits;
here kernels read the product once or twice and write either a few numbers per token or the logits' gradient, in the
type of the product. The arithmetic in between is fp32. For GPUs torch compiles the formulas below into kernels, for
products in bf16 or fp16; CPUs have those of `head_kernels.py`, for bf16 and fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch._subclasses import FakeTensor

from streamrl.training import head_kernels
from streamrl.training.compiled_formulas import compiled_on_gpus
from streamrl.training.head_kernels import Changes
from streamrl.training.packing import filled_rows

LEAST_SHIFTED = -1e4
"""Bound of logits below the largest, in the entropy: there the exponential is 0, and 0 times -inf is not."""


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


class Kernels(NamedTuple):
    """What reduces products and computes their gradient: functions like `log_sums` and `slopes`.

    Products may have more rows than there are targets. What `slopes` returns has as many, with zeros in the others, and
    may be the products themselves.
    """

    log_sums: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]
    slopes: Callable[..., torch.Tensor]


COMPILED = Kernels(log_sums, slopes)
OF_CPUS = Kernels(head_kernels.log_sums, head_kernels.slopes_)


def kernels_for(weight: torch.Tensor) -> Kernels | None:
    """Return the kernels for products with a head's weight; None: there are none."""
    if weight.device.type == "cuda":
        half = weight.dtype in (torch.bfloat16, torch.float16)
        return COMPILED if half and not isinstance(weight, FakeTensor) else None
    return OF_CPUS if head_kernels.has_kernels(weight) else None


def product(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the output projection of hidden [n, d] in the weight's type, [n, V], also under autocast."""
    return torch.nn.functional.linear(hidden, weight, bias).to(weight.dtype)


def parts_of_rows(start: int, stop: int, most: int) -> Iterator[slice]:
    """Yield slices of at most `most` rows that cover start to stop."""
    for first in range(start, stop, max(1, most)):
        yield slice(first, min(first + most, stop))


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


def _sum_of_products(
    total: torch.Tensor | None, gradient: torch.Tensor, hidden: torch.Tensor, is_only: bool
) -> torch.Tensor:
    """Return the total [V, d], which is fp32, plus gradient^T hidden; on GPUs one kernel adds it.

    The only product of a CPU has the type of its factors.
    """
    if total is None and is_only and not gradient.is_cuda:
        return gradient.t() @ hidden
    if total is None:
        total = torch.zeros(gradient.shape[1], hidden.shape[1], dtype=torch.float32, device=hidden.device)
    if total.is_cuda:
        about = total, gradient.t(), hidden, total.dtype
        torch.ops.aten.addmm.dtype_out(*about, out=total)
    elif gradient.dtype == total.dtype:
        total.addmm_(gradient.t(), hidden)
    else:
        total += gradient.t() @ hidden
    return total


class FusedTokenLogprobs(torch.autograd.Function):
    """The autograd function behind `token_logprobs` where there are kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        changes: Changes,
        kernels: Kernels,
        at_once: int,
        keeps: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute (log-probabilities, entropies), fp32 [N].

        Products of `at_once` tokens exist at a time. With `keeps` there is one, of all tokens, which stays in memory
        for the backward pass; that replaces it, and so can run once.
        """
        hidden = hidden.to(weight.dtype)
        products: torch.Tensor | None = None
        found = torch.empty(4, len(targets), dtype=torch.float32, device=hidden.device)
        for part in parts_of_rows(0, len(targets), len(targets) if keeps else at_once):
            products = product(filled_rows(hidden[part]), weight, bias)
            sums = kernels.log_sums(products, targets[part], changes)
            for row, values in zip(found, sums, strict=True):
                row[part] = values
            if not keeps:
                products = None  # before the next part's exist
        logprobs, totals, largest, entropy = found.unbind()
        ctx.save_for_backward(hidden, weight, bias, targets, logprobs, totals, largest, products)
        ctx.about, ctx.is_used = (changes, kernels, at_once, keeps), False
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients by d logp_n / d z_nv = 1[v = target_n] - softmax(z_n)_v."""
        changes, kernels, at_once, keeps = ctx.about
        if ctx.is_used and keeps:
            raise RuntimeError("a second backward pass through the head, whose logits the first one has replaced")
        ctx.is_used = True
        hidden, weight, bias, targets, logprobs, totals, largest, kept = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        inner = grads[0] * (changes.scale / changes.temperature)
        of_others, of_targets = -inner / totals, inner * -torch.expm1(logprobs)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight: torch.Tensor | None = None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        parts = [*parts_of_rows(0, len(targets), len(targets) if keeps else at_once)]
        for part in parts:
            inputs = filled_rows(hidden[part])
            products = product(inputs, weight, bias) if kept is None else kept
            about = targets[part], largest[part], of_others[part], of_targets[part]
            gradient = kernels.slopes(products, *about, changes)
            del products
            if grad_hidden is not None:
                grad_hidden[part] = (gradient @ weight)[: part.stop - part.start]
            if needs_weight:
                grad_weight = _sum_of_products(grad_weight, gradient, inputs, len(parts) == 1)
            if grad_bias is not None:
                grad_bias += gradient.sum(0, dtype=torch.float32)
            del gradient
        if needs_weight and grad_weight is None:
            grad_weight = torch.zeros_like(weight)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None, None, None, None, None),
        )
