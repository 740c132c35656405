"""Layer norms in bf16 on a CPU, whose weights' gradients are added up in fp32.

torch adds them up in bf16, row by row: the more rows a micro-batch has, the more is rounded away (5 % of such a
gradient at 2,000 rows, 10 % at 8,000; of one whose rows cancel, several times that). It also rounds the rows' means and
deviations for the backward pass. Given weights in fp32, it computes the same output and keeps both in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

ROWS = 512
"""Rows that the backward pass copies to fp32 at once."""

_forward = torch.ops.aten.native_layer_norm.default
_backward = torch.ops.aten.native_layer_norm_backward.default


class LayerNorm(torch.autograd.Function):
    """The norm (x - mean(x)) / sqrt(var(x) + eps) weight + bias of every row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        """Compute x [..., D], weight [D] and bias [D], all of one type, -> [..., D]; the bits are torch's own."""
        out, mean, inverse = _forward(x, weight.shape, weight.float(), None if bias is None else bias.float(), eps)
        ctx.save_for_backward(x, weight, mean, inverse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, weight and bias."""
        x, weight, mean, inverse = ctx.saved_tensors
        shape, wide, grad = weight.shape, weight.float(), grads[0]
        asked = list(ctx.needs_input_grad[1:3])
        of_x = None
        if ctx.needs_input_grad[0]:
            # of the bias it takes only the type and shape
            of_x = _backward(grad, x, shape, mean, inverse, wide, wide, [True, False, False])[0]
        sums = [torch.zeros_like(wide) if one else None for one in asked]
        rows = ((grad, len(wide)), (x, len(wide)), (mean, 1), (inverse, 1))
        for grad_part, x_part, *about in zip(*(one.reshape(-1, width).split(ROWS) for one, width in rows), strict=True):
            _, *parts = _backward(grad_part.float(), x_part.float(), shape, *about, wide, wide, [False, *asked])
            for total, part in zip(sums, parts, strict=True):
                if total is not None:
                    total += part
        return of_x, *(None if one is None else one.to(weight.dtype) for one in sums), None
