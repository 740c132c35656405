"""Everything that reads what a peer or a file says, fed with damaged and invented messages.

Valid messages are mutated: bits flipped, ends cut off, bytes inserted, values swapped for others of any type that
msgpack has, lengths announced that are not there, nesting up to what msgpack reads. A reader may raise what its
docstring names, and nothing else; what it returns must be well formed. It must not hang (the test's time limit) or take
much memory.

STREAMRL_FUZZ_FRAMES=1000000 gives each family of readers so many messages; what came of them is in the properties of
the JUnit file (`--junitxml`).
"""

from __future__ import annotations

import asyncio
import json
import os
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
import zmq

from scheduler.cost.decode import StepCurve
from scheduler.cost.length_forecast import Forecast
from scheduler.simulation.generation_simulator import SimulatedInstance
from streamrl.controller import arrivals
from streamrl.errors import RunFailed, UserError
from streamrl.generation.site.sample_batches import pack_samples, unpack_samples
from streamrl.protocol import samples as wire_messages
from streamrl.protocol.controller_site import Generate, SampleBatch
from streamrl.protocol.message import TypedMessage, body_of, parse, wire
from streamrl.protocol.samples import TOKEN_ARRAYS, fleet_to_wire, request_to_wire, sample_from_wire, sample_to_wire
from streamrl.protocol.site_instance import GenerateSample, ReleasedSample
from streamrl.rollouts import micro_batch_wire
from streamrl.rollouts.ledger import unpack_content
from streamrl.rollouts.types import PartialSample, Sample, SampleRequest
from streamrl.run_dir import instance_files, layout, site_status, status
from streamrl.transport import curve
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Hub
from streamrl.transport.endpoint_base import Delivery
from streamrl.transport.peer import PeerRoute
from streamrl.transport.wire import DTYPES, MalformedMessage, Message, decode, encode, is_plain
from streamrl.weights.codec.delta import CorruptDelta, decode_tensor, encode_tensor
from streamrl.weights.codec.entropy import Writer
from streamrl.weights.description import DESCRIPTION, describe, read_description
from streamrl.weights.publisher import code
from streamrl.weights.version import CorruptWeights, Manifest, Part, lay_out
from streamrl.weights.version_store import WeightStore
from tests.ports import free_port
from tests.training.conftest import random_groups
from tests.transport.mutations import (
    DEEP,
    DEEPEST,
    LONG,
    Dice,
    Frames,
    Record,
    fuzz,
    mutated_bytes,
    mutated_value,
    packed,
    peers_frames,
)
from tests.weights.world import fill

FRAMES = int(os.environ.get("STREAMRL_FUZZ_FRAMES", "0"))
"""Messages for each family; 0: as many as take about a second."""
FILE_SHARE = 50
"""Files come from disk: one for so many messages."""
LIMIT_S = 60 + FRAMES / 500


# -- messages as they are sent


def sample(tokens: int) -> tuple[dict[str, Any], Any]:
    rng = np.random.default_rng(tokens)
    arrays = rng.integers(0, 60_000, tokens, dtype=np.int32), -rng.random(tokens, dtype=np.float32)
    versions, names = np.full(tokens, 3, np.int32), ("stop", "west", "west-a-0", "a", "tail")
    return sample_to_wire(Sample(f"g.{tokens}", "g", *arrays, versions, *names, 1.0, 2.0, 3.0, 4.5, "the answer"))


def message(kind: str, body: dict[str, Any], arrays: Any = None) -> Message:
    return Message(kind, "life", 1, body, dict(arrays or {}))


def typed(one: TypedMessage, arrays: Any) -> Message:
    return message(*wire(one), arrays)


PROMPT = np.arange(9, dtype=np.int32)
FOUR = np.arange(4, dtype=np.int32)
KEPT = PartialSample("g.0", FOUR, FOUR.astype(np.float32), FOUR, 1.0, 2.0)
REQUESTS = [
    typed(*request_to_wire(SampleRequest("g.0", "g", PROMPT, 7, 1.5, 0.5, 64), "tail")),
    typed(*request_to_wire(SampleRequest("g.0", "g", PROMPT, 7, 1.5, None, None, KEPT), "regular")),
]
GROUPS = message(
    "generate",
    {
        "t_queued": 1.5,
        "budget": 64,
        "groups": [
            {"group_id": "a", "samples": [["a.0", 1, None], ["a.1", 2, 0.0]], "forecast": None},
            {"group_id": "b", "samples": [["b.0", 3, 1.0]], "forecast": {"lengths": [1.0, 2.0], "tail": [3.0]}},
        ],
    },
    {"prompt_tokens": PROMPT, "prompt_lengths": np.array([5, 4], np.int32)},
)
PARTIAL = message("released", *sample_to_wire(KEPT))
ONE = message("sample", *sample(12))
BATCHES = [message("samples", *pack_samples([sample(n) for n in (0, 7, 40)], small)) for small in (False, True)]
CURVE = StepCurve((1, 8), (0.02, 0.05), 1e-7, 1e-5)
FLEET = message("fleet", {"fleet": fleet_to_wire([SimulatedInstance(name, CURVE, 8) for name in ("a-0", "a-1")])})
MICRO = message("micro_batch", *micro_batch_wire.to_wire(random_groups(3)))
STATE = {"waits": [{"owner": "x", "for": "y", "limit_s": 3.0}], "produced": {"g.0": 17}, "clock": {"sent": 1.5}}
HELLO = message("hello", {"name": "service-west", "role": "service", "meta": {"site": "west", "slots": 3}})
CONTROL = [
    HELLO,
    message("heartbeat", STATE),
    message("ack", {"n": 1, "s": "life"}),
    message("bye", {}),
    message("item", {"i": 1}, {name: np.zeros((2, 3), dtype) for name, dtype in DTYPES.items()}),
]


def versions() -> tuple[tuple[Manifest, np.ndarray], ...]:
    some = {"a": torch.arange(40).bfloat16(), "b": torch.ones(3, 5)}
    return lay_out(3, some.items()), lay_out(4, {**some, "b": some["b"] + 1}.items())


def answer() -> Message:
    old, new = versions()
    parts = [code(*old, None)[0], code(*new, (3, old[1]))[0]]
    return message("manifest", {"request": 1}, {DESCRIPTION: describe(new[0], parts)})


# -- readers of messages, and what they must have read


def read_wire(frames: Frames) -> None:
    found = decode(frames)
    assert isinstance(found.kind, str) and isinstance(found.session, str) and isinstance(found.body, dict)
    assert type(found.number) is int and found.number >= 0
    assert len(found.arrays) == len(frames) - 1
    for array, frame in zip(found.arrays.values(), frames[1:], strict=True):
        assert array.dtype in DTYPES.values() and array.nbytes == len(frame) and not array.flags.writeable


def read_batch(frames: Frames) -> None:
    found = decode(frames)
    for body, arrays in unpack_samples(found.body, found.arrays):
        assert isinstance(body, dict) and arrays.keys() == TOKEN_ARRAYS.keys()
        assert all(array.ndim == 1 and array.dtype == TOKEN_ARRAYS[name] for name, array in arrays.items())
    batch = Delivery("service-west", found.kind, parse(SampleBatch, found.body), found.arrays, lambda: None)
    read, refused = arrivals.read_arrivals([batch], lambda *about: None)
    for one in read:
        kept = arrivals.read_sample(*unpack_content(one.content))
        assert all(getattr(kept, name).tobytes() == getattr(one.sample, name).tobytes() for name in TOKEN_ARRAYS)
    if refused:
        raise RunFailed(f"{refused[0].peer}: {refused[0].why}")


def read_groups(frames: Frames) -> None:
    found = decode(frames)
    lengths = found.arrays.get("prompt_lengths")
    groups = wire_messages.groups_from_wire(parse(Generate, found.body), found.arrays)
    assert lengths is not None and lengths.sum() == len(found.arrays["prompt_tokens"])
    for (requests, forecast), length in zip(groups, lengths.tolist(), strict=True):
        assert all(r.prompt_tokens.shape == (length,) and r.prompt_tokens.dtype == np.int32 for r in requests)
        assert forecast is None or isinstance(forecast, Forecast)


def read_request(frames: Frames) -> None:
    found = decode(frames)
    request = wire_messages.request_from_wire(parse(GenerateSample, found.body), found.arrays)
    check_tokens([request.prompt_tokens])
    if request.kept is not None:
        check_tokens([getattr(request.kept, name) for name in TOKEN_ARRAYS])


def read_partial(frames: Frames) -> None:
    found = decode(frames)
    kept = sample_from_wire(PartialSample, body_of(parse(ReleasedSample, found.body)), found.arrays)
    check_tokens([getattr(kept, name) for name in TOKEN_ARRAYS])


def read_sample(frames: Frames) -> None:
    found = decode(frames)
    one = arrivals.read_sample(found.body, found.arrays)
    check_tokens([getattr(one, name) for name in TOKEN_ARRAYS])


def check_tokens(arrays: list[np.ndarray]) -> None:
    assert len({array.shape for array in arrays}) == 1 and arrays[0].ndim == 1


def read_fleet(frames: Frames) -> None:
    for instance in wire_messages.fleet_from_wire(decode(frames).body["fleet"]):
        rates = instance.curve.per_context_token, instance.curve.per_prefill_token
        assert all(np.isfinite(value) and value >= 0 for value in (*rates, *instance.curve.seconds))


def read_micro_batch(frames: Frames) -> None:
    found = decode(frames)
    groups = micro_batch_wire.from_wire(found.body, found.arrays)
    for group, (_, prompt_length, lengths) in zip(groups, found.body["groups"], strict=True):
        assert group.prompt_tokens.shape == (prompt_length,)
        for sequence, length in zip(group.sequences, lengths, strict=True):
            assert sequence.completion_tokens.shape == sequence.logprobs.shape == (length,)


def read_answer(frames: Frames) -> None:
    manifest, parts = read_description(decode(frames).arrays.get(DESCRIPTION))
    assert all(0 <= t.offset <= t.offset + t.nbytes <= manifest.nbytes for t in manifest.tensors)
    for values in parts:
        part, at = Part.from_dict(values, manifest), 0
        assert len(part.payloads) == len(manifest.tensors)
        for payload in part.payloads if part.coded else ():
            assert payload.offset == at and payload.nbytes > 0
            at += payload.nbytes
        assert not part.coded or part.nbytes == at


@pytest.mark.timeout(LIMIT_S)
def test_whatever_frames_come_the_wire_decoder_returns_a_message_or_refuses_them(record_property: Record) -> None:
    sent = [*CONTROL, GROUPS, PARTIAL, *BATCHES, FLEET, MICRO, answer(), *REQUESTS]
    found = fuzz(record_property, [read_wire], peers_frames(1, sent, FRAMES or 12_000), (MalformedMessage,))
    assert min(found["value"], found["MalformedMessage"]) > found.total() / 10


@pytest.mark.timeout(LIMIT_S)
def test_batches_of_samples_are_read_or_refused(record_property: Record) -> None:
    raw, dice = BATCHES[0], Dice(7)
    bodies = msgpack.unpackb(raw.arrays["bodies"].data)

    def other_bodies(number: int) -> Frames:
        told = np.frombuffer(packed(dice, mutated_value(dice, bodies)), np.uint8)
        return [bytes(frame) for frame in encode(replace(raw, arrays=raw.arrays | {"bodies": told}))]

    count = (FRAMES or 5_000) // 2
    sent = chain(peers_frames(2, BATCHES, count), map(other_bodies, range(count)))
    allowed = MalformedMessage, ValueError, RunFailed
    found = fuzz(record_property, [read_batch], sent, allowed)
    assert min(found["value"], found["ValueError"], found["RunFailed"]) > found.total() / 50


@pytest.mark.timeout(LIMIT_S)
def test_requests_samples_groups_and_fleets_are_read_or_refused(record_property: Record) -> None:
    turns = {read_groups: GROUPS, read_partial: PARTIAL, read_fleet: FLEET, read_sample: ONE, read_micro_batch: MICRO}
    reads, sent = [*turns, read_request, read_request], [*turns.values(), *REQUESTS]
    allowed = MalformedMessage, ValueError, KeyError, TypeError
    found = fuzz(record_property, reads, peers_frames(3, sent, FRAMES or 9_000), allowed)
    assert min(found["value"], found["KeyError"], found["TypeError"], found["ValueError"]) > found.total() / 200


@pytest.mark.timeout(LIMIT_S)
def test_manifests_and_parts_are_read_or_corrupt(record_property: Record) -> None:
    allowed = MalformedMessage, CorruptWeights
    found = fuzz(record_property, [read_answer], peers_frames(4, [answer()], FRAMES or 5_000), allowed)
    assert min(found["value"], found["CorruptWeights"]) > found.total() / 20


@pytest.mark.timeout(LIMIT_S)
def test_no_frames_end_a_hub_whether_of_a_stranger_or_of_a_peer(record_property: Record) -> None:
    async def body() -> None:
        hub = Hub("hub", WaitRegistry("hub")).bind(f"tcp://127.0.0.1:{free_port()}")
        hub._answer = lambda route, frames: False  # type: ignore[method-assign]  # there is nobody
        routes = [PeerRoute(hub._doors[0], name) for name in (b"known", b"strange")]
        hello = encode(HELLO)

        def arrive(frames: Frames) -> None:
            if "service-west" not in hub.peers:
                hub._arrived(routes[0], list(hello), None)
            for route in routes:
                hub._arrived(route, frames, None)
            while not hub._inbox.empty():
                hub._inbox.get_nowait()
            for peer in list(hub.peers.values()):
                assert is_plain(peer.state) and is_plain(peer.meta)
                if (peer.name, peer.session, peer.route) != ("service-west", "life", routes[0]):
                    hub._forget(peer)

        fuzz(record_property, [arrive], peers_frames(5, [*CONTROL, GROUPS], FRAMES or 5_000), ())
        assert hub.malformed + hub.unknown > (FRAMES or 5_000) / 2
        dice, envelope = Dice(6), msgpack.unpackb(encode(CONTROL[1])[0])
        for key in (*envelope, *("name", "role", "meta", "clock", "n", "s")):
            for kind, _ in [(sent.kind, None) for sent in CONTROL] * 6:
                deep = {key: DEEP} if key in envelope else {"k": kind, "b": HELLO.body | {key: DEEP}}
                arrive([packed(dice, envelope | deep)])
        await hub.close()

    asyncio.run(body())


@pytest.mark.parametrize("head", LONG)
@pytest.mark.parametrize("levels", [1, 30, DEEPEST])
def test_announced_lengths_take_no_memory_that_the_frame_does_not_have(head: bytes, levels: int) -> None:
    size = 200_000
    frame = (head + size.to_bytes(4, "big")) * levels + b"\xc0" * (size - 5 * levels)
    tracemalloc.start()
    try:
        with pytest.raises(MalformedMessage):
            decode([frame])
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20 + 16 * size
    finally:
        tracemalloc.stop()


# -- weights as bytes


def payloads() -> list[tuple[bytes, np.ndarray, str]]:
    """(payload, old tensor, type) of every encoding and coding of positions."""
    rng, made = np.random.default_rng(3), []
    for dtype, size in (("bfloat16", 2), ("float32", 4), ("float8_e5m2", 1), ("int64", 8)):
        for n, count, most in ((600, 0, 1), (600, 4, 40), (600, 60, 2), (600, 250, 1), (600, 590, 3), (70_000, 2, 1)):
            old = rng.integers(0, 256, n * size, dtype=np.uint8)
            new = old.copy()
            words = new.view(f"<u{size}")
            words[rng.choice(n, count, replace=False)] += rng.integers(1, most + 1, count).astype(words.dtype)
            made.append((encode_tensor(new, old, dtype).tobytes(), old, dtype))
        flat = np.tile(np.arange(100, dtype=np.uint8), 16)
        made.append((encode_tensor(flat, None, dtype).tobytes(), flat, dtype))
    return made


def invented(dice: Dice, elements: int) -> bytes:
    """A payload of well-formed numbers and streams that the codec would not have put together."""
    writer = Writer()
    writer.number(dice.pick((2, 3, 3, 3)))
    for _ in range(dice.below(9)):
        if dice.below(3):
            few = dice.pick((0, 1, 2, 3, 4, 8, 9, 12, 127, 128))
            writer.number(dice.pick((few, few, few, elements - 1, elements, elements + 1, 2**31, 2**63)))
        else:
            size = dice.pick((0, 1, elements, (elements + 7) // 8, dice.below(100)))
            writer.stream(dice.bytes(size) if dice.below(2) else np.full(size, dice.below(256), np.uint8))
    return writer.payload().tobytes()


@pytest.mark.timeout(LIMIT_S)
def test_payloads_of_tensors_are_decoded_or_leave_the_tensor_as_it_was(record_property: Record) -> None:
    known, dice = payloads(), Dice(8)
    numbers = [b"\xff" * 9 + b"\x7f", b"\x80", b"\x00", b"\x01", b"\x04", b"\x08", b"\x0c"]

    def damaged(number: int) -> tuple[bytes, np.ndarray, str]:
        payload, old, dtype = known[number % len(known)]
        if dice.below(4):
            return mutated_bytes(dice, payload, numbers), old, dtype
        return invented(dice, old.size // {"bfloat16": 2, "float32": 4, "int64": 8}.get(dtype, 1)), old, dtype

    def read(given: tuple[bytes, np.ndarray, str]) -> None:
        payload, (_, old, dtype) = np.frombuffer(given[0], np.uint8), given
        around = np.full(old.size + 128, 0xA5, dtype=np.uint8)
        target = around[64:-64]
        target[:] = old
        try:
            decode_tensor(payload, target, dtype)
        except CorruptDelta:
            assert np.array_equal(target, old)
            raise
        finally:
            assert (around[:64] == 0xA5).all() and (around[-64:] == 0xA5).all()

    found = fuzz(record_property, [read], map(damaged, range(FRAMES or 6_000)), (CorruptDelta,))
    assert min(found["value"], found["CorruptDelta"]) > found.total() / 20


# -- files

JSON_TOKENS = [
    *(b"[", b"]", b"{", b"}", b'"', b",", b":", b"null", b"true", b"NaN", b"Infinity", b"-1", b"1e999", b"9" * 30),
    *(b"\\ud800", b"\xff", b"\x00", b"[" * 2000, b'{"a":' * 2000, b"9" * 5000),
]


def damaged_files(seed: int, valid: bytes, default: int) -> Iterator[bytes]:
    dice = Dice(seed)
    for number in range(FRAMES // FILE_SHARE or default):
        if number % 3:
            yield mutated_bytes(dice, valid, JSON_TOKENS)
        else:
            text = json.dumps(mutated_value(dice, json.loads(valid)), default=str, skipkeys=True).encode()
            yield text.replace(json.dumps(DEEP).encode(), b"[" * 990 + b"]" * 990)


def overwrite(path: Path, content: bytes) -> None:
    """Give a file other content in place; one that is cut to nothing first is written to the disk by ext4, in 2 ms."""
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()


STATUS = {
    **{"run": "r", "state": "running", "step": 1, "steps": 3, "started_at": 1.0, "updated_at": 2.0},
    "roles": {"trainer": {"role": "trainer", "state": "training", "since": 1.0, "memory_gb": 2.5}},
    **{
        "sites": {"west": {"silent_s": 0.5}},
        "progress": {"length_counts": {"counts": [3], "width": 1, "median": 0, "longest": 0}},
    },
}
SITE = {
    **{"site": "west", "updated_at": 1.0, "state": "serving", "trainer_silent_s": 0.1},
    "instances": {"west-a-0": {"state": "ready", "running": 3}},
}
WANTED = [asdict(instance_files.WantedInstance("west-a-0")), asdict(instance_files.WantedInstance("west-a-1", 2, True))]
STARTED = [asdict(instance_files.StartedProcess("west-a-0", "instance", 100, 1, -9, "killed"))]


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    ("name", "values", "read", "allowed"),
    [
        (layout.STATUS, STATUS, status.read_status, (UserError,)),
        (layout.SITE_STATUS, SITE, site_status.read_site, ()),
        # the next two are replaced in one piece by this program: a damaged one is a bug, told by whatever error
        (layout.WANTED_INSTANCES, WANTED, instance_files.read_wanted, (ValueError, TypeError, RecursionError)),
        (layout.PROCESSES, STARTED, instance_files.read_started, (ValueError, TypeError, RecursionError)),
    ],
    ids=["status", "site", "wanted", "started"],
)
def test_a_damaged_file_is_read_or_refused(
    name: str, values: Any, read: Any, allowed: Any, tmp_path: Path, record_property: Record
) -> None:
    def load(content: bytes) -> None:
        overwrite(path, content)
        found = read(tmp_path)
        for one in found if isinstance(found, list) else [found]:
            assert isinstance(one, type(whole[0])) or found is None

    path = tmp_path / name
    path.write_text(json.dumps(values))
    whole = found if isinstance(found := read(tmp_path), list) else [found]
    counts = fuzz(record_property, [load], damaged_files(9, json.dumps(values).encode(), 1_000), allowed)
    assert counts["value"] > counts.total() / 50


@pytest.mark.timeout(LIMIT_S)
def test_a_damaged_key_file_is_one_readable_error(tmp_path: Path, record_property: Record) -> None:
    curve.make_keys(tmp_path, "west")
    public, secret, dice = curve.public_file(tmp_path, "west"), curve.secret_file(tmp_path, "west"), Dice(13)
    good = {file: file.read_bytes() for file in (public, secret)}
    tokens = [b"#" * 40, b"#", b'"', b"=", b"\n", b"\xff", b"\x00", b"public-key", b"secret-key = ", b"a" * 5]

    def load(given: tuple[Path, bytes]) -> None:
        for file in good:
            overwrite(file, given[1] if file is given[0] else good[file])
        pair = curve.load_own(tmp_path, "west")
        assert pair.public == curve.load_public(tmp_path, "west")
        assert zmq.curve_public(pair.secret) == pair.public  # Curve25519 ignores five bits of a secret key

    def damaged(number: int) -> tuple[Path, bytes]:
        file = (public, secret)[number % 2]
        return file, mutated_bytes(dice, good[file][good[file].index(b"\ncurve") :], tokens)

    found = fuzz(record_property, [load], map(damaged, range(FRAMES // FILE_SHARE or 1_000)), (UserError,))
    assert min(found["value"], found["UserError"]) > found.total() / 50


@pytest.mark.timeout(LIMIT_S)
def test_a_store_takes_no_damaged_version_of_an_earlier_process_for_whole(
    tmp_path: Path, record_property: Record
) -> None:
    manifest, buffer = versions()[1]
    store = WeightStore(tmp_path)
    fill(store, manifest, buffer)
    names = Counter[bool]()

    def load(content: bytes) -> None:
        for kind, whole_file in (("bin", buffer.data), ("json", content)):
            (tmp_path / f"version_4.{kind}").touch()  # a damaged one is removed
            overwrite(tmp_path / f"version_4.{kind}", whole_file)
        found = WeightStore(tmp_path)
        whole = found.newest_verified() == 4
        names[whole] += 1
        assert not whole or found.open(4)[0].version.content_hash == manifest.version.content_hash

    fuzz(record_property, [load], damaged_files(14, (tmp_path / "version_4.json").read_bytes(), 500), ())
    assert min(names[True], names[False]) > names.total() / 50
