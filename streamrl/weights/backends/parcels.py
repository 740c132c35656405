"""A version as a group's members send and receive it: a description, its tensors in parcels, and its content hash.

    head      uint8 [72]      the description's length (8 bytes) and checksum (32), and the checksum of these 40 bytes
    names     uint8 [length]  msgpack: (name, type, shape) of every tensor, in their order
    parcels   uint8 [...]     tensors one after the other, each at a multiple of `ALIGNMENT`; about `PARCEL` bytes
    hash      uint8 [32]      what the sender finds in the tensors that it has sent (`version.content_hash`)

Where a parcel ends follows from types and shapes, so that both ends agree on it. While one parcel is under way the
sender fills the next, and receivers load the one before. The hash is that of any other version with these weights
(`weights/version.py`), and a receiver that finds another one in what it has got refuses the version. Checksums of the
description are compared before anything is allocated by what it says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial

import msgspec
import torch
from blake3 import blake3

from streamrl.weights.backends.communicator import Communicator
from streamrl.weights.description import MAX_DESCRIPTION_BYTES
from streamrl.weights.version import (
    HASHING_THREADS,
    CorruptWeights,
    TensorEntry,
    checksum,
    content_hash,
    places,
    type_name,
)

PARCEL = 32 * 2**20
"""Bytes after which a parcel is full. A tensor is never cut, so one of many tensors is at most one tensor larger."""

LENGTH_BYTES, CHECKSUM_BYTES = 8, 32

DescribedTensors = Sequence[tuple[str, str, tuple[int, ...]]]
"""Name, type by torch's name, and shape of each tensor."""
NamedTensors = Iterable[tuple[str, torch.Tensor]]


def parcels(described: DescribedTensors, size: int | None = None) -> Iterator[tuple[list[TensorEntry], int]]:
    """Yield the tensors of each parcel, with their places in it, and its bytes; `size`: `PARCEL` if None."""
    size = PARCEL if size is None else size
    part: list[tuple[str, str, tuple[int, ...]]] = []
    full = 0
    for name, dtype, shape in described:
        part.append((name, dtype, shape))
        full += math.prod(shape) * getattr(torch, dtype).itemsize
        if full >= size:
            yield places(part)
            part, full = [], 0
    if part:
        yield places(part)


def send(group: Communicator, described: DescribedTensors, tensors: NamedTensors) -> str:
    """Send a version to all others; return its content hash.

    Args:
        group: the group, of which this is rank 0.
        described: the tensors of the version.
        tensors: the same tensors with their values, in the same order; any device.

    Raises:
        GroupBroken: a member is gone; some tensors have not been taken from `tensors` then.
        ValueError: `tensors` are not those described, or their description is too large for any receiver.
    """
    names = msgspec.msgpack.encode(described)
    if len(names) > MAX_DESCRIPTION_BYTES:
        raise ValueError(f"the description of {len(described)} tensors has {len(names)} bytes")
    for one in (_head(names), names):
        group.begin(torch.frombuffer(bytearray(one), dtype=torch.uint8).to(group.device))()
    coming = iter(tensors)
    before: Callable[[], None] | None = None
    with _hashing() as sums:
        for entries, nbytes in parcels(described):
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=group.device)
            for entry in entries:
                name, tensor = next(coming)
                if (name, type_name(tensor.dtype), tuple(tensor.shape)) != (entry.name, entry.dtype, entry.shape):
                    raise ValueError(f"expected {entry.name} {entry.dtype} {entry.shape}, got {name} {tensor.shape}")
                _view(entry, buffer).copy_(tensor)
            if before is not None:
                before()
            before = partial(_sent, group.begin(buffer), entries, buffer, sums)
        if before is not None:
            before()
        found = sums.content_hash()
    group.begin(torch.frombuffer(bytearray.fromhex(found), dtype=torch.uint8).to(group.device))()
    return found


def _sent(wait: Callable[[], None], entries: list[TensorEntry], buffer: torch.Tensor, sums: _Sums) -> None:
    """Wait until a parcel is sent, and hash it.

    Not before: on a GPU what fills it is queued, like its broadcast, on a stream that the hashing threads do not have.
    """
    wait()
    for entry in entries:
        sums(entry, _view(entry, buffer))


def receive(group: Communicator) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of the version that rank 0 sends; whoever takes them all has them verified.

    A tensor belongs to the caller, who may write into it.

    Raises:
        GroupBroken: rank 0 is gone.
        CorruptWeights: the description is damaged, or the tensors, which have been yielded by then, are not those that
            were sent.
    """
    described = _described(group)
    with _hashing() as sums, closing(_received(group, described)) as coming:
        for entries, buffer in coming:
            views = [_view(entry, buffer) for entry in entries]
            hashed = [sums(entry, view) for entry, view in zip(entries, views, strict=True)]
            for entry, view, done in zip(entries, views, hashed, strict=True):
                done.result()  # a loader may write into what it gets: vLLM's for gpt-oss does
                yield entry.name, view
        found = sums.content_hash()
    if (expected := _bytes(group, CHECKSUM_BYTES).hex()) != found:
        raise CorruptWeights(f"the tensors received have the hash {found:.8}, those sent had {expected:.8}")


def _head(names: bytes) -> bytes:
    """Return what comes before a description."""
    head = len(names).to_bytes(LENGTH_BYTES, "little") + blake3(names).digest()
    return head + blake3(head).digest()


def _bytes(group: Communicator, count: int) -> bytes:
    """Receive so many bytes."""
    buffer = torch.empty(count, dtype=torch.uint8, device=group.device)
    group.begin(buffer)()
    return buffer.cpu().numpy().tobytes()


def _described(group: Communicator) -> DescribedTensors:
    """Receive the description.

    Raises:
        GroupBroken: rank 0 is gone.
        CorruptWeights: the description is not the one that was sent.
    """
    head = _bytes(group, LENGTH_BYTES + 2 * CHECKSUM_BYTES)
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    if blake3(head[:-CHECKSUM_BYTES]).digest() != head[-CHECKSUM_BYTES:] or length > MAX_DESCRIPTION_BYTES:
        raise CorruptWeights("the head of the tensors' description is damaged")
    names = _bytes(group, length)
    if _head(names) != head:
        raise CorruptWeights(f"the tensors' description, of {length} bytes, is damaged")
    return msgspec.msgpack.decode(names, type=list[tuple[str, str, tuple[int, ...]]])


def _received(
    group: Communicator, described: DescribedTensors
) -> Generator[tuple[list[TensorEntry], torch.Tensor], None, None]:
    """Yield each parcel's tensors and bytes; the next parcel is under way meanwhile."""
    before: tuple[list[TensorEntry], torch.Tensor, Callable[[], None]] | None = None
    for entries, nbytes in parcels(described):
        if before is not None:
            before[2]()  # parcels come one after the other
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=group.device)
        coming = entries, buffer, group.begin(buffer)
        if before is not None:
            yield before[:2]
        before = coming
    if before is not None:
        before[2]()
        yield before[:2]


class _Sums:
    """Checksums of tensors, found in threads."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._found: list[tuple[TensorEntry, Future[str]]] = []

    def __call__(self, entry: TensorEntry, tensor: torch.Tensor) -> Future[str]:
        """Hash a tensor, whose values must be in memory and not be changed until what is returned is done."""
        found = self._pool.submit(_checksum, tensor)
        self._found.append((entry, found))
        return found

    def content_hash(self) -> str:
        """Return the content hash of all tensors."""
        return content_hash(replace(entry, checksum=found.result()) for entry, found in self._found)


@contextmanager
def _hashing() -> Iterator[_Sums]:
    pool = ThreadPoolExecutor(HASHING_THREADS, "hash")
    try:
        yield _Sums(pool)
    finally:
        pool.shutdown(cancel_futures=True)


def _checksum(tensor: torch.Tensor) -> str:
    return checksum(tensor.cpu().reshape(-1).view(torch.uint8).numpy())


def _view(entry: TensorEntry, buffer: torch.Tensor) -> torch.Tensor:
    """Return a tensor's view in its parcel."""
    place = buffer[entry.offset : entry.offset + entry.nbytes]
    return place.view(getattr(torch, entry.dtype)).reshape(entry.shape)
