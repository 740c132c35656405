"""The group of the weight path `nccl`: vLLM's PyNccl, between memories of GPUs.

All else of this path is `broadcast.py` and `vllm_broadcast.py`, which `gloo` runs on CPUs. It has not been run itself:
it needs a trainer GPU and an instance GPU in one site.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Self

import torch

from streamrl.weights.backends.communicator import MEET_S, Communicator, GroupStore, asked, within

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

UNIQUE_ID = "nccl"
"""Key of the store that has the group's NCCL id."""


class NcclCommunicator(Communicator):
    """An NCCL communicator of its own, outside torch's process groups."""

    def __init__(self, nccl: PyNcclCommunicator, met: GroupStore, rank: int, limit_s: float) -> None:
        super().__init__(limit_s, met, rank)
        self.device, self._nccl = nccl.device, nccl

    @classmethod
    def connect(
        cls, met: GroupStore, host: str, rank: int, world: int, limit_s: float, stopped: Callable[[], str]
    ) -> Self:
        """Connect to all others; the id that NCCL needs comes as bytes through the store, and no pickle does."""
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
        from vllm.utils.nccl import unpinned_nccl_env

        if rank == 0:
            met.store.set(UNIQUE_ID, bytes(NCCLLibrary().ncclGetUniqueId().internal).hex())
        unique_id = bytes.fromhex(asked(lambda: met.store.get(UNIQUE_ID), stopped).decode())
        device = torch.accelerator.current_device_index()

        def connected() -> PyNcclCommunicator:
            torch.accelerator.set_device_index(device)  # each thread has one of its own
            return PyNcclCommunicator.from_unique_id_bytes(unique_id, rank, world, device)

        with unpinned_nccl_env():  # NCCL has no limit for those that it does not reach
            nccl = within(MEET_S, connected, f"{world - 1} others in NCCL", stopped)
        return cls(nccl, met, rank, limit_s)

    def _begin(self, tensor: torch.Tensor) -> Callable[[], None]:
        self._nccl.broadcast(tensor, src=0, stream=torch.cuda.current_stream())
        sent = torch.cuda.Event()
        sent.record()
        return lambda: self._wait_until(sent.query)

    def close(self) -> None:
        """Abort what is under way, close all connections, and tell the others."""
        self.abort("closed")
        self._leave()
        self._nccl.destroy()
