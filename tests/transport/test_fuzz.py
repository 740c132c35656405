"""Everything that reads what a peer or a file says, fed with damaged and invented messages.

Valid messages are mutated: bits flipped, ends cut off, bytes inserted, values swapped for others of any type that msgpack
has, lengths announced that are not there, nesting up to what msgpack reads. A reader may raise what its docstring names,
and nothing else; what it returns must be well formed. It must not hang (the test's time limit) or take much memory.

STREAMRL_FUZZ_FRAMES=1000000 runs each family of readers on so many messages; what came out is in the properties of the
JUnit file (`--junitxml`).
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from scheduler.cost import StepCurve
from scheduler.forecast import Forecast
from scheduler.simulator import SimulatedInstance
from streamrl.control.arrivals import arrived
from streamrl.errors import RunFailed, UserError
from streamrl.generation.batches import TOKEN_ARRAYS, pack_samples, unpack_samples
from streamrl.generation.messages import (
    fleet_from_wire,
    fleet_to_wire,
    groups_from_wire,
    partial_from_wire,
    request_from_wire,
    request_to_wire,
    sample_from_wire,
    sample_to_wire,
)
from streamrl.launch.instances import RUNNING, WANTED, StartedProcess, WantedInstance, read_started, read_wanted
from streamrl.observe import site, status
from streamrl.rollouts import micro_batch
from streamrl.rollouts.ledger import unpack_content
from streamrl.rollouts.types import PartialSample, Sample, SampleRequest
from streamrl.transport.base import Delivery, Outgoing, take_ack, take_state
from streamrl.transport.curve import load_own, load_public, make_keys, public_file, secret_file
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.delivery import Outbox
from streamrl.transport.endpoint import Hub
from streamrl.transport.hub import Route
from streamrl.transport.wire import DTYPES, MalformedMessage, Message, decode, encode, is_plain
from streamrl.weights.delta import CorruptDelta, decode_tensor, encode_tensor, is_complete
from streamrl.weights.entropy import Writer
from streamrl.weights.publisher import code
from streamrl.weights.store import WeightStore
from streamrl.weights.version import CorruptWeights, Manifest, Part, lay_out
from tests.training.conftest import free_port, random_groups

FRAMES = int(os.environ.get("STREAMRL_FUZZ_FRAMES", "0"))
"""Messages for each family; 0: as many as take a second or two."""
LIMIT_S = 60 + FRAMES / 500
MEMORY_MIB = 512
"""By so much a family may raise the process's peak: a compressed batch may take 64 MiB, twice, and the heap fragments."""
DEEPEST = 1000
"""Levels of nesting; msgpack reads 1024, of which the envelope takes some."""
DEEP = "\0deep"
"""Stands for a value nested deeper than `msgpack.packb` would write."""
DEEP_PACKED = msgpack.packb(DEEP)

JUNK: list[Any] = [
    *(None, True, False, -1, 0, 1, 3, 255, 2**31 - 1, 2**31, 2**62, 2**63, 2**64 - 1, -(2**63)),
    *(0.5, float("nan"), float("inf"), float("-inf"), 1e308, DEEP, DEEP),
    *("", "x" * 300, "raw", "zstd", "bfloat16", "\u0663", "1", "\n", b"", b"\xff", b"raw"),
    *([], [[]], [1] * 40, ["a"], [None, None], {}, {"n": 1}, {b"n": 1}, {"": []}),
    *(msgpack.ExtType(5, b"x"), msgpack.Timestamp(1, 2)),
]
TOKENS = [
    *(b"\xc1", b"\xc0", b"\xc3", b"\x80", b"\x8f", b"\x90", b"\x9f", b"\xa0", b"\xbf", b"\xff", b"\x7f", b"\xca", b"\xcf"),
    *(head + b"\xff\xff\xff\xff" for head in (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9")),
    *(head + b"\x00\x00\xff\xff" for head in (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9")),
    *(b"\xdc\xff\xff", b"\xde\xff\xff", b"\xc8\xff\xff\x05", b"\xd6\xff\x00\x00\x00\x01", b"\x91" * 60, b"\x81\xa1x" * 60),
]
"""msgpack's heads: containers, strings and extensions that announce what is not there, and values of one byte."""

Frames = list[Any]


class Dice:
    """Random choices from one seed; drawn in blocks, since single draws of numpy take longer than most readers."""

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


def mutated_bytes(dice: Dice, data: Any, tokens: Sequence[bytes] = TOKENS) -> bytes:
    found = bytearray(data)
    for _ in range(dice.pick((1, 1, 1, 2, 4))):
        at = dice.below(len(found) + 1)
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
                found[at:at] = dice.pick(tokens)
            case 7:
                token = dice.pick(tokens)
                found[at : at + len(token)] = token
            case _:
                found[at:at] = found[at : at + dice.below(20)] or dice.rng.bytes(dice.below(20))
    return bytes(found)


def mutated_value(dice: Dice, value: Any) -> Any:
    """A copy in which one value somewhere is another, or is missing, or comes twice."""
    if isinstance(value, dict) and value and (choice := dice.below(8)):
        key = dice.pick(list(value))
        if choice == 1:
            return {k: v for k, v in value.items() if k != key}
        if choice == 2:
            return value | {dice.pick(("x", "", key + "_")): dice.pick(JUNK)}
        return value | {key: mutated_value(dice, value[key])}
    if isinstance(value, list | tuple) and value and (choice := dice.below(8)):
        at, copy = dice.below(len(value)), list(value)
        if choice == 1:
            del copy[at]
        elif choice == 2:
            copy[at:at] = [dice.pick([*JUNK, copy[at]])]
        else:
            copy[at] = mutated_value(dice, copy[at])
        return copy
    if isinstance(value, int) and dice.below(2):
        return max(0, value + dice.pick((-1, 1, 2, 255, 1 << 20)))
    return dice.pick(JUNK)


def mutated_arrays(dice: Dice, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    arrays = dict(arrays)
    name = dice.pick(list(arrays))
    array = arrays[name]
    match dice.below(9):
        case 0 | 1 | 2:  # other values; of integers often the neighbours
            array = arrays[name] = array.copy()
            if array.size:
                flat = array.reshape(-1)
                at, bits = dice.below(flat.size), flat.view(np.uint8)
                if dice.below(2) and array.dtype.kind == "i":
                    flat[at] += dice.pick((-1, 1, -100, 100))
                else:
                    bits[dice.below(bits.size)] = dice.below(256)
        case 3:
            arrays[name] = array[: dice.below(len(array) + 1)]
        case 4:
            arrays[name] = np.concatenate([array, array])
        case 5:
            arrays[name] = dice.pick((array.reshape(-1, 1), array.reshape(1, -1), np.array(3, array.dtype)))
        case 6:
            arrays[name] = array.astype(dice.pick(("float64", "int64", "int32", "uint8", "bool")))
        case 7:
            del arrays[name]
        case _:
            arrays[dice.pick(("x", "", "kept.x", name + " "))] = dice.pick(list(arrays.values()))
    return arrays


def packed(envelope: Any, dice: Dice) -> bytes:
    """As msgpack; what is too deep for its packer is written here."""
    data: bytes = msgpack.packb(envelope)
    if DEEP_PACKED in data:
        depth = dice.pick((20, 600, DEEPEST))
        data = data.replace(DEEP_PACKED, dice.pick((b"\x91" * depth, b"\x81\xa1x" * depth)) + b"\xc0")
    return data


def mutated(dice: Dice, message: Message) -> Frames:
    """Frames of a message with something wrong in them, or of one that has other values."""
    match dice.below(12):
        case 0 | 1 | 2 | 3:
            frames: Frames = encode(Message(message.kind, message.session, message.number, {}, message.arrays))
            envelope = msgpack.unpackb(frames[0])
            frames[0] = packed(envelope | {"b": mutated_value(dice, message.body)}, dice)
            return frames
        case 4 | 5 | 6 if message.arrays:
            return list(encode(Message(*list(message.__dict__.values())[:4], mutated_arrays(dice, message.arrays))))
        case 7:
            frames = list(encode(message))
            frames[0] = packed(mutated_value(dice, msgpack.unpackb(frames[0])), dice)
            return frames
        case 8:
            frames = list(encode(message))
            at = dice.below(len(frames))
            frames[at:at] = [frames[dice.below(len(frames))]] * dice.below(2) + [dice.rng.bytes(dice.below(30))]
            return frames[: dice.below(len(frames) + 1)]
        case _:
            frames = list(encode(message))
            at = dice.pick((0, 0, dice.below(len(frames))))
            frames[at] = mutated_bytes(dice, frames[at])
            return frames


Record = Callable[[str, object], None]


def outcomes(
    record: Record, reads: Sequence[Callable[[Any], None]], inputs: Iterator[Any], allowed: tuple[type[Exception], ...]
) -> Counter[str]:
    """What readers made of as many inputs as are due, by the exception's name; fails for one that is not allowed.

    Args:
        record: pytest's `record_property`.
        reads: take turns; each checks what it has read.
        inputs: by the same turns.
        allowed: what may be raised.
    """
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
            kind = f"{type(error).__name__} of {getattr(read, '__name__', read)}"
            wrong.setdefault(kind, (str(error)[:80], repr_of(given)))
        found[kind] += 1
        slowest = max(slowest, time.perf_counter() - begun)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    record("outcomes", dict(found))
    record("messages", found.total())
    record("seconds", round(time.perf_counter() - started, 2))
    record("slowest message, seconds", round(slowest, 4))
    record("peak memory, MiB more", round(grown, 1))
    assert not wrong, f"{ {kind: found[kind] for kind in wrong} }; the first of each: {wrong}"
    assert grown < MEMORY_MIB
    return found


def repr_of(given: Any) -> str:
    try:
        return repr([bytes(frame) for frame in given] if isinstance(given, list) else given)[:3000]
    except RecursionError:
        return "too deep to show"


def frames_of(seed: int, messages: Sequence[Message], default: int) -> Iterator[Frames]:
    """Mutated messages, taking turns."""
    dice = Dice(seed)
    for number in range(FRAMES or default):
        yield mutated(dice, messages[number % len(messages)])


# -- messages as they are sent


def sample(sample_id: str, tokens: int) -> Sample:
    rng = np.random.default_rng(tokens)
    return Sample(
        *(sample_id, "g", rng.integers(0, 60_000, tokens, dtype=np.int32), -rng.random(tokens, dtype=np.float32)),
        *(np.full(tokens, 3, np.int32), "stop", "west", "west-a-0", "a", "tail", 1.0, 2.0, 3.0, 4.5, "the answer"),
    )


def requests() -> list[Message]:
    prompt = np.arange(9, dtype=np.int32)
    plain = SampleRequest("g.0", "g", prompt, 7, 1.5, 0.5, 64)
    kept = PartialSample("g.0", *(np.arange(4, dtype=t) for t in ("int32", "float32", "int32")), 1.0, 2.0)
    moved = SampleRequest("g.0", "g", prompt, 7, 1.5, None, None, kept)
    return [Message("generate", "s", 1, *request_to_wire(request)) for request in (plain, moved)]  # type: ignore[arg-type]


def groups() -> Message:
    body = {
        "t_queued": 1.5,
        "budget": 64,
        "groups": [
            {"group_id": "a", "samples": [["a.0", 1, None], ["a.1", 2, 0.0]], "forecast": None},
            {"group_id": "b", "samples": [["b.0", 3, 1.0]], "forecast": {"lengths": [1.0, 2.0], "tail": [3.0]}},
        ],
    }
    arrays = {"prompt_tokens": np.arange(7, dtype=np.int32), "prompt_lengths": np.array([3, 4], np.int32)}
    return Message("generate", "s", 1, body, arrays)


def partial() -> Message:
    kept = PartialSample("g.0", *(np.arange(4, dtype=t) for t in ("int32", "float32", "int32")), 1.0, 2.0)
    return Message("released", "s", 1, *sample_to_wire(kept))  # type: ignore[arg-type]


def batch(compress: bool) -> Message:
    items = [sample_to_wire(sample(f"g.{number}", tokens)) for number, tokens in enumerate((0, 7, 40))]
    return Message("samples", "s", 1, *pack_samples(items, compress))


def fleet() -> Message:
    curve = StepCurve((1, 8), (0.02, 0.05), 1e-7, 1e-5)
    instances = [SimulatedInstance("west-a-0", curve, 8, "a"), SimulatedInstance("west-a-1", curve, 8)]
    return Message("fleet", "s", 1, {"fleet": fleet_to_wire(instances), "instances": {"west-a-0": {"pool": "a"}}})


def micro() -> Message:
    return Message("micro_batch", "s", 1, *micro_batch.to_wire(random_groups(3)))  # type: ignore[arg-type]


def weights() -> Message:
    generator = torch.Generator().manual_seed(0)
    tensors = {"a": torch.randn(40, generator=generator).bfloat16(), "b": torch.randn(3, 5, generator=generator)}
    old, new = lay_out(3, tensors.items()), lay_out(4, {**tensors, "a": tensors["a"] + 1}.items())
    parts = [code(*old, None)[0].to_dict(), code(*new, (3, old[1]))[0].to_dict()]
    return Message("manifest", "s", 1, {"request": 1, "manifest": new[0].to_dict(), "parts": parts})


def control(session: str = "s") -> list[Message]:
    state = {"waits": [{"owner": "x", "for": "y", "limit_s": 3.0}], "produced": {"g.0": 17}, "malformed": 0}
    return [
        Message("hello", session, 0, {"name": "service-west", "role": "service", "meta": {"site": "west", "slots": 3}}),
        Message("heartbeat", session, 0, state | {"clock": {"sent": 1.5, "hub": 2.5}}),
        Message("ack", session, 0, {"n": 1, "s": session}),
        Message("bye", session, 0, {}),
        Message("item", session, 2, {"i": 1}, {name: np.zeros((2, 3), dtype) for name, dtype in DTYPES.items()}),
    ]


# -- readers, and what they must have read


def read_message(frames: Frames) -> Message:
    message = decode(frames)
    assert isinstance(message.kind, str) and isinstance(message.session, str) and isinstance(message.body, dict)
    assert type(message.number) is int and message.number >= 0
    assert len(message.arrays) == len(frames) - 1
    for array, frame in zip(message.arrays.values(), frames[1:], strict=True):
        assert array.dtype in DTYPES.values() and array.nbytes == len(frame) and not array.flags.writeable
    return message


def read_wire(frames: Frames) -> None:
    read_message(frames)


def read_samples(frames: Frames) -> None:
    message = decode(frames)
    for body, arrays in unpack_samples(message.body, message.arrays):
        assert isinstance(body, dict) and arrays.keys() == TOKEN_ARRAYS.keys()
        assert all(array.ndim == 1 and array.dtype == TOKEN_ARRAYS[name] for name, array in arrays.items())
        assert len({len(array) for array in arrays.values()}) == 1


def read_arrivals(frames: Frames) -> None:
    message = decode(frames)
    for one, content in arrived([Delivery("service-west", message.kind, message.body, message.arrays, lambda: None)]):
        kept = sample_from_wire(*unpack_content(content))
        for name in TOKEN_ARRAYS:
            assert getattr(kept, name).tobytes() == getattr(one, name).tobytes()


def read_groups(frames: Frames) -> None:
    message = decode(frames)
    found = groups_from_wire(message.body, message.arrays)
    prompts = [prompt for prompt in (requests[0].prompt_tokens for requests, _ in found if requests)]
    assert len(found) == len(message.body["groups"])
    assert all(prompt.ndim == 1 and prompt.dtype == np.int32 for prompt in prompts)
    lengths = message.arrays["prompt_lengths"].tolist()
    for (of_group, forecast), length in zip(found, lengths, strict=True):
        assert all(len(request.prompt_tokens) == length for request in of_group)
        assert forecast is None or isinstance(forecast, Forecast)
    assert sum(lengths) == len(message.arrays["prompt_tokens"])


def read_request(frames: Frames) -> None:
    message = decode(frames)
    request = request_from_wire(message.body, message.arrays)
    assert isinstance(request.prompt_tokens, np.ndarray)
    if request.kept is not None:
        check_partial(request.kept)


def read_partial(frames: Frames) -> None:
    message = decode(frames)
    check_partial(partial_from_wire(message.body, message.arrays))


def check_partial(kept: PartialSample) -> None:
    assert len({getattr(kept, name).shape for name in TOKEN_ARRAYS}) == 1


def read_one_sample(frames: Frames) -> None:
    message = decode(frames)
    found = sample_from_wire(message.body, message.arrays)
    assert len({len(getattr(found, name)) for name in TOKEN_ARRAYS}) == 1


def read_fleet(frames: Frames) -> None:
    for instance in fleet_from_wire(decode(frames).body["fleet"]):
        curve = instance.curve
        assert all(np.isfinite(value) and value >= 0 for value in (curve.per_context_token, curve.per_prefill_token))
        assert all(np.isfinite(value) and value > 0 for value in curve.seconds)


def read_micro_batch(frames: Frames) -> None:
    message = decode(frames)
    found = micro_batch.from_wire(message.body, message.arrays)
    assert len(found) == len(message.body["groups"])


def read_weights(frames: Frames) -> None:
    body = decode(frames).body
    manifest = Manifest.from_dict(body.get("manifest"))  # type: ignore[arg-type]
    for t in manifest.tensors:
        assert t.offset >= 0 and t.nbytes >= 0 and t.offset + t.nbytes <= manifest.nbytes
    parts = body.get("parts")
    for values in parts if isinstance(parts, list) else []:
        part, at = Part.from_dict(values, manifest), 0
        assert len(part.payloads) == len(manifest.tensors)
        for payload in part.payloads if part.coded else ():
            assert payload.offset == at and payload.nbytes > 0
            at += payload.nbytes
        assert not part.coded or part.nbytes == at <= manifest.nbytes + len(part.payloads)


def read_control(frames: Frames) -> None:
    message = decode(frames)
    outbox: Outbox[Outgoing] = Outbox(2)
    outbox.send(Outgoing([]), 0.0)
    assert take_ack(outbox, "s", message) == (not outbox.pending)


def read_state(frames: Frames) -> None:
    state, times = take_state(decode(frames))
    assert is_plain(state) and isinstance(times, dict)
    json.dumps(state)


@pytest.mark.timeout(LIMIT_S)
def test_whatever_frames_come_the_wire_decoder_returns_a_message_or_refuses_them(record_property: Record) -> None:
    messages = [*control(), groups(), partial(), batch(False), batch(True), fleet(), micro(), weights(), *requests()]
    found = outcomes(record_property, [read_wire], frames_of(1, messages, 40_000), (MalformedMessage,))
    assert min(found["value"], found["MalformedMessage"]) > found.total() / 10


@pytest.mark.timeout(LIMIT_S)
def test_batches_of_samples_are_read_or_refused(record_property: Record) -> None:
    messages = [message for compress in (False, True) for message in (batch(compress),) * 2]
    allowed = MalformedMessage, ValueError, RunFailed
    found = outcomes(record_property, [read_samples, read_arrivals], frames_of(2, messages, 12_000), allowed)
    assert min(found["value"], found["ValueError"], found["RunFailed"]) > found.total() / 50


@pytest.mark.timeout(LIMIT_S)
def test_requests_samples_groups_and_fleets_are_read_or_refused(record_property: Record) -> None:
    one = Message("sample", "s", 1, *sample_to_wire(sample("g.0", 12)))  # type: ignore[arg-type]
    readers = {read_groups: groups(), read_partial: partial(), read_fleet: fleet(), read_one_sample: one}
    messages = [*readers.values(), *requests()]
    allowed = MalformedMessage, ValueError, KeyError, TypeError
    reads = [*readers, read_request, read_request]
    found = outcomes(record_property, reads, frames_of(3, messages, 24_000), allowed)
    assert min(found["value"], found["KeyError"], found["TypeError"], found["ValueError"]) > found.total() / 200


@pytest.mark.timeout(LIMIT_S)
def test_micro_batches_are_read_or_refused(record_property: Record) -> None:
    allowed = MalformedMessage, ValueError, KeyError, TypeError
    found = outcomes(record_property, [read_micro_batch], frames_of(4, [micro()], 6_000), allowed)
    assert min(found["value"], found["KeyError"], found["TypeError"]) > found.total() / 200


@pytest.mark.timeout(LIMIT_S)
def test_manifests_and_parts_are_read_or_corrupt(record_property: Record) -> None:
    allowed = MalformedMessage, CorruptWeights
    found = outcomes(record_property, [read_weights], frames_of(5, [weights()], 10_000), allowed)
    assert min(found["value"], found["CorruptWeights"]) > found.total() / 20


@pytest.mark.timeout(LIMIT_S)
def test_acknowledgements_and_heartbeats_are_read_or_refused(record_property: Record) -> None:
    messages = [control()[2], control()[1]]
    reads = [read_control, read_state]
    found = outcomes(record_property, reads, frames_of(6, messages, 10_000), (MalformedMessage,))
    assert min(found["value"], found["MalformedMessage"]) > found.total() / 10


@pytest.mark.timeout(LIMIT_S)
def test_no_frames_end_a_hub_whether_of_a_stranger_or_of_a_peer(record_property: Record) -> None:
    async def body() -> None:
        hub = Hub("hub", WaitRegistry("hub")).bind(f"tcp://127.0.0.1:{free_port()}")
        hub._answer = lambda route, frames: False  # type: ignore[method-assign]  # there is nobody
        routes = [Route(hub._doors[0], name) for name in (b"known", b"strange")]
        hello = control("life")[0]

        def take(frames: Frames) -> None:
            if not hub.peers:
                hub._arrived(routes[0], list(encode(hello)), None)
            for route in routes:
                hub._arrived(route, frames, None)
            while not hub._inbox.empty():
                hub._inbox.get_nowait()
            for peer in list(hub.peers.values()):
                if peer.name != "service-west" or peer.session != "life":
                    hub._forget(peer)

        found = outcomes(record_property, [take], frames_of(7, [*control("life"), groups()], 10_000), ())
        assert hub.malformed + hub.unknown > found.total() / 2
        await hub.close()

    asyncio.run(body())


# -- weights as bytes


def tensors() -> list[tuple[np.ndarray, np.ndarray, str]]:
    """(payload, old tensor, type) of every encoding and coding of positions."""
    rng = np.random.default_rng(3)
    made = []
    for dtype, size in (("bfloat16", 2), ("float32", 4), ("float8_e5m2", 1), ("int64", 8)):
        for n, count, most in ((600, 0, 1), (600, 4, 40), (600, 60, 2), (600, 250, 1), (600, 590, 3), (70_000, 2, 1)):
            old = rng.integers(0, 256, n * size, dtype=np.uint8)
            new = old.copy()
            words = new.view(f"<u{size}")
            where = rng.choice(n, count, replace=False)
            words[where] += rng.integers(1, most, count, endpoint=True).astype(words.dtype)
            made.append((encode_tensor(new, old, dtype), old, dtype))
        flat = np.tile(np.arange(100, dtype=np.uint8), 16)
        made.append((encode_tensor(flat, None, dtype), flat, dtype))
    return made


def invented(dice: Dice, elements: int) -> bytes:
    """A payload of well-formed numbers and streams that a codec could not have put together."""
    writer = Writer()
    numbers = (0, 1, 2, 3, 4, 8, 9, 12, 127, 128, elements - 1, elements, elements + 1, 2**31, 2**63)
    writer.number(dice.pick((2, 3, 3, 3)))
    for _ in range(dice.below(9)):
        if dice.below(3):
            writer.number(dice.pick(numbers))
        else:
            size = dice.pick((0, 1, elements, (elements + 7) // 8, dice.below(100)))
            writer.stream(np.full(size, dice.below(256), np.uint8) if dice.below(2) else dice.rng.bytes(0) or bits(dice, size))
    return writer.payload().tobytes()


def bits(dice: Dice, size: int) -> np.ndarray:
    return dice.rng.integers(0, 256, size, dtype=np.uint8)


@pytest.mark.timeout(LIMIT_S)
def test_payloads_of_tensors_are_decoded_or_leave_the_tensor_as_it_was(record_property: Record) -> None:
    known = tensors()
    numbers = [b"\xff" * 9 + b"\x7f", b"\x80", b"\x00", b"\x01", b"\x04", b"\x08", b"\x0c"]

    def payloads() -> Iterator[tuple[bytes, np.ndarray, str]]:
        dice = Dice(8)
        for number in range(FRAMES or 12_000):
            payload, old, dtype = known[number % len(known)]
            if dice.below(4):
                yield mutated_bytes(dice, payload.data, numbers), old, dtype
            else:
                yield invented(dice, dice.pick((600, 70_000))), old, dtype

    def read(given: tuple[bytes, np.ndarray, str]) -> None:
        payload, old, dtype = np.frombuffer(given[0], np.uint8), *given[1:]
        around = np.full(old.size + 128, 0xA5, dtype=np.uint8)
        target = around[64:-64]
        target[:] = old
        try:
            complete = is_complete(payload)
            decode_tensor(payload, target, dtype)
            assert complete == (payload[0] in (1, 2))
        except CorruptDelta:
            assert np.array_equal(target, old)
            raise
        finally:
            assert (around[:64] == 0xA5).all() and (around[-64:] == 0xA5).all()

    found = outcomes(record_property, [read], payloads(), (CorruptDelta,))
    assert min(found["value"], found["CorruptDelta"]) > found.total() / 20


# -- files

JSON_TOKENS = [
    *(b"[", b"]", b"{", b"}", b'"', b",", b":", b"null", b"true", b"NaN", b"Infinity", b"-1", b"1e999", b"9" * 30),
    *(b"\\ud800", b"\xff", b"\x00", b"[" * 2000, b'{"a":' * 2000, b"9" * 5000),
]


def files_of(seed: int, valid: bytes, default: int) -> Iterator[bytes]:
    """Damaged files; files are a fiftieth of the messages, they come from disk."""
    dice = Dice(seed)
    for number in range(FRAMES // 50 or default):
        if number % 3 or not valid.startswith((b"[", b"{")):
            yield mutated_bytes(dice, valid, JSON_TOKENS)
        else:
            text = json.dumps(mutated_value(dice, json.loads(valid)), default=str).encode()
            yield text.replace(json.dumps(DEEP).encode(), b"[" * 990 + b"]" * 990)


def wanted_file() -> bytes:
    return json.dumps([asdict(WantedInstance("west-a-0")), asdict(WantedInstance("west-a-1", 2, True))]).encode()


def started_file() -> bytes:
    one = StartedProcess("west-a-0", "instance", 100, 1, -9, "killed")
    return json.dumps([asdict(one), asdict(StartedProcess("trainer", "trainer", 101))]).encode()


def status_file() -> bytes:
    role = {"role": "trainer", "state": "training", "since": 1.0, "memory_gb": 2.5}
    values = {"run": "r", "state": "running", "step": 1, "steps": 3, "started_at": 1.0, "updated_at": 2.0}
    more = {"roles": {"trainer": role}, "sites": {"west": {"silent_s": 0.5}}, "waits": [], "progress": {"lengths": [3]}}
    return json.dumps(values | more).encode()


def site_file() -> bytes:
    values = {"site": "west", "updated_at": 1.0, "state": "serving", "trainer_silent_s": 0.1, "samples_sent": 5}
    return json.dumps(values | {"instances": {"west-a-0": {"state": "ready", "running": 3}}}).encode()


@pytest.mark.timeout(LIMIT_S)
def test_a_damaged_status_or_site_file_is_one_readable_error_or_nothing(
    tmp_path: Path, record_property: Record
) -> None:
    def read_status(content: bytes) -> None:
        (tmp_path / status.FILE_NAME).write_bytes(content)
        assert status.read_status(tmp_path).step >= 0

    def read_site(content: bytes) -> None:
        (tmp_path / site.FILE_NAME).write_bytes(content)
        found = site.read_site(tmp_path)
        assert found is None or isinstance(found.site, str)

    one, other = files_of(9, status_file(), 2_000), files_of(10, site_file(), 2_000)
    pairs = (content for pair in zip(one, other, strict=True) for content in pair)
    found = outcomes(record_property, [read_status, read_site], pairs, (UserError,))
    assert min(found["value"], found["UserError"]) > found.total() / 20


@pytest.mark.timeout(LIMIT_S)
def test_a_damaged_file_of_instances_is_read_or_refused(tmp_path: Path, record_property: Record) -> None:
    def wanted(content: bytes) -> None:
        (tmp_path / WANTED).write_bytes(content)
        assert all(isinstance(one, WantedInstance) for one in read_wanted(tmp_path) or [])

    def started(content: bytes) -> None:
        (tmp_path / RUNNING).write_bytes(content)
        assert all(isinstance(one, StartedProcess) for one in read_started(tmp_path))

    one, other = files_of(11, wanted_file(), 2_000), files_of(12, started_file(), 2_000)
    pairs = (content for pair in zip(one, other, strict=True) for content in pair)
    found = outcomes(record_property, [wanted, started], pairs, (ValueError, TypeError))
    assert min(found.values()) > 0


@pytest.mark.timeout(LIMIT_S)
def test_a_damaged_key_file_is_one_readable_error(tmp_path: Path, record_property: Record) -> None:
    make_keys(tmp_path, "west")
    public, secret = public_file(tmp_path, "west"), secret_file(tmp_path, "west")
    good_public, good_secret = public.read_bytes(), secret.read_bytes()

    def read_public(content: bytes) -> None:
        public.write_bytes(content)
        assert len(load_public(tmp_path, "west")) == 40
        public.write_bytes(good_public)

    def read_secret(content: bytes) -> None:
        public.write_bytes(good_public)
        secret.write_bytes(content)
        pair = load_own(tmp_path, "west")
        assert pair.public in good_public and pair.secret in good_secret

    tokens = [b"#" * 40, b"#", b'"', b"=", b"\n", b"\xff", b"\x00", b"public-key", b"secret-key = ", b"a" * 5]

    def contents() -> Iterator[bytes]:
        dice = Dice(13)
        for _ in range(FRAMES // 50 // 2 or 1_500):
            yield mutated_bytes(dice, good_public[good_public.index(b"curve") :], tokens)
            yield mutated_bytes(dice, good_secret[good_secret.index(b"curve") :], tokens)

    found = outcomes(record_property, [read_public, read_secret], contents(), (UserError,))
    assert min(found["value"], found["UserError"]) > found.total() / 50


@pytest.mark.timeout(LIMIT_S)
def test_a_store_takes_no_damaged_version_of_an_earlier_process_for_whole(
    tmp_path: Path, record_property: Record
) -> None:
    manifest, buffer = lay_out(4, {"a": torch.arange(40).bfloat16(), "b": torch.ones(3)}.items())
    store = WeightStore(tmp_path)
    store.begin(manifest)[:] = buffer
    store.commit(manifest, buffer)
    text = (tmp_path / "version_4.json").read_bytes()

    def read(content: bytes) -> None:
        (tmp_path / "version_4.bin").write_bytes(buffer)
        (tmp_path / "version_4.json").write_bytes(content)
        found = WeightStore(tmp_path)
        if found.newest_verified() is not None:
            assert found.open(4)[0].version.content_hash == manifest.version.content_hash
            raise KeyError("it is whole")

    found = outcomes(record_property, [read], files_of(14, text, 1_000), (KeyError,))
    assert min(found["value"], found["KeyError"]) > found.total() / 50


# -- memory


@pytest.mark.parametrize("head", [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"])
@pytest.mark.parametrize("levels", [1, 30, DEEPEST])
def test_announced_lengths_take_no_memory_that_the_frame_does_not_have(head: bytes, levels: int) -> None:
    rest = 200_000
    frame = (head + rest.to_bytes(4, "big")) * levels + b"\xc0" * (rest - 5 * levels)
    tracemalloc.start()
    try:
        with pytest.raises(MalformedMessage):
            decode([frame])
        assert tracemalloc.get_traced_memory()[1] < 40 * len(frame)
    finally:
        tracemalloc.stop()
