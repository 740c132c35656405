"""The test whether tensors are finite: one reduction over each, so that it costs little beside what reads them anyway.

`torch.aminmax` passes NaN on and reads a tensor at the speed of the memory: 4 ms for 112 MB in fp32 on one core, where
their BLAKE3 checksum takes 40 ms. `torch.isfinite(x).all()`, which writes booleans first, takes 240 ms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, detached; a tensor that is not sharded is its own part."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of all ranks' parts, detached: a collective call if it is sharded."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def largest(tensors: Iterable[torch.Tensor]) -> list[float]:
    """Return the largest absolute value of each tensor's part on this rank.

    It is NaN or inf exactly if some entry is, and 0 for a tensor without entries. All values come in one transfer.

    Args:
        tensors: tensors of any shapes, of one device and of a floating type of 16 bits or more.
    """
    found = []
    for tensor in map(local, tensors):
        if tensor.numel():
            low, high = torch.aminmax(tensor)
            found.append(torch.maximum(low.neg(), high).double())
        else:
            found.append(torch.zeros((), dtype=torch.float64, device=tensor.device))
    return [float(value) for value in torch.stack(found).tolist()] if found else []


def first_not_finite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name of the first tensor with NaN or inf in this rank's part; None: all are finite."""
    sizes = zip(tensors, largest(tensors.values()), strict=True)
    return next((name for name, size in sizes if not math.isfinite(size)), None)
