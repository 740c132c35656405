"""Tensors that wait in host memory while another process uses their device (schedule `colocated` on GPUs).

Only the memory of a tensor goes; the tensor stays, with its device. So parameters, shards of FSDP2 and AdamW's state
keep their identity, and all views of a memory block (tied weights, a padded shard) leave and return together. FSDP2
frees what it has gathered in the same way (`free_storage`); verl and OpenRLHF replace the tensors instead.

    hold()     copies every block to host memory, which is pinned for a GPU, and frees the block
    restore()  allocates the blocks again and copies the same bits back

Between the two calls nobody may read the tensors: they have no memory. The host memory is kept for the next time,
because pinning it takes longer than the copy. It is allocated in slabs, which the blocks fill one after the other:
torch rounds what it pins up to a power of two, which would nearly double the blocks of many models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.distributed.tensor import DTensor

SLAB = 2**26
"""Bytes of host memory that are allocated at once; a power of two."""
ALIGNMENT = 512
"""Bytes to whose multiples a block begins in host memory, as in torch's memory of a GPU; they divide `SLAB`."""


class HostOffload:
    """The memory blocks of some tensors, in turns on their device and in host memory."""

    def __init__(self, pinned: bool) -> None:
        """Begin with everything on its device.

        Args:
            pinned: whether host memory is pinned, for copies from and to a GPU.
        """
        self._pinned = pinned
        self._held: list[tuple[torch.UntypedStorage, int, int]] = []
        """Freed blocks with (begin, bytes) of their contents in the slabs, in the order in which they were freed."""
        self._slabs: list[torch.Tensor] = []
        """Host memory, uint8 [SLAB] each, kept from its first time on."""

    @torch.no_grad()
    def hold(self, tensors: Iterable[torch.Tensor]) -> int:
        """Move the memory of tensors to the host, in their order; blocks without memory are passed over.

        Returns:
            The bytes that this call has freed on the devices.
        """
        count = len(self._held)
        for tensor in tensors:
            storage = _local(tensor).untyped_storage()
            if (size := storage.nbytes()) == 0:
                continue  # empty, or freed already through another view
            end = self._held[-1][1] + self._held[-1][2] if self._held else 0
            begin = -(-end // ALIGNMENT) * ALIGNMENT
            for host, device in self._copies(storage, begin, size):
                host.copy_(device)  # waits for the copy: the block is freed next
            storage.resize_(0)
            self._held.append((storage, begin, size))
        if any(storage.device.type == "cuda" for storage, *_ in self._held[count:]):
            torch.cuda.empty_cache()  # another process takes the memory
        return sum(size for *_, size in self._held[count:])

    @torch.no_grad()
    def restore(self) -> None:
        """Bring everything back to its device, what left last first; a no-op if nothing is held."""
        while self._held:
            storage, begin, size = self._held.pop()
            storage.resize_(size)
            for host, device in self._copies(storage, begin, size):
                device.copy_(host)

    def _copies(
        self, storage: torch.UntypedStorage, begin: int, size: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (host, device) for each part of a block in a slab, as uint8 [bytes]; slabs are added as needed."""
        block, done = _bytes_of(storage), 0
        while done < size:
            slab, offset = divmod(begin + done, SLAB)
            if slab == len(self._slabs):
                self._slabs.append(torch.empty(SLAB, dtype=torch.uint8, pin_memory=self._pinned))
            count = min(size - done, SLAB - offset)
            yield self._slabs[slab][offset : offset + count], block[done : done + count]
            done += count


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, which shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a memory block as uint8 [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
