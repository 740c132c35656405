"""Code streams, position sets and numbers in bytes close to their entropy: the parts of the delta codec.

zstd is used for its Huffman coder more than for its matches: if symbols are drawn at random from a few, spurious
matches make the output up to a third larger than the entropy. So its input is arranged to have no matches: gaps instead
of sparse bitmasks, and small numbers as packed bits ("more than 0?", "more than 1?", ...) instead of bytes.

Everything is numpy on one thread. All input is checked against sizes that the reader already knows, so a malformed
payload raises `CorruptDelta`, and cannot make the reader allocate more than a few times its tensor's size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamrl.weights.version import CorruptWeights

Words = npt.NDArray[Any]
"""Unsigned words [n] of the tensor's item size."""
Bytes = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.int64]

BLOCK = 1 << 19
"""Elements handled at once: few enough for temporaries to stay in cache, enough to make numpy's calls cheap."""
MIN_ZSTD = 48
"""Bytes below which a stream is stored uncompressed: a zstd frame has a header and a Huffman table."""
ONE_BYTE_GAP, TWO_BYTE_GAP = 150, 30_000
"""Largest mean gaps that are coded in one and two bytes, with few escapes; larger ones take three."""
RICE_GAP = 64
"""Mean gap from which Rice's code is tried as well; below it, coding the bits takes more time than it is worth."""
MASK_SHARE = 0.22
"""Share of chosen elements above which a bitmask through zstd is smaller than gaps (both within 2 % of the entropy)."""
HELD_SHARE = 0.5
"""Share of non-zero bytes below which only those are unpacked."""
LEVEL_SHARE = 0.3
"""Share of numbers with the smallest possible value above which those get a separate set."""
LEVEL_COUNT, MAX_LEVELS = 4, 12
"""Fewest numbers worth a set, and most sets tried one after the other."""
NOTHING, MASK, RICE = 0, 4, 5
"""Codings of a set, besides gaps in 1, 2 or 3 bytes."""
COMPLEMENT = 8
"""Flag added to the coding: the elements that are *not* chosen are listed."""
_ZSTD = pa.Codec("zstd", compression_level=1)


class CorruptDelta(CorruptWeights):
    """Raised for a payload that cannot be decoded."""


class Writer:
    """A payload that is being written."""

    def __init__(self) -> None:
        self._parts: list[Any] = []

    def number(self, value: int) -> None:
        """Write a non-negative number in 7 bits per byte, low bits first; the top bit says that more follow."""
        coded = bytearray()
        while value > 0x7F:
            coded.append(value & 0x7F | 0x80)
            value >>= 7
        coded.append(value)
        self._parts.append(coded)

    def stream(self, data: Bytes) -> None:
        """Write bytes whose count the reader knows, compressed if that makes them fewer."""
        data = np.ascontiguousarray(data)
        packed = _ZSTD.compress(data) if data.size >= MIN_ZSTD else data
        smaller = len(packed) < data.size
        self.number(len(packed) if smaller else 0)
        self._parts.append(packed if smaller else data)

    def add(self, data: Any) -> None:
        """Write bytes whose count the reader knows, uncompressed."""
        self._parts.append(data)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def payload(self) -> Bytes:
        """Return everything written."""
        return np.frombuffer(bytearray().join(self._parts), dtype=np.uint8)


class Reader:
    """A payload that is being read; anything that a `Writer` cannot have written raises `CorruptDelta`."""

    def __init__(self, payload: Bytes) -> None:
        self._data = np.ascontiguousarray(payload).data
        self._at = 0

    def number(self, most: int) -> int:
        """Read a number up to `most`."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self._take(1)[0]
            value |= (byte & 0x7F) << shift
            if value > most:
                raise CorruptDelta(f"a number is above {most}")
            if byte < 0x80:
                return value
        raise CorruptDelta("a number does not end")

    def stream(self, count: int) -> Bytes:
        """Read `count` bytes."""
        length = self.number(count)
        if length == 0:
            return self.plain(count)
        try:
            data = _ZSTD.decompress(self._take(length), count)  # refuses a frame that holds more or fewer
        except (OSError, pa.ArrowException) as error:
            raise CorruptDelta(f"a stream is corrupt: {error}") from error
        return np.frombuffer(data, dtype=np.uint8)

    def plain(self, count: int) -> Bytes:
        """Read `count` bytes that were written uncompressed."""
        return np.frombuffer(self._take(count), dtype=np.uint8)

    def end(self) -> None:
        """Check that nothing follows."""
        if self._at != len(self._data):
            raise CorruptDelta(f"{len(self._data) - self._at} bytes too many")

    def _take(self, count: int) -> memoryview:
        if count > len(self._data) - self._at:
            raise CorruptDelta("the payload ends early")
        self._at += count
        return self._data[self._at - count : self._at]


class PositionWriter:
    """A coder of which `k` of `n` elements are chosen.

    Elements chosen at random have geometric gaps, for which Rice's code is within 0.14 bit each of log2 C(n, k): low
    bits uncoded, the rest in unary. Where elements cluster, symbols of 1 to 3 bytes are smaller; zstd codes them by
    frequency, and their largest value means "skip so many elements, none of them is chosen". The smaller coding is
    written. Above `MASK_SHARE` a bitmask is near the entropy, and faster. If more than half are chosen, the others are
    coded.
    """

    def __init__(self, bits: Bytes, n: int, k: int) -> None:
        """Take a bitmask, uint8 [ceil(n / 8)], little endian, with `k` ones."""
        self._bits, self._n = bits, n
        self._coding = _coding(n, k)
        self._gaps: list[Indices] = []

    def blocks(self) -> Iterator[Indices]:
        """Yield the chosen elements in increasing blocks; call this once, before `finish`."""
        gaps = 0 < self._coding < MASK  # they are collected on the way
        last = -1
        for where in chosen(self._bits, self._n):
            if gaps and len(where):
                self._gaps.append(np.diff(where, prepend=last) - 1)
                last = int(where[-1])
            yield where

    def finish(self, writer: Writer) -> None:
        """Write the set; the caller writes `n` and `k`."""
        complement, planes = self._coding & COMPLEMENT, self._coding & ~COMPLEMENT
        bits = _inverted(self._bits, self._n) if complement else self._bits
        if planes in (NOTHING, MASK):
            writer.number(self._coding)
            if planes == MASK:
                writer.stream(bits)
        else:
            if complement:
                self._gaps = [np.diff(np.concatenate([*chosen(bits, self._n)]), prepend=-1) - 1]
            coding, coded = _coded_gaps(np.concatenate(self._gaps), planes, self._n)
            writer.number(complement + coding)
            writer.add(coded.payload())


class PositionReader:
    """A set that a `PositionWriter` wrote, checked on creation: exactly `k` elements below `n`."""

    def __init__(self, reader: Reader, n: int, k: int) -> None:
        coding = reader.number(COMPLEMENT + RICE)
        planes, complement = coding & ~COMPLEMENT, bool(coding & COMPLEMENT)
        coded = n - k if complement else k
        self._n, self._skip = n, -1 if planes == RICE else 256**planes - 1
        self._symbols: Words | None = None  # gaps
        self._bits = np.zeros((n + 7) // 8 if complement and planes != MASK else 0, dtype=np.uint8)
        if planes > RICE:
            raise CorruptDelta("no such coding of a set")
        if planes == NOTHING and coded:
            raise CorruptDelta("a set is empty")
        if planes == MASK:
            self._bits = reader.stream((n + 7) // 8)
            if n % 8 and self._bits[-1] >> n % 8:
                raise CorruptDelta("a bitmask has bits behind its end")
            if ones(self._bits) != coded:
                raise CorruptDelta("a bitmask has another number of elements")
        elif planes != NOTHING:
            self._symbols = _read_rice(reader, n, coded) if planes == RICE else _read_gaps(reader, planes, n, coded)
        if complement:
            if self._symbols is not None:
                mask = np.zeros(n, dtype=np.bool_)
                for where in _ends(self._symbols, self._skip):
                    mask[where] = True
                self._bits, self._symbols = np.packbits(mask, bitorder="little"), None
            self._bits = _inverted(self._bits, n)

    def blocks(self) -> Iterator[Indices]:
        """Yield the chosen elements in increasing blocks."""
        return chosen(self._bits, self._n) if self._symbols is None else _ends(self._symbols, self._skip)


def chosen(bits: Bytes, n: int) -> Iterator[Indices]:
    """Yield the indices of the ones among `n` bits, in increasing blocks."""
    for start in range(0, len(bits), BLOCK // 8):
        some = bits[start : start + BLOCK // 8]
        held = np.flatnonzero(some != 0)  # if few bits are one, most bytes have none
        if len(held) < HELD_SHARE * len(some):
            which = np.flatnonzero(np.unpackbits(some[held], bitorder="little").view(np.bool_))
            yield ((held + start) << 3)[which >> 3] + (which & 7)
        else:
            count = min(8 * len(some), n - 8 * start)
            yield np.flatnonzero(np.unpackbits(some, count=count, bitorder="little").view(np.bool_)) + 8 * start


def ones(bits: Bytes) -> int:
    """Count the bits that are one."""
    return sum(int(np.bitwise_count(bits[at : at + BLOCK]).sum()) for at in range(0, len(bits), BLOCK))


def _inverted(bits: Bytes, n: int) -> Bytes:
    """Return the bitmask of the other elements; bits after the end stay zero."""
    others = ~bits
    if n % 8:
        others[-1] &= (1 << n % 8) - 1
    return others


def _read_gaps(reader: Reader, planes: int, n: int, count: int) -> Words:
    """Read symbols that lead to `count` elements below `n`."""
    skip = 256**planes - 1
    length = reader.number(count + n // skip)
    symbols = read_planes(reader, length, np.dtype(f"<u{(1, 2, 4)[planes - 1]}"), planes)
    # A symbol advances by its gap and one more, onto the element; the largest advances by its value, to no element.
    if np.count_nonzero(symbols != skip) != count or int(symbols.sum(dtype=np.int64)) + count > n:
        raise CorruptDelta("gaps lead elsewhere")
    return symbols


def _ends(symbols: Words, skip: int) -> Iterator[Indices]:
    """Yield the elements that gaps lead to, in blocks."""
    at = -1
    for start in range(0, len(symbols), BLOCK):
        some = symbols[start : start + BLOCK]
        stops = some != skip
        where = np.cumsum(some + stops.astype(np.int64))
        where += at
        at = int(where[-1])
        yield where if stops.all() else where[stops]


def _coding(n: int, k: int) -> int:
    """Return the smallest coding of `k` of `n` elements chosen at random; clustered ones are smaller in any coding."""
    complement = COMPLEMENT if 2 * k > n else 0
    coded = n - k if complement else k
    if coded == 0:
        return complement + NOTHING
    if coded > MASK_SHARE * n:
        return complement + MASK
    return complement + (1 if n <= ONE_BYTE_GAP * coded else 2 if n <= TWO_BYTE_GAP * coded else 3)


def _coded_gaps(gaps: Indices, planes: int, n: int) -> tuple[int, Writer]:
    """Return the smaller coding of gaps (int64 [k], elements left out before each chosen one), and its output."""
    symbols, rice = Writer(), Writer()
    coded = _symbols(gaps, planes)
    symbols.number(len(coded))
    write_planes(symbols, coded, planes)
    if n < RICE_GAP * len(gaps) and len(gaps) >= MIN_ZSTD:
        return planes, symbols
    low = _low_bits(n, len(gaps))
    high = gaps >> low
    total = int(high.sum())
    if (len(gaps) * (low + 1) + total) // 8 + 2 >= len(symbols):
        return planes, symbols
    bits = np.zeros((low + 1) * len(gaps) + total, dtype=np.bool_)
    bits[np.cumsum(high) + np.arange(len(gaps))] = True
    rows = bits[len(gaps) + total :].reshape(low, -1)
    for bit in range(low):
        rows[bit] = (gaps >> bit) & 1
    rice.number(total)
    rice.add(np.packbits(bits, bitorder="little"))
    return RICE, rice


def _read_rice(reader: Reader, n: int, count: int) -> Words:
    """Read the gaps before `count` elements below `n`, int64 [count]."""
    low = _low_bits(n, count)
    total = reader.number(n >> low)
    length = (low + 1) * count + total
    bits = np.unpackbits(reader.plain((length + 7) // 8), count=length, bitorder="little")
    ends = np.flatnonzero(bits[: count + total].view(np.bool_))
    if len(ends) != count or (count and ends[-1] != count + total - 1):
        raise CorruptDelta("gaps do not end")
    gaps = (np.diff(ends, prepend=-1) - 1) << low
    for bit, row in enumerate(bits[count + total :].reshape(low, count)):
        gaps |= row.astype(np.int64) << bit
    if int(gaps.sum()) + count > n:
        raise CorruptDelta("gaps lead elsewhere")
    return gaps


def _low_bits(n: int, k: int) -> int:
    """Return the bits of a gap that Rice's code leaves uncoded; the mean gap is 1 to 2 times their range."""
    return max(0, (n // max(k, 1)).bit_length() - 1)


def _symbols(gaps: Indices, planes: int) -> Words:
    """Return gaps as symbols, whose low `planes` bytes count."""
    skip = 256**planes - 1
    word = (np.uint8, np.uint16, np.uint32)[planes - 1]
    if int(gaps.max()) < skip:
        return gaps.astype(word)
    skips, rest = np.divmod(gaps, skip)
    ends = np.cumsum(skips) + np.arange(len(gaps))
    symbols = np.full(int(ends[-1]) + 1, skip, dtype=word)
    symbols[ends] = rest
    return symbols


def write_numbers(writer: Writer, values: Words) -> None:
    """Write non-negative numbers of which small ones are frequent.

    While many are 0, a set says which are not, and only those continue, less one: a unary code, each of whose bits
    costs about its entropy. The rest is stored in as few bytes each as most of them need, lowest bytes of all first;
    larger numbers precede them in full.
    """
    levels: list[tuple[int, PositionWriter]] = []
    while len(values) >= LEVEL_COUNT and len(levels) < MAX_LEVELS:
        more = np.packbits(values != 0, bitorder="little")
        count = ones(more)
        if count > (1 - LEVEL_SHARE) * len(values):
            break
        levels.append((count, PositionWriter(more, len(values), count)))
        values = np.concatenate([values[where] for where in levels[-1][1].blocks()]) - values.dtype.type(1)
    writer.number(len(levels))
    for count, level in levels:
        writer.number(count)
        level.finish(writer)
    size = values.dtype.itemsize
    large = [int(np.count_nonzero(values >= 256**p - 1)) if p < size else 0 for p in range(1, size + 1)]
    planes = min(range(1, size + 1), key=lambda p: p * len(values) + size * large[p - 1])
    writer.number(planes)
    if planes < size:
        escaped = values >= 256**planes - 1
        writer.number(int(np.count_nonzero(escaped)))
        write_planes(writer, values[escaped], size)
        values = np.where(escaped, values.dtype.type(256**planes - 1), values)
    write_planes(writer, values, planes)


def read_numbers(reader: Reader, count: int, word: np.dtype[Any]) -> Words:
    """Read `count` numbers that `write_numbers` wrote, as words of this type."""
    values = np.zeros(count, dtype=word)
    places: Indices | None = None  # places of the numbers that continue; None: all
    for _ in range(reader.number(MAX_LEVELS)):
        left = count if places is None else len(places)
        found = PositionReader(reader, left, reader.number(left))
        more = np.concatenate([np.empty(0, dtype=np.int64), *found.blocks()])
        places = more if places is None else places[more]
        values[places] += word.type(1)
    left = count if places is None else len(places)
    planes = reader.number(word.itemsize)
    if planes < 1:
        raise CorruptDelta("numbers of no bytes")
    aside = read_planes(reader, reader.number(left), word, word.itemsize) if planes < word.itemsize else None
    rest = read_planes(reader, left, word, planes)
    if aside is not None:
        escaped = rest == 256**planes - 1
        if np.count_nonzero(escaped) != len(aside):
            raise CorruptDelta("another number of large values")
        rest[escaped] = aside
    if places is None:
        return rest
    values[places] += rest
    return values


def write_planes(writer: Writer, values: Words, planes: int) -> None:
    """Write the low `planes` bytes of words: all lowest bytes, all next ones, ..."""
    data = values.view(np.uint8).reshape(len(values), values.dtype.itemsize)
    for plane in range(planes):
        writer.stream(data[:, plane])


def read_planes(reader: Reader, count: int, word: np.dtype[Any], planes: int) -> Words:
    """Read `count` words that `write_planes` wrote, as a new writable array."""
    data = np.zeros((count, word.itemsize), dtype=np.uint8)
    for plane in range(planes):
        data[:, plane] = reader.stream(count)
    return data.view(word)[:, 0] if count else np.empty(0, dtype=word)
