"""RMS norms of vLLM on a CPU as transformers computes them, by vLLM's C functions.

vLLM uses these functions on GPUs only; on CPUs it composes each norm of up to a dozen torch operations (61 norms in a
step of SmolLM2-135M). In bf16 both differ from transformers, with which the policy is trained: the C functions multiply
by the weight before they round, and vLLM's composition does not round the sum of residual and input before it is
normalized. Here the functions normalize without a weight, which rounds as transformers does, and torch does the rest.
Built for CPUs without bf16 instructions, the C functions cut numbers off where they should round them, which makes
every norm 0.3 % too small: there they normalize in float32, and torch rounds.
"""

from __future__ import annotations

import functools

import torch
from vllm import ir

from streamrl.generation.instance.engine_variables import NORMS

TYPES = (torch.float32, torch.bfloat16)
"""Types for which the C functions were tried."""
MULTIPLE = 8
"""The C functions take sizes that are multiples of this."""


def _fits(x: torch.Tensor, weight: torch.Tensor | None, variance_size: int | None) -> bool:
    """Return whether the C functions support these arguments; they need contiguous rows."""
    alike = weight is None or weight.dtype == x.dtype
    return variance_size is None and alike and x.dtype in TYPES and x.shape[-1] % MULTIPLE == 0 and x.is_contiguous()


@functools.cache
def _rounds() -> bool:
    """Return whether the C functions round to bf16; if they cut off, half of the numbers tried come out otherwise."""
    x = torch.arange(1, 65, dtype=torch.bfloat16).view(1, 64)
    normed, exact = torch.empty_like(x), torch.empty(x.shape)
    torch.ops._C.rms_norm(normed, x, None, 1e-6)
    torch.ops._C.rms_norm(exact, x.float(), None, 1e-6)
    return torch.equal(normed, exact.bfloat16())


def _normalized(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, out: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.float32 or _rounds():
        torch.ops._C.rms_norm(out, x, None, epsilon)
    else:
        wide = x.float()
        normed = torch.empty_like(wide)
        torch.ops._C.rms_norm(normed, wide, None, epsilon)
        out.copy_(normed)
    return out if weight is None else out.mul_(weight)


@ir.ops.rms_norm.register_impl(
    NORMS, supports_args=lambda x, weight, epsilon, variance_size=None: _fits(x, weight, variance_size)
)
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    return _normalized(x, weight, epsilon, torch.empty_like(x))


@ir.ops.fused_add_rms_norm.register_impl(
    NORMS,
    supports_args=lambda x, x_residual, weight, epsilon, variance_size=None: (
        _fits(x, weight, variance_size) and _fits(x_residual, None, None) and x.dtype == x_residual.dtype
    ),
    inplace=True,
)
def fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _normalized(x_residual.add_(x), weight, epsilon, x), x_residual
