"""RMS norms and gates of vLLM on a CPU as the trainer computes them: by `layer_ops`, or else by vLLM's C functions.

vLLM uses its C functions for norms on GPUs only; on CPUs it composes each norm of up to a dozen torch operations (61
norms in a step of SmolLM2-135M), and does not round the sum of residual and input before it is normalized, as
transformers does. Where `layer_ops` could not be compiled, vLLM's functions normalize without a weight, which rounds as
transformers does, and torch does the rest. Built for CPUs without bf16 instructions, they cut numbers off where they
should round them, which makes every norm 0.3 % too small: there they normalize in float32, and torch rounds.
"""

from __future__ import annotations

import functools

import torch
from vllm import ir
from vllm.model_executor.layers.activation import SiluAndMul

from streamrl.generation.instance.engine_variables import NORMS
from streamrl.generation.instance.layer_ops import ADD_AND_NORM, GATE, NORM, TYPES, rows_of
from streamrl.generation.instance.native_calls import library

MULTIPLE = 8
"""vLLM's C functions take sizes that are multiples of this."""


def _fits(x: torch.Tensor, weight: torch.Tensor | None, variance_size: int | None) -> bool:
    """Return whether the C functions support these arguments."""
    alike = weight is None or weight.dtype == x.dtype
    if variance_size is not None or not alike or x.dtype not in TYPES:
        return False
    return x.is_contiguous() and x.shape[-1] % MULTIPLE == 0 if library() is None else rows_of(x) is not None


@functools.cache
def _rounds() -> bool:
    """Return whether vLLM's functions round to bf16; if they cut off, half of the numbers tried come out otherwise."""
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
    if library() is None:
        return _normalized(x, weight, epsilon, torch.empty_like(x))
    normed: torch.Tensor = NORM(x, weight, epsilon)
    return normed


@ir.ops.fused_add_rms_norm.register_impl(
    NORMS,
    supports_args=lambda x, x_residual, weight, epsilon, variance_size=None: (
        _fits(x, weight, variance_size)
        and _fits(x_residual, None, None)
        and x.dtype == x_residual.dtype
        and x.is_contiguous()
        and x_residual.is_contiguous()
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
    if library() is None:
        return _normalized(x_residual.add_(x), weight, epsilon, x), x_residual
    ADD_AND_NORM(x, x_residual, weight, epsilon)
    return x, x_residual


def silu_and_mul(self: SiluAndMul, x: torch.Tensor) -> torch.Tensor:
    """Do the work of `SiluAndMul.forward_cpu`."""
    if library() is None or x.dtype not in TYPES or not x.is_contiguous():
        return self.forward_native(x)
    gated: torch.Tensor = GATE(x)
    return gated


def install() -> None:
    """Replace vLLM's gate of CPUs in this process; its norms are chosen by their name, `NORMS`.

    Raises:
        RuntimeError: this vLLM has no such method.
    """
    name = "forward_cpu"
    if not hasattr(SiluAndMul, name):
        raise RuntimeError(f"this vLLM has no SiluAndMul.{name}")
    setattr(SiluAndMul, name, silu_and_mul)
