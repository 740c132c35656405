"""Numeric features of prompt text: counts, sizes and hashed n-grams, for thousands of prompts at once.

All prompts of a batch are joined into one byte array, and everything is computed on that array with numpy, so that no
Python loop runs over prompts or words. The structural columns measure how big the problem in a prompt is (how many
terms, how large the numbers, how long the word) independently of its wording. They are also computed for the `tail`,
the text after the last colon, where many prompts put the problem itself after instructions and examples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ranker.segments import Array, first_of, last_of, runs, segment_reduce

BATCH = 128 * 1024
"""Characters of text that are processed at once: few enough for a core's cache, many enough for numpy."""

HALF = 2048
"""Bytes read at each end of a prompt; what lies between (a long document) is left out, and only its size counts."""

EDGE = 256
"""Bytes at each end of a prompt whose n-grams count: they show the kind of prompt, and every n-gram costs time."""

BUCKETS = 2048
"""Hash buckets of each kind of n-gram: a projection table of some 100 KB, with few collisions in a task mix."""

_CLASSES = {
    "digit": b"0123456789",
    "upper": bytes(range(65, 91)),
    "lower": bytes(range(97, 123)),
    "space": b" \t",
    "newline": b"\n",
    "operator": b"+-*/=<>^%&|",
    "comma": b",;",
    "stop": b".!?",
    "colon": b":",
    "quote": b"\"'`",
    "open": b"([{",
    "close": b")]}",
    "other": b"#$@\\_~",
    "beyond_ascii": bytes(range(128, 256)),
}
_NAMES = tuple(_CLASSES)
_CODE = np.full(256, len(_NAMES), dtype=np.uint8)
for _number, _members in enumerate(_CLASSES.values()):
    _CODE[list(_members)] = _number
_WIDTH = 16
"""Codes per prompt in a count of classes: the classes, and one for all other bytes."""
_DIGIT = np.isin(_CODE, [_NAMES.index("digit")])
_LETTER = np.isin(_CODE, [_NAMES.index(name) for name in ("upper", "lower", "beyond_ascii")])
_ALNUM = _LETTER | _DIGIT
_FOLD = np.arange(256, dtype=np.uint64)  # letters in lower case, and all digits equal: "3021" and "7755" are one word
_FOLD[65:91] += 32
_FOLD[48:58] = 48
_BASE = 1099511628211
_UNBASE = pow(_BASE, -1, 1 << 64)
_TENS = 10.0 ** np.arange(301)

_TAIL_CLASSES = ("digit", "operator", "comma", "space", "newline", "open")
STRUCTURE = (
    "bytes",
    *(f"count_{name}" for name in _CLASSES),
    *("words", "word_mean", "word_max", "word_last", "line_max", "depth_max"),
    *("numbers", "number_max", "number_min", "number_mean", "number_log_sum", "number_first", "number_last"),
    *("number_digits_max", "quoted", "quoted_max", "quoted_sum", "quoted_last"),
    *("tail_bytes", *(f"tail_{name}" for name in _TAIL_CLASSES), "tail_words", "tail_word_max", "tail_numbers"),
    *("tail_number_max", "tail_number_log_sum"),
)
"""Structural columns; values of numbers and `bytes` as log(1 + x), all others as counts."""


@dataclass(frozen=True)
class PackedTexts:
    """Prompts as one byte array, each followed by a zero byte."""

    data: Array
    """Bytes [M], uint8."""
    begin: Array
    """Position of each prompt's first byte, followed by M [N + 1]."""
    size: Array
    """Size in bytes of each whole prompt [N]."""
    edges: Array
    """Bytes [M'] of the same prompts, reduced to `EDGE` bytes at each end, each followed by a zero byte."""
    edges_begin: Array
    """Positions in `edges` [N + 1], as in `begin`."""

    @cached_property
    def letters(self) -> tuple[Array, Array, Array]:
        """Starts, lengths and prompts of the runs of letters."""
        return self._runs(_LETTER)

    @cached_property
    def digits(self) -> tuple[Array, Array, Array]:
        """Starts, lengths and prompts of the runs of digits."""
        return self._runs(_DIGIT)

    @cached_property
    def number_logs(self) -> Array:
        """log(1 + value) of each run of digits."""
        start, length, _ = self.digits
        if not len(start):
            return np.zeros(0)
        before = np.cumsum(length) - length
        index = np.arange(int(length.sum())) + np.repeat(start - before, length)
        power = np.minimum(np.repeat(start + length, length) - 1 - index, 300)  # 10**308 is the largest float
        value = np.add.reduceat((self.data[index] - 48.0) * _TENS[power], before)
        return np.log1p(np.minimum(value, 1e300))

    def owner(self, place: Array) -> Array:
        """Return the prompt that contains each position [K]."""
        return np.searchsorted(self.begin, place, side="right") - 1

    def _runs(self, table: Array) -> tuple[Array, Array, Array]:
        start, length = runs(table[self.data])
        return start, length, self.owner(start)


def pack(texts: list[str]) -> PackedTexts:
    """Join prompts into one byte array."""
    encoded = [text.encode("utf-8", "replace").replace(b"\0", b" ") for text in texts]
    size = np.array([len(item) for item in encoded], dtype=np.int64)
    data, begin = _join([item if len(item) <= 2 * HALF else item[:HALF] + item[-HALF:] for item in encoded])
    edges, edges_begin = data, begin
    if (size > 2 * EDGE).any():
        short = [item if len(item) <= 2 * EDGE else item[:EDGE] + b" " + item[-EDGE:] for item in encoded]
        edges, edges_begin = _join(short)
    return PackedTexts(data, begin, size, edges, edges_begin)


def pack_batches(texts: list[str]) -> Iterator[PackedTexts]:
    """Join prompts, in order, into byte arrays of about `BATCH` characters of text each."""
    ends = np.cumsum([len(text) for text in texts])
    batches = np.split(np.arange(len(texts)), np.flatnonzero(np.diff(ends // BATCH)) + 1) if texts else []
    for batch in batches:
        yield pack(texts[batch[0] : batch[-1] + 1])


def _join(items: list[bytes]) -> tuple[Array, Array]:
    """Return the bytes [M] of items with a zero byte after each, and their positions followed by M [N + 1]."""
    data = np.frombuffer(b"".join([item + b"\0" for item in items]), dtype=np.uint8)
    return data, np.cumsum([0, *(len(item) + 1 for item in items)])


def structure(packed: PackedTexts) -> Array:
    """Return the columns `STRUCTURE` [N, len(STRUCTURE)], float32; NaN where undefined (a prompt without numbers)."""
    count = len(packed.size)
    tail = _tail(packed)
    code = _CODE[packed.data]
    # one count for everything: of each prompt before its tail, and in it
    bounds = np.stack((packed.begin[:-1], tail), axis=1).reshape(-1)
    key = np.repeat(np.arange(2 * count) * _WIDTH, np.diff(bounds, append=len(code)))
    key += code
    classes = np.bincount(key, minlength=2 * count * _WIDTH).reshape(count, 2, _WIDTH)
    columns = {"bytes": np.log1p(packed.size), "tail_bytes": packed.begin[1:] - tail}
    for number, name in enumerate(_NAMES):
        columns[f"count_{name}"] = classes[:, 0, number] + classes[:, 1, number]
    for name in _TAIL_CLASSES:
        columns[f"tail_{name}"] = classes[:, 1, _NAMES.index(name)]

    start, length, owner = packed.letters
    columns["words"] = np.bincount(owner, minlength=count)
    columns["word_mean"] = segment_reduce(np.add, length, owner, count, np.nan) / np.maximum(columns["words"], 1)
    columns["word_max"] = segment_reduce(np.maximum, length, owner, count, np.nan)
    columns["word_last"] = last_of(length, owner, count, np.nan)
    inside = start >= tail[owner]
    columns["tail_words"] = np.bincount(owner[inside], minlength=count)
    columns["tail_word_max"] = segment_reduce(np.maximum, length[inside], owner[inside], count, np.nan)

    ends = np.flatnonzero((packed.data == 10) | (packed.data == 0))
    line = np.diff(ends, prepend=-1) - 1
    columns["line_max"] = segment_reduce(np.maximum, line, packed.owner(ends), count, 0.0)
    columns |= _depth(packed, code) | _numbers(packed, tail) | _quoted(packed)
    return np.stack([np.asarray(columns[name], dtype=np.float32) for name in STRUCTURE], axis=1)


def _depth(packed: PackedTexts, code: Array) -> dict[str, Array]:
    """Return the nesting depth of brackets."""
    count = len(packed.size)
    opening = _NAMES.index("open")
    place = np.flatnonzero((code == opening) | (code == _NAMES.index("close")))
    owner = packed.owner(place)
    step = np.where(code[place] == opening, 1, -1)
    depth = np.cumsum(step)
    before = first_of(depth - step, owner, count, 0.0)
    return {"depth_max": np.maximum(segment_reduce(np.maximum, depth, owner, count, 0.0) - before, 0.0)}


def _tail(packed: PackedTexts) -> Array:
    """Return where each tail begins [N]: after the last colon before a letter or digit, or else with the prompt."""
    count = len(packed.size)
    content = np.full(count, -1)
    for start, _, owner in (packed.letters, packed.digits):
        content = np.maximum(content, last_of(start, owner, count, -1))
    colons = np.flatnonzero(packed.data == 58)
    owner = packed.owner(colons)
    followed = colons < content[owner]
    return np.maximum(packed.begin[:-1], 1 + last_of(colons[followed], owner[followed], count, -1).astype(np.int64))


def _numbers(packed: PackedTexts, tail: Array) -> dict[str, Array]:
    """Return columns on numbers written in digits (a decimal fraction counts as two); tails begin at `tail` [N]."""
    count = len(packed.size)
    start, length, owner = packed.digits
    log = packed.number_logs
    numbers = np.bincount(owner, minlength=count)
    log_sum = segment_reduce(np.add, log, owner, count, 0.0)
    inside = start >= tail[owner]
    return {
        "numbers": numbers,
        "number_max": segment_reduce(np.maximum, log, owner, count, np.nan),
        "number_min": segment_reduce(np.minimum, log, owner, count, np.nan),
        "number_mean": np.where(numbers > 0, log_sum / np.maximum(numbers, 1), np.nan),
        "number_log_sum": log_sum,
        "number_first": first_of(log, owner, count, np.nan),
        "number_last": last_of(log, owner, count, np.nan),
        "number_digits_max": segment_reduce(np.maximum, length, owner, count, 0.0),
        "tail_numbers": np.bincount(owner[inside], minlength=count),
        "tail_number_max": segment_reduce(np.maximum, log[inside], owner[inside], count, np.nan),
        "tail_number_log_sum": segment_reduce(np.add, log[inside], owner[inside], count, 0.0),
    }


def hash_runs(data: Array, start: Array, length: Array, fold: Array | None = None) -> Array:
    """Return 64-bit hashes of runs of bytes [M], mapped by `fold` [256]: polynomials in `_BASE`, modulo 2**64.

    A run's polynomial is the difference of two running sums over all bytes, divided by the power of its first position;
    the base is odd and so has an inverse.
    """
    values = data.astype(np.uint64) if fold is None else fold[data]
    values += np.uint64(1)
    with np.errstate(over="ignore"):
        values *= _powers(_BASE, len(data))
        sums = np.cumsum(values)
        whole = sums[start + length - 1] - sums[start] + values[start]
        hashed: Array = whole * _powers(_UNBASE, len(data))[start]
    return hashed


_KEPT: dict[int, Array] = {}


def _powers(base: int, count: int) -> Array:
    """Return the first powers of a base [count], modulo 2**64; cached, as every batch needs them."""
    kept = _KEPT.get(base)
    if kept is None or len(kept) < count:
        kept = np.full(2 * count, base, dtype=np.uint64)
        kept[0] = 1
        with np.errstate(over="ignore"):
            _KEPT[base] = kept = np.cumprod(kept)
    return kept[:count]


def _quoted(packed: PackedTexts) -> dict[str, Array]:
    """Return columns on text between pairs of double quotes or backticks (apostrophes are not quotes)."""
    count = len(packed.size)
    place = np.flatnonzero((packed.data == 34) | (packed.data == 96))
    owner = packed.owner(place)
    sizes = np.bincount(owner, minlength=count)
    rank = np.arange(len(place)) - (np.cumsum(sizes) - sizes)[owner]
    opening = np.flatnonzero((rank % 2 == 0) & (rank + 1 < sizes[owner]))
    length, owner = place[opening + 1] - place[opening] - 1, owner[opening]
    return {
        "quoted": np.bincount(owner, minlength=count),
        "quoted_max": segment_reduce(np.maximum, length, owner, count, np.nan),
        "quoted_sum": segment_reduce(np.add, length, owner, count, 0.0),
        "quoted_last": last_of(length, owner, count, np.nan),
    }


def ngrams(packed: PackedTexts) -> dict[str, tuple[Array, Array]]:
    """Return hashed n-grams of the prompts' edges as (begin [N + 1], bucket [K]), by kind.

    Kinds are `word` (words and pairs) and `char` (three bytes). The n-grams of prompt i are those from begin[i] to
    begin[i + 1].
    """
    data, begin = packed.edges, packed.edges_begin
    start, length = runs(_ALNUM[data])
    hashed = hash_runs(data, start, length, _FOLD)
    # a word stands beside the pair of it and the next one; the last word of a prompt has no pair
    with np.errstate(over="ignore"):
        pair = hashed * np.uint64(31) + np.append(hashed[1:], np.uint64(0)) * np.uint64(17) + np.uint64(7)
    words = np.searchsorted(start, begin)
    last = words[1:][words[1:] > words[:-1]] - 1
    kept = np.ones((len(start), 2), dtype=bool)
    kept[last, 1] = False
    word = _bucket(np.stack((hashed, pair), axis=1)[kept])
    pairs_before = np.concatenate(([0], np.cumsum(words[1:] > words[:-1])))
    folded = _FOLD[data] + np.uint64(1)
    powers = _powers(_BASE, 3)[1:]
    with np.errstate(over="ignore"):
        three = folded[:-2] + folded[1:-1] * powers[0] + folded[2:] * powers[1]
    size = np.diff(begin) - 1
    inside = np.ones(len(data), dtype=bool)
    inside[begin[1:] - 1] = False  # no three bytes of one prompt begin at the zero byte or at the two bytes before it
    inside[begin[1:] - 1 - np.minimum(size, 1)] = False
    inside[begin[1:] - 1 - np.minimum(size, 2)] = False
    char = _bucket(three[inside[: len(three)]])
    return {
        "word": (2 * words - pairs_before, word),
        "char": (np.concatenate(([0], np.cumsum(np.maximum(size - 2, 0)))), char),
    }


def _bucket(hashed: Array) -> Array:
    """Return the buckets of 64-bit hashes; the multiplication spreads the low bits to the high ones."""
    with np.errstate(over="ignore"):
        mixed = (hashed ^ (hashed >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(64 - BUCKETS.bit_length() + 1)).astype(np.int64)
