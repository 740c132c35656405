"""Slots of memory that one process makes and others of its machine open: in host memory, or on GPUs.

    host   one file in memory (`memfd_create`). It has no name in any file system, so nothing is left of it however its
           processes end, and the size of /dev/shm does not matter. Others get its descriptor over a Unix socket
    cuda   memory of torch's allocator, exported by CUDA IPC handles, which are plain bytes. It has run between
           processes with one GPU, and not between two GPUs. `ipc.py` is the same for both

`SlotsOffer` is what a process must know to open them, as plain data; no pickle is involved.
"""

from __future__ import annotations

import functools
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from io import FileIO
from typing import Self

import msgspec
import torch


class CudaHandle(msgspec.Struct, frozen=True, array_like=True):
    """One slot on a GPU: what torch's `_share_cuda_` returns, without the device, whose number is its own process's."""

    memory: bytes
    size: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_sync: bool


class SlotsOffer(msgspec.Struct, frozen=True):
    """Slots, as those who open them get to know of them."""

    kind: str
    number: int
    size: int
    """Bytes of each slot."""
    handles: list[CudaHandle] = []
    """What opens each slot on a GPU; []: they are in host memory."""


class SharedSlots(ABC):
    """Slots that several processes of this machine read and write."""

    kind: str
    device: torch.device
    slots: Sequence[torch.Tensor]
    """uint8 [size] each."""

    @classmethod
    @abstractmethod
    def make(cls, number: int, size: int) -> Self:
        """Make slots of `size` bytes."""

    @abstractmethod
    def offer(self) -> tuple[SlotsOffer, list[int]]:
        """Return what others need in order to open them: plain data, and descriptors of files."""

    @classmethod
    @abstractmethod
    def opened(cls, offer: SlotsOffer, descriptors: Sequence[int]) -> Self:
        """Open another process's slots; the descriptors stay the caller's.

        Raises:
            OSError, RuntimeError: they cannot be opened.
        """

    @abstractmethod
    def settle(self) -> None:
        """Wait until what this thread has copied into slots, or out of them, is there."""

    def close(self) -> None:
        """Let go of the slots."""
        self.slots = ()


class HostSlots(SharedSlots):
    """Slots in host memory."""

    kind, device = "host", torch.device("cpu")

    def __init__(self, file: FileIO, number: int, size: int) -> None:
        self._file = file
        self.slots = torch.frombuffer(mmap.mmap(file.fileno(), number * size), dtype=torch.uint8).split(size)

    @classmethod
    def make(cls, number: int, size: int) -> Self:
        """Make slots; the kernel gives them memory as it is written to."""
        file = FileIO(os.memfd_create("streamrl-slots"), "r+")
        file.truncate(number * size)
        return cls(file, number, size)

    def offer(self) -> tuple[SlotsOffer, list[int]]:
        """Return what others need in order to open them."""
        return SlotsOffer(self.kind, len(self.slots), len(self.slots[0])), [self._file.fileno()]

    @classmethod
    def opened(cls, offer: SlotsOffer, descriptors: Sequence[int]) -> Self:
        """Map another process's slots."""
        return cls(FileIO(os.dup(descriptors[0]), "r+"), offer.number, offer.size)

    def settle(self) -> None:
        """Return at once: the CPU has copied when `copy_` returns."""

    def close(self) -> None:
        """Unmap the slots, and close their file."""
        super().close()
        self._file.close()


class CudaSlots(SharedSlots):
    """Slots on the trainer's GPU. It was tried with one GPU; with two, what follows was read.

    Sources are torch's (`torch/csrc/StorageSharing.cpp`, `CudaIPCTypes.cpp`) and CUDA's manual: who opens a handle
    maps the memory into the context of a device of its own, and asks CUDA to let that device access the one that has
    the memory (`cudaIpcMemLazyEnablePeerAccess`). So trainer and instance may have different GPUs of one machine if
    these can access each other; otherwise opening fails, and so does the run, before the first weight is sent. NCCL
    opens memory of GPUs in this way that `CUDA_VISIBLE_DEVICES` hides from the process that opens it.
    """

    kind = "cuda"

    def __init__(self, device: torch.device, slots: Sequence[torch.Tensor], handles: Sequence[CudaHandle]) -> None:
        self.device, self.slots, self._handles = device, slots, handles

    @classmethod
    def make(cls, number: int, size: int) -> Self:
        """Make slots on the current device, or return those that this process has made before."""
        device = torch.device("cuda", torch.cuda.current_device())
        return cls(device, *_exported(device, number, size))

    def offer(self) -> tuple[SlotsOffer, list[int]]:
        """Return what others need in order to open them."""
        return SlotsOffer(self.kind, len(self.slots), len(self.slots[0]), list(self._handles)), []

    @classmethod
    def opened(cls, offer: SlotsOffer, descriptors: Sequence[int]) -> Self:
        """Map another process's slots for the current device."""
        device = torch.device("cuda", torch.cuda.current_device())
        slots = []
        for one in offer.handles:
            storage = torch.UntypedStorage._new_shared_cuda(
                device.index,
                one.memory,
                one.size,
                one.offset,
                one.counter,
                one.counter_offset,
                one.event,
                one.event_sync,
            )
            slots.append(torch.empty(0, dtype=torch.uint8, device=device).set_(storage))
        return cls(device, slots, offer.handles)

    def settle(self) -> None:
        """Wait for this thread's stream, and so for nothing that another process does."""
        torch.cuda.current_stream(self.device).synchronize()


@functools.cache
def _exported(device: torch.device, number: int, size: int) -> tuple[list[torch.Tensor], list[CudaHandle]]:
    """Make and export slots that live as long as this process.

    CUDA does not allow freeing exported memory that somebody still has open, and a member of an earlier group may.
    torch counts those who do, but not down for one that was killed: each death would cost the memory of a group.
    """
    slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(number)]
    return slots, [CudaHandle(*slot.untyped_storage()._share_cuda_()[1:]) for slot in slots]


def kind_here() -> type[SharedSlots]:
    """Return the kind of slots that fits where this process computes."""
    return CudaSlots if torch.cuda.is_initialized() else HostSlots
