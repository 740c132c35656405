"""Norms, rotations and gated MLPs of a model on a CPU, by kernels of our own that are compiled on first use.

A model computes a norm or the rotation of queries and keys by their positions (RoPE) by a dozen operations and the gate
of an MLP by two, each of which reads and writes tensors as large as the layer's input or larger. A kernel reads and
writes each once (`layer_kernels.c`). All is fp32 inside and rounded once, as in vLLM's kernels; a model's own
operations round in between.

Families write these formulas in their own classes, some with changes. So each is tried against the kernel's formula on
random numbers before it takes the kernel, and keeps its own operations if it computes something else.

Layer norms stay with torch, but for their backward pass in bf16 (`layer_norms.py`), which needs no compiler.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from streamrl.machine import compiled_c
from streamrl.training.cpu_tensors import kernels_take, with_rows
from streamrl.training.layer_norms import LayerNorm
from streamrl.training.policy_model import Policy

log = logging.getLogger(__name__)

T = TypeVar("T")

SOURCE = Path(__file__).with_suffix(".c")
ROWS = 64
"""Rows whose shares of a weight's gradient the C file adds up."""
EPSILONS = "variance_epsilon", "eps"
"""Names of what is added to the mean square, by family."""
GATED = {"gate_proj", "up_proj", "down_proj"}
"""Names of the linear layers of a gated MLP."""
ROTATION = "apply_rotary_pos_emb"
"""Name of the function that rotates queries and keys in a family's Python module."""
SCALES = 1e-3, 1.0, 30.0
"""Sizes of the numbers that a module is tried with: small ones show its epsilon, large ones its bounds."""
CLOSE = 1e-5
"""Relative error up to which a module computes a kernel's formula, in fp32."""


class _Norm(ctypes.Structure):
    """`Norm` of the C file."""

    _fields_ = (
        ("rows", ctypes.c_long),
        ("width", ctypes.c_long),
        ("eps", ctypes.c_float),
        ("offset", ctypes.c_float),
        ("bf16", ctypes.c_int),
    )


class _Gate(ctypes.Structure):
    """`Gate` of the C file."""

    _fields_ = (("count", ctypes.c_long), ("gelu", ctypes.c_int), ("bf16", ctypes.c_int))


class _Rotation(ctypes.Structure):
    """`Rotation` of the C file."""

    _fields_ = (
        *((name, ctypes.c_long) for name in ("batch", "heads", "tokens", "width", "rotated")),
        ("from", ctypes.c_long * 3),
        ("to", ctypes.c_long * 3),
        ("bf16", ctypes.c_int),
        ("back", ctypes.c_int),
    )


class RMSNorm(torch.autograd.Function):
    """The norm x / sqrt(mean(x^2) + eps) (weight + offset) of every row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        """Compute x [..., D] and weight [D], of one of `cpu_tensors.TYPES`, -> [..., D].

        Raises:
            MemoryError: there is no memory for a row in fp32.
        """
        x, weight = x.contiguous(), weight.contiguous()
        out, inverse = torch.empty_like(x), torch.empty(x.shape[:-1], dtype=torch.float32)
        _call("rms_norm", _norm(x, eps, offset), x, weight, out, inverse)
        ctx.save_for_backward(x, weight, inverse)
        ctx.about = eps, offset
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x and weight."""
        x, weight, inverse = ctx.saved_tensors
        norm, of_x, parts = _norm(x, *ctx.about), torch.empty_like(x), None
        if ctx.needs_input_grad[1]:
            parts = torch.empty(-(-norm.rows // ROWS), norm.width, dtype=torch.float32)
        _call("rms_norm_backward", norm, x, weight, inverse, grads[0].to(x.dtype).contiguous(), of_x, parts)
        return of_x, None if parts is None else parts.sum(0).to(weight.dtype), None, None


class Rotate(torch.autograd.Function):
    """The rotation of each head's vectors by their tokens' positions; numbers of a head that have no angle stay."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Compute x [B, H, T, D] with cosines and sines [B, T, R], R <= D -> [B, H, T, D], laid out as x.

        Raises:
            MemoryError: there is no memory for a head in fp32.
        """
        ctx.save_for_backward(cos, sin)  # which all layers have in common
        return _rotated(x, cos, sin, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of x."""
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0].to(cos.dtype), cos, sin, back=True), None, None


class Gate(torch.autograd.Function):
    """The product of an activation of one tensor, SiLU or the tanh form of GELU, and another tensor."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, gelu: bool) -> torch.Tensor:
        """Compute two tensors of one shape, of one of `cpu_tensors.TYPES`, -> one of the same."""
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(up)
        _call("gate", _Gate(up.numel(), gelu, up.dtype == torch.bfloat16), gate, up, out)
        ctx.save_for_backward(gate, up)
        ctx.gelu = gelu
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of both tensors."""
        gate, up = ctx.saved_tensors
        of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
        about = _Gate(up.numel(), ctx.gelu, up.dtype == torch.bfloat16)
        _call("gate_backward", about, gate, up, grads[0].to(up.dtype).contiguous(), of_gate, of_up)
        return of_gate, of_up, None


def take_kernels(model: nn.Module) -> None:
    """Let what computes the kernels' formulas in a model take the kernels.

    Without a compiler on this machine only layer norms do. Tensors that are not plain ones of a CPU, in one of
    `cpu_tensors.TYPES`, go to the model's own operations. Rotations are functions of a family's Python module, and so
    taken by all its models in this process. A policy's head has kernels of its own (`head_kernels.py`).
    """
    if isinstance(model, Policy):
        model.fused = True
    compiled = _library() is not None
    taken = 0
    for module in model.modules():
        forward = None
        if isinstance(module, nn.LayerNorm):
            forward = _with_layer_norm(module)
        elif not compiled:
            continue
        elif type(module).__name__.endswith("RMSNorm"):
            forward = _with_norm(module)
        elif {name for name, _ in module.named_children()} >= GATED:
            forward = _with_gate(module)
        if forward is not None:
            module.forward = MethodType(forward, module)  # which a copy of the module has as its own
            taken += 1
    rotations = 0
    if compiled:
        rotations = sum(map(_take_rotation, {type(module).__module__ for module in model.modules()}))
    log.info("%d norms and MLPs and %d rotations take kernels for CPUs", taken, rotations)


def _with_layer_norm(module: nn.LayerNorm) -> Callable[..., torch.Tensor] | None:
    """Return a layer norm's forward pass that adds up gradients in fp32; None: it computes another formula."""
    weights = dict(module.named_parameters())
    if "weight" not in weights or not {*weights} <= {"weight", "bias"} or module.weight.dim() != 1:
        return None
    x = _numbers(len(module.weight))
    tensors = [x, *(x[at] for at in range(1, 1 + len(weights)))]

    def own_formula(x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        return functional_call(module, dict(zip(("weight", "bias"), given, strict=False)), (x,))

    def kernel(offset: float, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return LayerNorm.apply(x, weight + offset, bias, module.eps)

    offset = _formula_of(own_formula, {at: partial(kernel, at) for at in (0.0, 1.0)}, *tensors)
    if offset is None:
        return None
    own = type(module).forward

    def forward(self: Any, *args: Any, **named: Any) -> torch.Tensor:
        tensors = [*args, self.weight, *([] if self.bias is None else [self.bias])]
        if named or len(args) != 1 or args[0].dtype != torch.bfloat16 or not kernels_take(*tensors):
            return own(self, *args, **named)
        if args[0].shape[-1:] != self.weight.shape:
            return own(self, *args)
        return LayerNorm.apply(args[0], self.weight + offset if offset else self.weight, self.bias, self.eps)

    return forward


def _with_norm(module: Any) -> Callable[[Any, torch.Tensor], torch.Tensor] | None:
    """Return a norm's forward pass by the kernel; None: it computes another formula."""
    eps = next((getattr(module, name) for name in EPSILONS if hasattr(module, name)), None)
    weights = dict(module.named_parameters())
    if not isinstance(eps, float) or set(weights) != {"weight"} or weights["weight"].dim() != 1:
        return None
    x, weight = _numbers(len(weights["weight"])), _numbers(len(weights["weight"]))[1]
    kernels = {at: partial(_with_last, RMSNorm.apply, eps, at) for at in (0.0, 1.0)}
    offset = _formula_of(lambda x, weight: functional_call(module, {"weight": weight}, (x,)), kernels, x, weight)
    if offset is None:
        return None
    own = type(module).forward

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        if not kernels_take(hidden_states, self.weight) or hidden_states.shape[-1:] != self.weight.shape:
            return own(self, hidden_states)
        return RMSNorm.apply(hidden_states, self.weight, eps, offset)

    return forward


def _with_gate(module: Any) -> Callable[[Any, torch.Tensor], torch.Tensor] | None:
    """Return a gated MLP's forward pass by the kernel; None: it computes another formula."""

    def own(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        twin = copy.copy(module)  # with other linear layers: the formula in between is tried, whatever the weights
        given = {"gate_proj": _Times(gate), "up_proj": _Times(up), "down_proj": nn.Identity()}
        twin._modules = module._modules | given
        return twin(torch.ones_like(up))

    gate = _numbers(64)
    kernels = {kind: partial(_with_last, Gate.apply, kind) for kind in (False, True)}
    gelu = _formula_of(own, kernels, gate, gate.roll(1, 0))
    if gelu is None:
        return None

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(hidden_states), self.up_proj(hidden_states)
        if not kernels_take(gate, up):
            return self.down_proj(self.act_fn(gate) * up)
        return self.down_proj(Gate.apply(gate, up, gelu))

    return forward


def _take_rotation(name: str) -> bool:
    """Let a family's function that rotates queries and keys take the kernel, if it computes its formula.

    Args:
        name: of the family's Python module.

    Returns:
        Whether it does now, and did not before.
    """
    family: Any = sys.modules[name]
    own = getattr(family, ROTATION, None)
    if own is None or hasattr(own, "takes_kernel"):
        return False
    whole, parts = _rotates(own, 12, 12), _rotates(own, 12, 8)
    if not whole:
        return False

    @functools.wraps(own)
    def rotate(query: torch.Tensor, key: torch.Tensor, *angles: Any, **named: Any) -> Any:
        least = 0 if parts else query.shape[-1]
        if named or not all(_takes_angles(x, angles, least) for x in (query, key)):
            return own(query, key, *angles, **named)
        return Rotate.apply(query, *angles), Rotate.apply(key, *angles)

    rotate.takes_kernel = True  # type: ignore[attr-defined]
    setattr(family, ROTATION, rotate)
    return True


def _takes_angles(x: torch.Tensor, angles: Sequence[Any], least: int) -> bool:
    """Return whether the kernel rotates vectors by such cosines and sines, at least so many numbers of each head."""
    if len(angles) != 2 or not all(isinstance(one, torch.Tensor) and kernels_take(x, one) for one in angles):
        return False
    if x.dim() != 4 or any(one.requires_grad for one in angles) or angles[1].shape != angles[0].shape:
        return False
    of_rows, rotated = angles[0].shape[:-1], angles[0].shape[-1]
    return of_rows == (len(x), x.shape[2]) and rotated % 2 == 0 and least <= rotated <= x.shape[-1]


def _rotates(own: Callable[..., Any], width: int, rotated: int) -> bool:
    """Return whether a function rotates so many of a head's numbers as the kernel does, and leaves the others."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, heads, 5, width, generator=generator) for heads in (3, 1))
    cos, sin = torch.randn(2, 2, 5, rotated, generator=generator)

    def both(rotate: Callable[..., Any], query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return torch.cat(rotate(query, key, cos, sin), dim=1)

    def kernel(query: torch.Tensor, key: torch.Tensor, *angles: torch.Tensor) -> list[torch.Tensor]:
        return [Rotate.apply(x, *angles) for x in (query, key)]

    return _formula_of(partial(both, own), {True: partial(both, kernel)}, query, key) is True


class _Times(nn.Module):
    """A layer that multiplies its input by fixed factors."""

    def __init__(self, factors: torch.Tensor) -> None:
        super().__init__()
        self.factors = factors

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factors


def _with_last(function: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    """Call a function with the last two arguments, which are tensors, before the others."""
    return function(*arguments[-2:], *arguments[:-2])


def _numbers(width: int) -> torch.Tensor:
    """Return rows of random numbers, [48, width], of all `SCALES` in turn."""
    scales = torch.tensor(SCALES).repeat(16)
    return torch.randn(len(scales), width, generator=torch.Generator().manual_seed(0)) * scales[:, None]


def _formula_of(
    own: Callable[..., torch.Tensor], kernels: Mapping[T, Callable[..., torch.Tensor]], *tensors: torch.Tensor
) -> T | None:
    """Return which of the kernels computes what a model does, and its gradients.

    Args:
        own: the model's operations on these tensors.
        kernels: by kind.
        tensors: fp32.

    Returns:
        The kind; None: none, or the model refuses such tensors.
    """
    given = [one.clone().requires_grad_() for one in tensors]
    try:
        found = _with_gradients(own, given)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    return next((kind for kind, one in kernels.items() if _alike(found, _with_gradients(one, given))), None)


def _with_gradients(function: Callable[..., torch.Tensor], given: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.enable_grad():
        out = function(*given)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        return [out.detach(), *torch.autograd.grad(out, given, upstream)]


def _alike(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Return whether outputs and gradients are the same, row by row, but for rounding."""
    for one, other in zip(found, expected, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        error, size = (one - other).abs().amax(-1), other.abs().amax(-1)
        if not (error <= CLOSE * size).all():
            return False
    return True


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the compiled kernels; None: they could not be compiled."""
    library = compiled_c.load(SOURCE, "norms, rotations and gates take operations of torch")
    if library is not None:
        for name, about, tensors in (
            ("rms_norm", _Norm, 4),
            ("rms_norm_backward", _Norm, 6),
            ("rotate", _Rotation, 4),
            ("gate", _Gate, 3),
            ("gate_backward", _Gate, 5),
        ):
            function = getattr(library, name)
            function.argtypes = [ctypes.POINTER(about), *[ctypes.c_void_p] * tensors, ctypes.c_int]
            function.restype = None if about is _Gate else ctypes.c_int
    return library


def _norm(x: torch.Tensor, eps: float, offset: float) -> _Norm:
    width = x.shape[-1]
    return _Norm(x.numel() // width, width, eps, offset, x.dtype == torch.bfloat16)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool) -> torch.Tensor:
    x = with_rows(x)
    cos, sin = cos.float().contiguous(), sin.float().contiguous()
    out = torch.empty_like(x)
    distances = ((ctypes.c_long * 3)(*one.stride()[:3]) for one in (x, out))
    about = _Rotation(*x.shape, cos.shape[-1], *distances, x.dtype == torch.bfloat16, back)
    _call("rotate", about, x, cos, sin, out)
    return out


def _call(name: str, about: _Norm | _Rotation | _Gate, *tensors: torch.Tensor | None) -> None:
    """Call a function of the C file.

    Raises:
        MemoryError: there is no memory for a few rows in fp32.
    """
    pointers = (None if x is None else x.data_ptr() for x in tensors)
    if getattr(_library(), name)(about, *pointers, torch.get_num_threads()):
        assert not isinstance(about, _Gate)
        raise MemoryError(f"no memory for rows of {about.width} numbers in fp32")
