"""A kernel's results on one thread and on several, and for tensors that lie in memory in another order."""

from __future__ import annotations

from collections.abc import Callable

import torch


def check_same_bits(
    kernel: Callable[[list[torch.Tensor]], torch.Tensor], make: Callable[[bool], list[torch.Tensor]]
) -> None:
    """Check that outputs and gradients are the same to the bit.

    Args:
        kernel: the function.
        make: returns its tensors; True: the same numbers, in another order in memory.
    """
    before, results = torch.get_num_threads(), []
    try:
        for threads, ordered_otherwise in ((1, False), (2, False), (1, True)):
            torch.set_num_threads(threads)
            tensors = [one.detach().requires_grad_() for one in make(ordered_otherwise)]
            out = kernel(tensors)
            upstream = torch.ones(1).expand(out.shape)  # a gradient without memory of its own
            results.append([out.detach(), *torch.autograd.grad(out, tensors, upstream)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], other, strict=True))
