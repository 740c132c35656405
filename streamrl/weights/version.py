"""Weight versions: their names, layout as bytes, transport and verification.

A version is the same whichever way it came. So a manifest has no base (`WeightVersion.base` is None: it describes
complete weights); the parts sent to a receiver say what they start from.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from blake3 import blake3

if TYPE_CHECKING:
    import torch  # services and controllers name versions without ever touching a tensor

ALIGNMENT = 64
"""Multiple of bytes at which tensors start, so that any type can be viewed in place."""
HASHING_THREADS = 4
"""Threads that hash a version's tensors, without the GIL."""


class CorruptWeights(Exception):
    """Raised for bytes or descriptions that do not match their version."""


class CorruptTensors(CorruptWeights):
    """Raised when some tensors of a version do not match their checksums."""

    def __init__(self, message: str, indexes: tuple[int, ...]) -> None:
        super().__init__(message)
        self.indexes = indexes
        """Indexes of these tensors in the manifest."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor within a version's buffer."""

    name: str
    dtype: str
    """Type by torch's name, e.g. 'bfloat16'."""
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    checksum: str = ""
    """BLAKE3 of the tensor's bytes; '': they are not written yet."""

    def view(self, buffer: np.ndarray) -> torch.Tensor:
        """Return a view of the tensor in a buffer (uint8 [nbytes])."""
        import torch

        return torch.from_numpy(bytes_of(self, buffer)).view(getattr(torch, self.dtype)).reshape(self.shape)


@dataclass(frozen=True)
class WeightVersion:
    """A version's name: its number, base and content hash.

    The base is the version it is a delta of (None: complete, as in every manifest); the hash is that of the *resulting*
    weights.
    """

    number: int
    base: int | None
    content_hash: str


@dataclass(frozen=True)
class Manifest:
    """A version, and the places of its tensors in a buffer of `nbytes`."""

    version: WeightVersion
    nbytes: int
    tensors: tuple[TensorEntry, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for an envelope or a file."""
        return {
            "number": self.version.number,
            "base": self.version.base,
            "content_hash": self.version.content_hash,
            "nbytes": self.nbytes,
            "tensors": [[t.name, t.dtype, list(t.shape), t.offset, t.nbytes, t.checksum] for t in self.tensors],
        }

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Manifest:
        """Check and return a received manifest.

        Raises:
            CorruptWeights: it does not describe tensors inside its buffer, or its hash does not match.
        """
        try:
            tensors = tuple(
                TensorEntry(str(n), str(d), tuple(int(x) for x in s), int(o), int(b), str(c))
                for n, d, s, o, b, c in values["tensors"]
            )
            version = WeightVersion(int(values["number"]), values["base"], str(values["content_hash"]))
            manifest = Manifest(version, int(values["nbytes"]), tensors)
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise CorruptWeights(f"manifest is malformed: {error}") from error
        for t in tensors:
            if t.offset < 0 or t.nbytes < 0 or t.offset + t.nbytes > manifest.nbytes:
                raise CorruptWeights(f"tensor {t.name!r} lies outside its buffer")
        if content_hash(tensors) != version.content_hash:
            raise CorruptWeights(f"content hash of version {version.number} does not match its tensors")
        return manifest

    def verify(self, buffer: np.ndarray) -> None:
        """Compare the bytes of every tensor in a buffer (uint8 [nbytes]) with its checksum.

        Raises:
            CorruptTensors: some tensors differ; the message names the first.
            CorruptWeights: the buffer has another size.
        """
        self._check_size(buffer)
        if corrupt := _corrupt(self.tensors, buffer):
            raise self._corrupt(corrupt)

    @contextlib.contextmanager
    def checking(self, buffer: np.ndarray) -> Iterator[Callable[[str], None]]:
        """Hash the tensors of a buffer (uint8 [nbytes]) in threads, in their order, while the caller works on others.

        Yields:
            A function that waits until a tensor is hashed, given its name, and raises `CorruptTensors` if its bytes do
            not match its checksum.

        Raises:
            CorruptWeights: the buffer has another size.
        """
        self._check_size(buffer)
        indexes = {t.name: i for i, t in enumerate(self.tensors)}
        pool = ThreadPoolExecutor(HASHING_THREADS)
        sums = [pool.submit(checksum, bytes_of(t, buffer)) for t in self.tensors]

        def check(name: str) -> None:
            index = indexes[name]
            if sums[index].result() != self.tensors[index].checksum:
                raise self._corrupt((index,))

        try:
            yield check
        finally:
            pool.shutdown(cancel_futures=True)

    def _check_size(self, buffer: np.ndarray) -> None:
        if buffer.nbytes != self.nbytes:
            raise CorruptWeights(f"{buffer.nbytes} bytes instead of {self.nbytes}")

    def _corrupt(self, indexes: tuple[int, ...]) -> CorruptTensors:
        first = self.tensors[indexes[0]].name
        return CorruptTensors(f"version {self.version.number}: tensor {first!r} is corrupt", indexes)

    def like(self, other: Manifest) -> bool:
        """Return whether both have the same tensors (names, types, shapes) at the same places; values may differ."""
        ours, theirs = ([replace(t, checksum="") for t in one.tensors] for one in (self, other))
        return self.nbytes == other.nbytes and ours == theirs

    def tensors_of(self, buffer: np.ndarray) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) views into a buffer (uint8 [nbytes])."""
        return ((t.name, t.view(buffer)) for t in self.tensors)


@dataclass(frozen=True)
class Payload:
    """The bytes sent for one tensor, within a part's stream."""

    offset: int
    nbytes: int
    checksum: str
    """BLAKE3 of the payload's bytes."""


def bytes_of(place: Payload | TensorEntry, data: np.ndarray) -> np.ndarray:
    """Return the bytes of a tensor in its buffer, or of a payload in its stream: a view of uint8 [nbytes]."""
    return data[place.offset : place.offset + place.nbytes]


@dataclass(frozen=True)
class Part:
    """Weights in transit: one stream of `nbytes`, with a payload for every tensor of the manifest, in its order."""

    number: int
    base: int | None
    """The version that this is a delta of (None: complete)."""
    coded: bool
    """Whether the stream is payloads of the delta codec, one after the other; else it is the version's buffer."""
    nbytes: int
    payloads: tuple[Payload, ...]

    @staticmethod
    def of_buffer(manifest: Manifest) -> Part:
        """Return a part that is a whole version, not coded."""
        payloads = tuple(Payload(t.offset, t.nbytes, t.checksum) for t in manifest.tensors)
        return Part(manifest.version.number, None, False, manifest.nbytes, payloads)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for an envelope; the payloads of an uncoded part follow from its manifest."""
        payloads = [[p.nbytes, p.checksum] for p in self.payloads] if self.coded else None
        return {"number": self.number, "base": self.base, "payloads": payloads}

    @staticmethod
    def from_dict(values: dict[str, Any], manifest: Manifest) -> Part:
        """Check and return a part that was received with `manifest`, on the way to that version.

        Raises:
            CorruptWeights: the part is malformed, or does not fit the manifest.
        """
        try:
            number, base = int(values["number"]), None if values["base"] is None else int(values["base"])
            sizes = None if values["payloads"] is None else [(int(n), str(c)) for n, c in values["payloads"]]
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise CorruptWeights(f"part is malformed: {error}") from error
        if sizes is None:
            if (number, base) != (manifest.version.number, None):
                raise CorruptWeights(f"part {number} is not coded and not of version {manifest.version.number}")
            return Part.of_buffer(manifest)
        if len(sizes) != len(manifest.tensors):
            raise CorruptWeights(f"part {number} has {len(sizes)} payloads for {len(manifest.tensors)} tensors")
        if any(not 0 < n <= t.nbytes + 1 for (n, _), t in zip(sizes, manifest.tensors, strict=True)):
            raise CorruptWeights(f"a payload of part {number} is larger than its tensor")
        return Part.of_payloads(number, base, sizes)

    @staticmethod
    def of_payloads(number: int, base: int | None, sizes: Iterable[tuple[int, str]]) -> Part:
        """Return a coded part, from the bytes and checksum of each payload."""
        payloads, cursor = [], 0
        for nbytes, digest in sizes:
            payloads.append(Payload(cursor, nbytes, digest))
            cursor += nbytes
        return Part(number, base, True, cursor, tuple(payloads))

    def corrupt(self, stream: np.ndarray, indexes: Sequence[int]) -> tuple[int, ...]:
        """Return those of `indexes` whose payloads in a stream (uint8 [nbytes]) do not match."""
        found = _corrupt([self.payloads[i] for i in indexes], stream)
        return tuple(indexes[i] for i in found)


Stream = tuple[Part, np.ndarray]
"""A part of a version and its bytes, uint8 [nbytes]."""


def transfer_kind(parts: Iterable[Part]) -> str:
    """Describe a path of parts in a word or two."""
    kinds = ["complete" if not part.coded else "packed" if part.base is None else "delta" for part in parts]
    return "+".join(dict.fromkeys(kinds)) or "nothing"


def _corrupt(entries: Sequence[Payload | TensorEntry], data: np.ndarray) -> tuple[int, ...]:
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        sums = pool.map(lambda e: checksum(bytes_of(e, data)), entries)
        return tuple(i for i, (e, found) in enumerate(zip(entries, sums, strict=True)) if found != e.checksum)


def type_name(dtype: torch.dtype) -> str:
    """Return torch's name of a type, e.g. 'bfloat16'."""
    return str(dtype).removeprefix("torch.")


def places(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[list[TensorEntry], int]:
    """Return the places of tensors (name, type by torch's name, shape) in a buffer, and its size in bytes."""
    import torch

    entries, cursor = [], 0
    for name, dtype, shape in tensors:
        entries.append(TensorEntry(name, dtype, shape, cursor, math.prod(shape) * getattr(torch, dtype).itemsize))
        cursor = (cursor + entries[-1].nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    return entries, cursor


def lay_out(number: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[Manifest, np.ndarray]:
    """Copy tensors (any device) into one buffer and describe them, as a complete version (base None)."""
    items = [(name, tensor.detach()) for name, tensor in tensors]
    entries, nbytes = places((name, type_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in items)
    buffer = np.zeros(nbytes, dtype=np.uint8)

    def write(entry: TensorEntry, item: tuple[str, torch.Tensor]) -> TensorEntry:
        entry.view(buffer).copy_(item[1])
        return replace(entry, checksum=checksum(bytes_of(entry, buffer)))

    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        written = tuple(pool.map(write, entries, items))
    return Manifest(WeightVersion(number, None, content_hash(written)), nbytes, written), buffer


def checksum(data: np.ndarray) -> str:
    """Return the BLAKE3 of an array's bytes, as hex: as safe as SHA-256, and five times as fast on one core."""
    return blake3(data.data).hexdigest()


def content_hash(tensors: Iterable[TensorEntry]) -> str:
    """Return a hash of the weights themselves (names, types, shapes, bytes), whatever their places."""
    digest = hashlib.sha256()
    for t in sorted(tensors, key=lambda t: t.name):
        digest.update(f"{t.name}\0{t.dtype}\0{t.shape}\0{t.checksum}\n".encode())
    return digest.hexdigest()
