"""Prompt text as numbers: counts, sizes and hashed n-grams, for thousands of prompts at once.

All prompts of a batch are joined into one byte array, and everything is computed on that array with numpy, so that no
Python loop runs over prompts or words. The structural columns say how big the problem in a prompt is (how many terms,
how large the numbers, how long the word) in ways that do not depend on its wording; they are also taken of the `tail`,
the text after the last colon, where many prompts put the problem itself after instructions and examples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ranker.segments import Array, first_of, last_of, runs, segment_reduce

HALF = 2048
"""Bytes read at each end of a prompt; what lies between (a long document) is left out, and only its size counts."""

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
_TABLE = {name: np.isin(np.arange(256), list(members)) for name, members in _CLASSES.items()}
LETTER = _TABLE["upper"] | _TABLE["lower"] | _TABLE["beyond_ascii"]
_ALNUM = LETTER | _TABLE["digit"]
_FOLD = np.arange(256, dtype=np.uint64)  # letters in lower case, and all digits alike: "3021" and "7755" are one word
_FOLD[65:91] += 32
_FOLD[48:58] = 48
with np.errstate(over="ignore"):
    _POWERS = np.cumprod(np.full(2 * HALF + 1, 1099511628211, dtype=np.uint64))

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
"""Structural columns; values of numbers and `bytes` as log(1 + x), all else as counts."""


@dataclass(frozen=True)
class Packed:
    """Prompts as one byte array, each followed by a zero byte."""

    data: Array
    """Bytes [M], uint8."""
    prompt: Array
    """The prompt that each byte is of [M]."""
    size: Array
    """Bytes of each whole prompt [N]."""


def pack(texts: list[str]) -> Packed:
    """Joins prompts."""
    encoded = [text.encode("utf-8", "replace").replace(b"\0", b" ") for text in texts]
    size = np.array([len(item) for item in encoded], dtype=np.int64)
    kept = [item if len(item) <= 2 * HALF else item[:HALF] + item[-HALF:] for item in encoded]
    data = np.frombuffer(b"".join(item + b"\0" for item in kept), dtype=np.uint8)
    prompt = np.repeat(np.arange(len(texts)), np.minimum(size, 2 * HALF) + 1)
    return Packed(data, prompt, size)


def structure(packed: Packed) -> Array:
    """The columns `STRUCTURE` [N, len(STRUCTURE)], float32; NaN for what a prompt has not (no number)."""
    data, prompt, count = packed.data, packed.prompt, len(packed.size)
    masks = {name: table[data] for name, table in _TABLE.items()}
    columns = {"bytes": np.log1p(packed.size)}
    for name, mask in masks.items():
        columns[f"count_{name}"] = np.bincount(prompt[mask], minlength=count)

    tail = _tail(packed, masks["colon"])
    columns["tail_bytes"] = np.bincount(prompt[tail], minlength=count)
    for name in _TAIL_CLASSES:
        columns[f"tail_{name}"] = np.bincount(prompt[tail & masks[name]], minlength=count)

    start, length = runs(LETTER[data])
    owner = prompt[start]
    columns["words"] = np.bincount(owner, minlength=count)
    columns["word_mean"] = segment_reduce(np.add, length, owner, count, np.nan) / np.maximum(columns["words"], 1)
    columns["word_max"] = segment_reduce(np.maximum, length, owner, count, np.nan)
    columns["word_last"] = last_of(length, owner, count, np.nan)
    inside = tail[start]
    columns["tail_words"] = np.bincount(owner[inside], minlength=count)
    columns["tail_word_max"] = segment_reduce(np.maximum, length[inside], owner[inside], count, np.nan)

    start, length = runs((data != 10) & (data != 0))
    columns["line_max"] = segment_reduce(np.maximum, length, prompt[start], count, 0.0)
    step = masks["open"].astype(np.int64) - masks["close"]
    depth = np.cumsum(step)
    before = first_of(depth - step, prompt, count, 0.0)
    columns["depth_max"] = segment_reduce(np.maximum, depth, prompt, count, 0.0) - before

    columns |= _numbers(packed, tail) | _quoted(packed)
    return np.stack([np.asarray(columns[name], dtype=np.float32) for name in STRUCTURE], axis=1)


def _tail(packed: Packed, colon: Array) -> Array:
    """Bytes [M] after the last colon that is followed by a letter or digit; all bytes of a prompt without one."""
    place = np.arange(len(packed.data))
    count = len(packed.size)
    content = np.flatnonzero(_ALNUM[packed.data])
    last_content = last_of(content, packed.prompt[content], count, -1.0)
    colons = np.flatnonzero(colon)
    colons = colons[colons < last_content[packed.prompt[colons]]]
    begin = last_of(colons, packed.prompt[colons], count, -1.0)
    after: Array = place > begin[packed.prompt]
    return after


def _numbers(packed: Packed, tail: Array) -> dict[str, Array]:
    """Columns of the numbers written in digits (a decimal fraction counts as two)."""
    count = len(packed.size)
    start, length, log = number_logs(packed.data)
    owner = packed.prompt[start]
    numbers = np.bincount(owner, minlength=count)
    log_sum = segment_reduce(np.add, log, owner, count, 0.0)
    inside = tail[start]
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


def number_logs(data: Array) -> tuple[Array, Array, Array]:
    """Starts, lengths and log(1 + value) of the runs of digits in bytes [M]."""
    digit = _TABLE["digit"][data]
    start, length = runs(digit)
    if not len(start):
        return start, length, np.zeros(0)
    index = np.flatnonzero(digit)
    power = np.minimum(np.repeat(start + length, length) - 1 - index, 300)  # 10**308 is the largest float
    value = np.add.reduceat((data[index] - 48.0) * 10.0**power, np.cumsum(length) - length)
    return start, length, np.log1p(np.minimum(value, 1e300))


def hash_runs(data: Array, mask: Array, fold: Array | None = None) -> tuple[Array, Array, Array]:
    """Starts, lengths and 64-bit hashes of the runs of True in `mask` [M], of bytes [M] mapped by `fold` [256]."""
    start, length = runs(mask)
    if not len(start):
        return start, length, np.zeros(0, dtype=np.uint64)
    index = np.flatnonzero(mask)
    place = index - np.repeat(start, length)
    values = data[index].astype(np.uint64) if fold is None else fold[data[index]]
    with np.errstate(over="ignore"):
        hashed = np.add.reduceat((values + np.uint64(1)) * _POWERS[place], np.cumsum(length) - length)
    return start, length, hashed


def _quoted(packed: Packed) -> dict[str, Array]:
    """Columns of what stands between pairs of double quotes or backticks (apostrophes are no quotes)."""
    count = len(packed.size)
    place = np.flatnonzero((packed.data == 34) | (packed.data == 96))
    owner = packed.prompt[place]
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


def ngrams(packed: Packed) -> dict[str, tuple[Array, Array]]:
    """Hashed n-grams as (prompt [K] ascending, bucket [K]): `word` (words and pairs) and `char` (three bytes)."""
    data, prompt = packed.data, packed.prompt
    folded = _FOLD[data] + np.uint64(1)
    start, _, hashed = hash_runs(data, _ALNUM[data], _FOLD)
    words: tuple[Array, Array] = (np.zeros(0, np.int64), np.zeros(0, np.int64))
    if len(start):
        with np.errstate(over="ignore"):
            pair = hashed[:-1] * np.uint64(31) + hashed[1:] * np.uint64(17) + np.uint64(7)
        owner = prompt[start]
        together = owner[:-1] == owner[1:]
        owners = np.concatenate((owner, owner[:-1][together]))
        buckets = np.concatenate((_bucket(hashed), _bucket(pair[together])))
        order = np.argsort(owners, kind="stable")
        words = owners[order], buckets[order]
    if len(data) < 3:
        return {"word": words, "char": (np.zeros(0, np.int64), np.zeros(0, np.int64))}
    with np.errstate(over="ignore"):
        three = folded[:-2] + folded[1:-1] * _POWERS[0] + folded[2:] * _POWERS[1]
    inside = (prompt[:-2] == prompt[2:]) & (data[2:] != 0)
    return {"word": words, "char": (prompt[:-2][inside], _bucket(three[inside]))}


def _bucket(hashed: Array) -> Array:
    """Buckets of 64-bit hashes; the multiplication spreads the low bits to the high ones."""
    with np.errstate(over="ignore"):
        mixed = (hashed ^ (hashed >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(64 - BUCKETS.bit_length() + 1)).astype(np.int64)
