"""Muon for many small matrices on a CPU: matrices of one shape are orthogonalised in one batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import overload

import torch

STEPS = 5
"""Steps of Newton-Schulz."""
MOMENTUM = 0.95
WEIGHT_DECAY = 0.01


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """Nearest semi-orthogonal matrices, approximately (Newton-Schulz).

    ``matrices`` and the result have shape (count, rows, columns).
    """
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, then orthogonalised updates; for hidden weight matrices only (all of two dimensions)."""

    def __init__(self, params: Iterable[torch.nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every matrix from its gradient."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
            for param in group["params"]:
                by_shape[param.shape].append(param)
            for (rows, columns), params in by_shape.items():
                updates = []
                for param in params:
                    assert param.grad is not None
                    buffer = self.state[param].setdefault("momentum", torch.zeros_like(param))
                    buffer.lerp_(param.grad, 1 - MOMENTUM)
                    updates.append(param.grad.lerp(buffer, MOMENTUM))
                rate = group["lr"] * max(1.0, rows / columns) ** 0.5
                for param, update in zip(params, orthogonalise(torch.stack(updates)), strict=True):
                    param.mul_(1 - group["lr"] * WEIGHT_DECAY).add_(update, alpha=-rate)
        return loss
