"""What a sender may send is what a receiver takes; the description of the largest models is one message."""

from __future__ import annotations

import asyncio
import hashlib
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.protocol.message import MessageReader, wire
from streamrl.protocol.weights import FROM_PUBLISHER, ManifestOf
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Hub, Link
from streamrl.transport.wire import DTYPES, MAX_ARRAYS, MAX_ENVELOPE_BYTES, Message, decode, encode
from streamrl.weights import description
from streamrl.weights.description import DESCRIPTION, describe, read_description
from streamrl.weights.version import CorruptWeights, Manifest, Part, TensorEntry, WeightVersion, content_hash
from tests.ports import free_port
from tests.strings import any_text

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | any_text() | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text() | st.integers(), inner, max_size=3),
    max_leaves=12,
)
ARRAYS = st.builds(
    lambda dtype, shape: np.zeros(shape, dtype),
    st.sampled_from([*DTYPES, "float16", "uint32", "complex64"]),
    st.lists(st.integers(0, 2), max_size=10),
)


@settings(deadline=None, max_examples=300)
@given(
    kind=any_text(max_size=5) | st.integers(),
    number=st.integers(-2, 2**65),
    body=st.dictionaries(any_text() | st.integers(), PLAIN, max_size=4) | st.none(),
    arrays=st.dictionaries(any_text(max_size=3) | st.integers(), ARRAYS, max_size=3),
)
def test_what_can_be_sent_can_be_read(kind: Any, number: int, body: Any, arrays: Any) -> None:
    try:
        frames = encode(Message(kind, "s", number, body, arrays))
    except (ValueError, OverflowError, TypeError):  # UnicodeEncodeError is a ValueError
        return
    found = decode(frames)
    assert (found.kind, found.number, found.arrays.keys()) == (kind, number, arrays.keys())
    assert all(found.arrays[name].shape == array.shape for name, array in arrays.items())


@pytest.mark.parametrize(
    ("body", "arrays"),
    [
        ({"x": "y" * MAX_ENVELOPE_BYTES}, {}),
        ({}, {str(n): np.zeros(1, np.int32) for n in range(MAX_ARRAYS + 1)}),
        ({}, {"deep": np.zeros([1] * 9, np.int32)}),
        ({1: 2}, {}),
    ],
    ids=["large body", "many arrays", "many dimensions", "number as a key"],
)
def test_what_nobody_would_take_is_an_error_of_its_sender(body: dict[Any, Any], arrays: dict[str, np.ndarray]) -> None:
    with pytest.raises(ValueError, match="'item' cannot be sent"):
        encode(Message("item", "s", 1, body, arrays))


def mixture_of_experts(number: int) -> Manifest:
    """A model of 400 billion parameters in 8 bits: names, types and shapes, and no bytes."""
    entries: list[TensorEntry] = []
    cursor = 0

    def add(name: str, dtype: str, size: int, *shape: int) -> None:
        nonlocal cursor
        digest = hashlib.sha256(f"{number} {name}".encode()).hexdigest()
        entries.append(TensorEntry(name, dtype, shape, cursor, math.prod(shape) * size, digest))
        cursor += math.prod(shape) * size

    add("model.embed_tokens.weight", "bfloat16", 2, 151_936, 4096)
    for layer in range(62):
        modules = [f"self_attn.{one}_proj" for one in "qkvo"]
        modules += [f"mlp.experts.{expert}.{one}_proj" for expert in range(128) for one in ("gate", "up", "down")]
        for module in modules:
            add(f"model.layers.{layer}.{module}.weight", "float8_e4m3fn", 1, 4096, 4096)
            add(f"model.layers.{layer}.{module}.weight.scale", "float32", 4, 4096)
    return Manifest(WeightVersion(number, None, content_hash(entries)), cursor, tuple(entries))


def test_the_description_of_a_mixture_of_400_billion_parameters_with_deltas_is_one_message() -> None:
    manifest = mixture_of_experts(9)
    assert sum(math.prod(t.shape) for t in manifest.tensors if t.dtype == "float8_e4m3fn") > 400e9
    sizes = [(t.nbytes // 3 + 1, t.checksum) for t in manifest.tensors]
    anchor = Part.of_payloads(0, None, sizes)
    parts = [anchor, *(replace(anchor, number=number, base=number - 1) for number in range(1, 10))]
    array = describe(manifest, parts)  # not while a link waits for signs of life
    assert array.nbytes > 2 * MAX_ENVELOPE_BYTES

    async def body() -> np.ndarray:
        hub = Hub("publisher", WaitRegistry("publisher"))
        hub.bind_outside(address := f"tcp://127.0.0.1:{free_port()}", None)
        link = await Link("west", "relay", WaitRegistry("west"), {"site": "west"}).connect(address, 60)
        link.reads = MessageReader(FROM_PUBLISHER)
        try:
            await hub.send("west", *wire(ManifestOf(request=1)), {DESCRIPTION: array})
            found = await link.receive()
            found.ack()
            return found.arrays[DESCRIPTION]
        finally:
            await link.close()
            await hub.close()

    found, described = read_description(asyncio.run(body()))
    assert found == manifest
    assert [Part.from_dict(values, found) for values in (described[0], described[9])] == [parts[0], parts[9]]


@pytest.mark.parametrize(
    "array",
    [
        None,
        np.zeros(9, np.int32),
        np.zeros((1, 9), np.uint8),
        np.frombuffer(b"\xc1", np.uint8),
        np.frombuffer(b"\x80", np.uint8),
        np.frombuffer(b"\x91" * 5000, np.uint8),
    ],
    ids=["missing", "type", "shape", "no msgpack", "empty", "nesting"],
)
def test_a_description_that_is_none_is_corrupt(array: np.ndarray | None) -> None:
    with pytest.raises(CorruptWeights):
        read_description(array)


def test_a_description_too_large_to_unpack_is_neither_sent_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [TensorEntry("a", "float32", (2,), 0, 8, "x")]
    manifest = Manifest(WeightVersion(1, None, content_hash(entries)), 8, tuple(entries))
    array = describe(manifest, [])
    monkeypatch.setattr(description, "MAX_DESCRIPTION_BYTES", array.nbytes - 1)
    with pytest.raises(ValueError, match="description of version 1"):
        describe(manifest, [])
    with pytest.raises(CorruptWeights, match="no description of at most"):
        read_description(array)
