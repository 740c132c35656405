"""Numbers that come to the host beside the work that a GPU is given after them."""

from __future__ import annotations

import torch


class EarlyCopy:
    """A copy of a tensor's numbers, begun at once.

    `tensor.tolist()` would wait for all that the GPU has been given by then, such as a backward pass, after which the
    GPU would wait for the host.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        """Begin to copy a tensor, [n]."""
        self._done: torch.cuda.Event | None = None
        self._numbers = tensor.detach()
        if tensor.device.type == "cuda":
            self._numbers = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._numbers.copy_(tensor.detach(), non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(tensor.device))

    def arrived(self) -> list[float]:
        """Return the numbers, once they are there."""
        if self._done is not None:
            self._done.synchronize()
        numbers: list[float] = self._numbers.tolist()
        return numbers
