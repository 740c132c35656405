"""Tensors that wait in host memory while another process uses their device (schedule `colocated` on GPUs).

Only the memory of a tensor goes; the tensor stays, with its device. So parameters, shards of FSDP2 and AdamW's state
keep their identity, and all views of a memory block (tied weights, a padded shard) leave and return together. FSDP2
frees what it has gathered in the same way (`free_storage`); verl and OpenRLHF replace the tensors instead.

    hold()     copies every block to host memory, which is pinned for a GPU, and frees the block
    restore()  allocates the blocks again and copies the same bits back

Between the two calls nobody may read the tensors: they have no memory. The host memory is kept for the next time,
because pinning it takes longer than the copy.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor


class HostOffload:
    """The memory blocks of some tensors, in turns on their device and in host memory."""

    def __init__(self) -> None:
        self._held: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        """Freed blocks with their contents, in the order in which they were freed."""
        self._host: dict[int, torch.Tensor] = {}
        """Host memory of each block (uint8 [bytes]), by the block's identity, from its first time on."""

    @property
    def held_bytes(self) -> int:
        """Bytes that wait in host memory; 0: everything is on its device."""
        return sum(len(host) for _, host in self._held)

    @torch.no_grad()
    def hold(self, tensors: Iterable[torch.Tensor]) -> int:
        """Move the memory of tensors to the host, in their order; blocks without memory are passed over.

        Returns:
            The bytes that this call has freed on the devices.
        """
        begun = len(self._held)
        for tensor in tensors:
            storage = _local(tensor).untyped_storage()
            if (size := storage.nbytes()) == 0:
                continue  # empty, or freed already through another view
            host = self._host.get(storage._cdata)
            if host is None or len(host) != size:
                host = torch.empty(size, dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
                self._host[storage._cdata] = host
            host.copy_(_bytes_of(storage))  # waits for the copy: the block is freed next
            storage.resize_(0)
            self._held.append((storage, host))
        if any(storage.device.type == "cuda" for storage, _ in self._held[begun:]):
            torch.cuda.empty_cache()  # another process takes the memory
        return sum(len(host) for _, host in self._held[begun:])

    @torch.no_grad()
    def restore(self) -> None:
        """Bring everything back to its device, what left last first; a no-op if nothing is held."""
        if self._held:
            self._host = {storage._cdata: host for storage, host in self._held}  # forget blocks that are gone
        while self._held:
            storage, host = self._held.pop()
            storage.resize_(len(host))
            _bytes_of(storage).copy_(host)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, which shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a memory block as uint8 [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
