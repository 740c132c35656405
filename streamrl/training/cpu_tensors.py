"""Which tensors the kernels of our own for CPUs take, and how (`group_attention.py`, `layer_kernels.py`,
`head_kernels.py`)."""

from __future__ import annotations

import torch

TYPES = torch.float32, torch.bfloat16
"""Types that the kernels compute from; inside they have fp32."""


def kernels_take(*tensors: torch.Tensor) -> bool:
    """Return whether tensors are plain ones of a CPU, of one of `TYPES` together.

    Others have no memory of their own: `FakeTensor`, `DTensor`.
    """
    dtype = tensors[0].dtype
    return dtype in TYPES and all(
        type(one) in (torch.Tensor, torch.nn.Parameter) and one.dtype == dtype and one.device.type == "cpu"
        for one in tensors
    )


def with_rows(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose rows' elements are next to each other: this one, or a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()
