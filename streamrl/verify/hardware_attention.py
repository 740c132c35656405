"""The attention's stage of `streamrl verify --hardware`: is it right on this device, and how fast?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from streamrl.training.merged_attention import MergedAttention, pieces_of
from streamrl.training.packing import GroupLayout
from streamrl.verify.hardware_measurement import Measurement, Size

SECONDS = 1.0
"""Seconds over which each way is repeated."""
BOUNDS = {torch.bfloat16: 0.02, torch.float32: 1e-4}
"""Largest relative error that is rounding."""


def measure(size: Size, device: torch.device, quickest: Callable[..., float]) -> Iterator[Measurement]:
    """Yield the error of the shared-prefix attention, and its time beside that of lone sequences.

    Args:
        size: heads, and lengths for the times.
        device: where it is computed.
        quickest: returns the seconds of one call of a function.

    Raises:
        ValueError: the error is more than rounding.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    width = size.hidden // size.heads
    torch.manual_seed(0)
    for window in (None, 100):
        small = GroupLayout(0, 100, (150, 30, 60))
        exact = [
            torch.randn(small.stop, heads, width, dtype=torch.float64)
            for heads in (size.heads, size.kv_heads, size.kv_heads, size.heads)
        ]
        ours = _with_gradients(partial(_shared, group=small, window=window), exact, device, dtype)
        theirs = _with_gradients(partial(_lone, group=small, window=window), exact, torch.device("cpu"), torch.float64)
        errors = torch.stack([(a - b).norm() / b.norm() for a, b in zip(ours, theirs, strict=True)])
        worst = float(errors.max())  # torch's: NaN is the largest
        says = "" if window is None else f", window {window}"
        yield Measurement(
            f"attention, error{says}",
            worst,
            "",
            f"{str(dtype).removeprefix('torch.')} against fp64, output and gradients, relative",
        )
        if not worst <= BOUNDS[dtype]:
            raise ValueError(f"attention on {device.type} is wrong: relative error {worst:.2g}")
    layout = GroupLayout(0, size.attention[0], size.attention[1])
    inputs = [
        torch.randn(layout.stop, heads, width, dtype=dtype, device=device, requires_grad=True)
        for heads in (size.heads, size.kv_heads, size.kv_heads)
    ]
    times = {
        name: quickest(partial(_both_passes, compute, inputs, layout), SECONDS)
        for name, compute in (("shared", _shared), ("lone", _lone))
    }
    note = f"prompt {layout.prompt_length}, completions {layout.completion_lengths}, forward and backward"
    yield Measurement("attention, shared prompt", times["shared"] * 1e3, "ms", note)
    yield Measurement(
        "attention, lone sequences", times["lone"] * 1e3, "ms", f"{times['lone'] / times['shared']:.2f} x as long"
    )


def _both_passes(compute: Callable[..., torch.Tensor], inputs: list[torch.Tensor], layout: GroupLayout) -> None:
    compute(*inputs, layout, None).sum().backward()


def _shared(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: GroupLayout, window: int | None) -> torch.Tensor:
    found: torch.Tensor = MergedAttention.apply(
        q, k, v, None, pieces_of((group,), window, q.device), q.shape[-1] ** -0.5
    )
    return found


def _lone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: GroupLayout, window: int | None) -> torch.Tensor:
    """Compute the same by torch's own attention, sequence by sequence."""
    prompt = torch.arange(group.prompt_length, device=q.device)
    parts, begin = [], group.prompt_length
    for length in (None, *group.completion_lengths):
        own = torch.arange(0) if length is None else torch.arange(begin, begin + length)
        rows = torch.cat([prompt, own.to(q.device)])
        begin += length or 0
        at = torch.arange(len(rows), device=q.device)
        distance = at[:, None] - at[None]
        mask = None if window is None else (distance >= 0) & (distance < window)
        alone = [x[rows].transpose(0, 1)[None] for x in (q, k, v)]
        out = F.scaled_dot_product_attention(
            alone[0], alone[1], alone[2], attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )[0].transpose(0, 1)
        parts.append(out if length is None else out[group.prompt_length :])
    return torch.cat(parts)


def _with_gradients(
    compute: Callable[..., torch.Tensor], exact: list[torch.Tensor], device: torch.device, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return the output and the gradients of queries, keys and values, in fp64 on the CPU."""
    *inputs, weights = exact
    leaves = [x.to(device, dtype).requires_grad_() for x in inputs]
    out = compute(*leaves)
    grads = torch.autograd.grad(out, leaves, weights.to(device, dtype))
    return [x.detach().cpu().double() for x in (out, *grads)]
