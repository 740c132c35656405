"""Which tensors the kernels of our own for CPUs take, and how (`group_attention.py`, `layer_kernels.py`,
`layer_norms.py`, `head_kernels.py`, `gradient_sums.py`)."""

from __future__ import annotations

import torch

TYPES = torch.float32, torch.bfloat16
"""Types that the kernels compute from; inside they have fp32."""


def kernels_take(*tensors: torch.Tensor) -> bool:
    """Return whether tensors are plain ones of a CPU, of one of `TYPES` together.

    Others have no memory of their own: `FakeTensor`, `DTensor`.
    """
    dtype = tensors[0].dtype
    return dtype in TYPES and all(is_plain(one) and one.dtype == dtype for one in tensors)


def is_plain(x: torch.Tensor) -> bool:
    """Return whether a tensor has memory of its own that a CPU reads."""
    return type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type == "cpu"


def with_rows(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose rows' elements are next to each other: this one, or a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()
