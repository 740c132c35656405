"""Damaged and invented messages for readers, and what comes of reading them; `test_fuzz.py` says of what kind."""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np

from streamrl.transport.wire import Message, encode

MEMORY_MIB = 512
"""By so much a family may raise the process's peak: a compressed batch may take 64 MiB twice, and heaps fragment."""
DEEPEST = 1000
"""Levels of nesting; msgpack reads 1024, of which the envelope takes some."""
DEEP = "\0deep"
"""Stands for a value nested deeper than `msgpack.packb` would write."""
DEEP_PACKED = msgpack.packb(DEEP)
JUNK: list[Any] = [
    *(None, True, False, -1, 0, 1, 3, 255, 2**31 - 1, 2**31, 2**62, 2**63, 2**64 - 1, -(2**63), 0.5, 1e308),
    *(float("nan"), float("inf"), float("-inf"), DEEP, DEEP, "", "x" * 300, "raw", "zstd", "bfloat16", "\u0663", "1"),
    *("\n", b"", b"\xff", b"raw", [], [[]], [1] * 40, ["a"], [None, None], {}, {"n": 1}, {b"n": 1}, {"": []}),
    *(msgpack.ExtType(5, b"x"), msgpack.Timestamp(1, 2)),
]
LONG = [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"]
"""msgpack's heads with a length of 4 bytes: array, map, string, bytes, extension."""
TOKENS = [
    *(b"\xc1", b"\xc0", b"\xc3", b"\x80", b"\x8f", b"\x90", b"\x9f", b"\xa0", b"\xbf", b"\xff", b"\x7f", b"\xca"),
    *(head + length for head in LONG for length in (b"\xff\xff\xff\xff", b"\x00\x00\xff\xff")),
    *(b"\xdc\xff\xff", b"\xde\xff\xff", b"\xc8\xff\xff\x05", b"\xd6\xff\x00\x00\x00\x01", b"\x91" * 60),
]
"""What is spliced into messages: values of one byte, and heads that announce what is not there."""

Frames = list[Any]
Record = Callable[[str, object], None]


class Dice:
    """Choices from one seed; drawn in blocks, since a single draw of numpy takes as long as a reader."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self._numbers = self._drawn()

    def _drawn(self) -> Iterator[int]:
        while True:
            yield from self.rng.integers(0, 1 << 48, 1 << 14).tolist()

    def below(self, n: int) -> int:
        return next(self._numbers) % n

    def pick(self, values: Sequence[Any]) -> Any:
        return values[next(self._numbers) % len(values)]

    def bytes(self, n: int) -> np.ndarray:
        return self.rng.integers(0, 256, n, dtype=np.uint8)


def mutated_bytes(dice: Dice, data: Any, tokens: Sequence[bytes] = TOKENS) -> bytes:
    found = bytearray(data)
    for _ in range(dice.pick((1, 1, 1, 2, 4))):
        at, token = dice.below(len(found) + 1), dice.pick(tokens)
        match dice.below(9):
            case 0 | 1 | 2 if at < len(found):
                found[at] ^= 1 << dice.below(8)
            case 3 if at < len(found):
                found[at] = dice.below(256)
            case 4:
                del found[at:]
            case 5:
                del found[at : at + dice.below(6)]
            case 6:
                found[at:at] = token
            case 7:
                found[at : at + len(token)] = token
            case _:
                found[at:at] = found[at : at + dice.below(20)] or dice.bytes(dice.below(20)).tobytes()
    return bytes(found)


def mutated_value(dice: Dice, value: Any) -> Any:
    """A copy in which one value somewhere is another, is missing, or comes twice."""
    choice = dice.below(8)
    if isinstance(value, dict) and value and choice:
        key = dice.pick(list(value))
        if choice == 1:
            return {k: v for k, v in value.items() if k != key}
        if choice == 2:
            return value | {dice.pick(("x", "", key + "_")): dice.pick(JUNK)}
        return value | {key: mutated_value(dice, value[key])}
    if isinstance(value, list | tuple) and value and choice:
        at, copy = dice.below(len(value)), list(value)
        if choice == 1:
            del copy[at]
        elif choice == 2:
            copy.insert(at, dice.pick([*JUNK, copy[at]]))
        else:
            copy[at] = mutated_value(dice, copy[at])
        return copy
    if isinstance(value, int) and choice < 4:
        return max(0, value + dice.pick((-1, 1, 2, 255, 1 << 20)))
    return dice.pick(JUNK)


def mutated_arrays(dice: Dice, arrays: Any) -> dict[str, np.ndarray]:
    name = dice.pick(list(arrays))
    array = arrays[name].copy()
    match dice.below(8):
        case 0 | 1 if array.size:
            data = array.reshape(-1).view(np.uint8)
            data[dice.below(data.size)] = dice.below(256)
        case 2 if array.size and array.dtype.kind == "i":
            array.reshape(-1)[dice.below(array.size)] += dice.pick((-1, 1, -100, 100))
        case 3:
            array = array[: dice.below(len(array) + 1)]
        case 4:
            array = dice.pick((np.concatenate([array, array]), array.reshape(-1, 1), np.array(3, array.dtype)))
        case 5:
            array = array.astype(dice.pick(("float64", "int64", "int32", "uint8", "bool")))
        case 6:
            return {other: arrays[other] for other in arrays if other != name}
        case _:
            return {**arrays, dice.pick(("x", "", "kept.x", name + " ")): array}
    return {**arrays, name: array}


def packed(dice: Dice, envelope: Any) -> bytes:
    """As msgpack; what is too deep for its packer is written here."""
    data: bytes = msgpack.packb(envelope)
    if DEEP_PACKED in data:
        depth = dice.pick((20, 600, DEEPEST))
        data = data.replace(DEEP_PACKED, dice.pick((b"\x91" * depth, b"\x81\xa1x" * depth)) + b"\xc0")
    return data


def frames_of(sent: Message) -> Frames:
    return [bytes(frame) for frame in encode(sent)]


def mutated(dice: Dice, sent: Message, whole: Frames) -> Frames:
    """Frames of a message with something wrong in them, or of one that has other values; `whole` are its own."""
    choice = dice.below(12)
    if choice < 3 and sent.arrays:
        frames = frames_of(replace(sent, arrays=mutated_arrays(dice, sent.arrays)))
    else:
        frames = list(whole)
    at = dice.pick((0, 0, dice.below(len(frames))))
    if 3 <= choice < 8:
        envelope = msgpack.unpackb(frames[0])
        told = {"b": mutated_value(dice, envelope["b"])} if choice < 7 else mutated_value(dice, envelope)
        frames[0] = packed(dice, envelope | told if choice < 7 else told)
    elif choice == 8:
        frames[at:at] = [frames[at]] * dice.below(2) + [dice.bytes(dice.below(30)).tobytes()]
        del frames[dice.below(len(frames) + 1) :]
    elif choice > 8:
        frames[at] = mutated_bytes(dice, frames[at])
    return frames


def fuzz(
    record: Record, reads: Sequence[Callable[[Any], None]], inputs: Iterable[Any], allowed: tuple[type[Exception], ...]
) -> Counter[str]:
    """What readers (taking turns) made of all inputs, by the exception's name; fails for one that is not allowed."""
    found: Counter[str] = Counter()
    wrong: dict[str, Any] = {}
    slowest, started = 0.0, time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number, given in enumerate(inputs):
        read, begun = reads[number % len(reads)], time.perf_counter()
        try:
            read(given)
            kind = "value"
        except allowed as error:
            kind = type(error).__name__
        except Exception as error:
            kind = f"{type(error).__name__} of {read.__name__}"
            wrong.setdefault(kind, (str(error)[:200], str(given)[:1500]))
        found[kind] += 1
        slowest = max(slowest, time.perf_counter() - begun)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    record("messages", found.total())
    record("outcomes", dict(found))
    record("seconds", round(time.perf_counter() - started, 2))
    record("slowest message, seconds", round(slowest, 4))
    record("peak memory, MiB more", round(grown, 1))
    assert not wrong, f"of {dict(found)}, the first of each: {wrong}"
    assert grown < MEMORY_MIB
    return found


def peers_frames(seed: int, sent: Sequence[Message], count: int) -> Iterator[Frames]:
    """Mutations of messages, which take turns."""
    dice, known = Dice(seed), [(one, frames_of(one)) for one in sent]
    return (mutated(dice, *known[number % len(known)]) for number in range(count))
