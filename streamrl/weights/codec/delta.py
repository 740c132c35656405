"""Lossless deltas of tensors: which elements differ from the previous version, and by how many steps of their type.

Most bf16 weights do not change in one step of RL: the update is below half a unit in the last place (ulp). Most of the
others move by one ulp. Bit patterns are mapped to integers in the order of their values, one ulp apart (a bijection on
*all* patterns, so NaNs, infinities and -0.0 are exact, too). A delta then is

    positions of changed elements (gaps, or a bitmask) | signs of their differences | magnitudes - 1

each close to its entropy (`streamrl.weights.codec.entropy`). A tensor that changed too much is sent complete: its bytes
in planes, of which those of the exponents compress, or uncompressed if nothing helps. The first byte of a payload says
which.

Sizes in a payload are checked before anything is allocated or written: a malformed payload raises `CorruptDelta` and
leaves its target unchanged. The tensor's checksum (`Manifest.verify`) shows whether the decoded bytes are right.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from streamrl.weights.codec.entropy import (
    BLOCK,
    Bytes,
    CorruptDelta,
    Indices,
    PositionReader,
    PositionWriter,
    Reader,
    Words,
    Writer,
    ones,
    read_numbers,
    write_numbers,
    write_planes,
)

SAME, RAW, PACKED, SPARSE = range(4)
"""First byte of a payload: nothing changed; all bytes; all bytes in compressed planes; changed elements."""
ITEM_SIZES = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2),
}
"""Bytes of an element by torch's type name; any other type is coded as bytes."""
SIGN_MAGNITUDE = {
    *("bfloat16", "float16", "float32", "float64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
}
"""Types whose first bit is the sign and whose other bits grow with the magnitude."""
FEW_CHANGED = 1 / 4
"""Share of changed elements below which a delta is smaller than any complete tensor worth sending."""
SAMPLE_SLICES, SAMPLE_LENGTH = 8, 4096
"""Number and length of the slices by which the size of a delta is compared with that of the complete tensor."""


def encode_tensor(new: Bytes, old: Bytes | None, dtype: str) -> Bytes:
    """Encode a tensor, as a delta if there is an old one and the delta is smaller.

    Args:
        new: uint8 [nbytes], the tensor's elements in C order, little endian.
        old: uint8 [nbytes], the same tensor in the previous version; None: the receiver has none.
        dtype: torch's type name, e.g. 'bfloat16'.

    Returns:
        uint8 [n], for `decode_tensor`; at most one byte more than the tensor.

    Raises:
        ValueError: the sizes do not match.
    """
    word = _word(dtype)
    if new.size % word.itemsize or (old is not None and old.size != new.size):
        raise ValueError(f"{new.size} bytes of {dtype}, from {'nothing' if old is None else old.size}")
    fresh = np.ascontiguousarray(new).view(word)
    if old is None:
        return _complete(fresh)
    before = np.ascontiguousarray(old).view(word)
    bits = _changes(fresh, before)
    changed = ones(bits)
    if changed == 0:
        return np.array([SAME], dtype=np.uint8)
    ordered = dtype in SIGN_MAGNITUDE
    if changed >= FEW_CHANGED * len(fresh):
        sampled = _sample(len(fresh))
        some, some_before = fresh[sampled], before[sampled]
        if len(_complete(some)) <= len(_sparse(some, some_before, _changes(some, some_before), ordered)):
            return _complete(fresh)
    delta = _sparse(fresh, before, bits, ordered)
    return delta if len(delta) <= new.size else _complete(fresh)


def decode_tensor(payload: Bytes, target: Bytes, dtype: str) -> None:
    """Decode a payload into a tensor, in place.

    Args:
        payload: uint8 [n], from `encode_tensor`.
        target: uint8 [nbytes], contiguous and writable; holds the old tensor, unless the payload is complete.
        dtype: torch's type name.

    Raises:
        CorruptDelta: the payload is malformed; `target` is then unchanged.
    """
    word = _word(dtype)
    if target.size % word.itemsize:
        raise CorruptDelta(f"{target.size} bytes are no tensor of {dtype}")
    reader = Reader(payload)
    encoding = reader.number(SPARSE)
    values = target.view(word)
    if encoding == SAME:
        reader.end()
    elif encoding == RAW:
        if payload.size != target.size + 1:
            raise CorruptDelta(f"{payload.size - 1} bytes instead of {target.size}")
        target[:] = payload[1:]
    elif encoding == PACKED:
        planes = [reader.stream(len(values)) for _ in range(word.itemsize)]
        reader.end()
        rows = target.reshape(len(values), word.itemsize)
        for block in _blocks(len(values)):
            for number, plane in enumerate(planes):
                rows[block, number] = plane[block]
    else:
        _apply(reader, values, dtype in SIGN_MAGNITUDE)


def entropy_bound_bits(old: Bytes, new: Bytes, dtype: str) -> float:
    """Return the fewest bits of a delta if only the number of changes is known: log2 C(n, k) + k H0.

    The first term is the choice of k changed elements out of n, the second their differences in ulp, with H0 their own
    zero-order entropy. The cost of learning H0 is not counted, so for types with large differences, such as fp32, no
    coder reaches the bound. The arguments are those of `encode_tensor`.
    """
    word = _word(dtype)
    fresh, before = np.ascontiguousarray(new).view(word), np.ascontiguousarray(old).view(word)
    where = np.flatnonzero(fresh != before)
    n, k = len(fresh), len(where)
    if k == 0:
        return 0.0
    differences = _difference(fresh[where], before[where], dtype in SIGN_MAGNITUDE)
    _, counts = np.unique(differences, return_counts=True)
    choice = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)
    return choice - float((counts * np.log2(counts / k)).sum())


def _word(dtype: str) -> np.dtype[Any]:
    return np.dtype(f"<u{ITEM_SIZES.get(dtype, 1)}")


def _blocks(n: int) -> list[slice]:
    return [slice(start, min(start + BLOCK, n)) for start in range(0, n, BLOCK)]


def _sample(n: int) -> npt.NDArray[np.int64] | slice:
    """Return representative elements of a tensor; all, if there are not many."""
    if n <= 2 * SAMPLE_SLICES * SAMPLE_LENGTH:
        return slice(0, n)
    starts = np.linspace(0, n - SAMPLE_LENGTH, SAMPLE_SLICES).astype(np.int64)
    return (starts[:, None] + np.arange(SAMPLE_LENGTH)).reshape(-1)


def _complete(fresh: Words) -> Bytes:
    writer = Writer()
    writer.number(PACKED)
    write_planes(writer, fresh, fresh.dtype.itemsize)
    packed = writer.payload()
    if packed.size <= fresh.nbytes:
        return packed
    return np.concatenate((np.array([RAW], dtype=np.uint8), fresh.view(np.uint8)))


def _changes(fresh: Words, before: Words) -> Bytes:
    """Return a bitmask of the elements that differ, uint8 [ceil(n / 8)]."""
    parts = [np.packbits(fresh[block] != before[block], bitorder="little") for block in _blocks(len(fresh))]
    return np.concatenate([np.empty(0, dtype=np.uint8), *parts])


def _sparse(fresh: Words, before: Words, bits: Bytes, ordered: bool) -> Bytes:
    """Encode the delta of words [n]; `bits` marks those that differ."""
    changed = ones(bits)
    positions = PositionWriter(bits, len(fresh), changed)
    negative = np.empty(changed, dtype=np.bool_)
    magnitudes = np.empty(changed, dtype=fresh.dtype)  # less one
    done = 0
    for where in positions.blocks():
        part = slice(done, done + len(where))
        run = _run(where)
        difference = _signed(_difference(fresh[run], before[run], ordered))
        below = difference >> (8 * difference.itemsize - 1)  # -1 or 0
        np.less(difference, 0, out=negative[part])
        magnitudes[part] = (difference ^ below) - (below + 1)  # -d - 1 or d - 1
        done += len(where)
    writer = Writer()
    writer.number(SPARSE)
    writer.number(changed)
    positions.finish(writer)
    writer.stream(np.packbits(negative, bitorder="little"))
    write_numbers(writer, magnitudes)
    return writer.payload()


def _apply(reader: Reader, values: Words, ordered: bool) -> None:
    """Read what `_sparse` wrote, and change words [n] in place once everything is read."""
    word = values.dtype
    changed = reader.number(len(values))
    positions = PositionReader(reader, len(values), changed)
    signs = reader.stream((changed + 7) // 8)
    magnitudes = read_numbers(reader, changed, word)
    reader.end()
    negative = np.unpackbits(signs, count=changed, bitorder="little").astype(word)
    done = 0
    for where in positions.blocks():
        part = slice(done, done + len(where))
        below = word.type(0) - negative[part]  # all ones or zero
        difference = (magnitudes[part] + (word.type(1) - negative[part])) ^ below
        run = _run(where)
        values[run] = _ordered(_ordered(values[run], ordered) + difference, ordered)
        done += len(where)


def _run(where: Indices) -> Indices | slice:
    """Return increasing indices, as a slice (which needs no copy) if they are consecutive."""
    if len(where) and where[-1] - where[0] == len(where) - 1:
        return slice(int(where[0]), int(where[-1]) + 1)
    return where


def _difference(new: Words, old: Words, ordered: bool) -> Words:
    """Return the steps from old to new, modulo the words' size."""
    return _ordered(new, ordered) - _ordered(old, ordered)


def _ordered(patterns: Words, sign_magnitude: bool) -> Words:
    """Map bit patterns to two's-complement integers in the order of their values; the map is its own inverse.

    For negative values all bits but the sign are inverted: -0.0 becomes -1, the next lower value -2, and so on.
    """
    if not sign_magnitude:
        return patterns
    signed = _signed(patterns)
    inverted = (signed >> (8 * signed.itemsize - 1)).view(patterns.dtype) >> patterns.dtype.type(1)
    return patterns ^ inverted


def _signed(words: Words) -> npt.NDArray[Any]:
    return words.view(words.dtype.str.replace("u", "i"))
