"""Messages survive the wire bit for bit; anything else is refused."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.transport import wire
from streamrl.transport.wire import (
    MAX_NESTING,
    PROTOCOL_VERSION,
    MalformedMessage,
    Message,
    OtherVersion,
    decode,
    encode,
    is_plain,
)
from tests.strings import any_text

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | any_text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(
    body=st.dictionaries(any_text(max_size=6), plain, max_size=5),
    number=st.integers(0, 2**40),
    lengths=st.lists(st.integers(0, 9), max_size=3),
)
def test_round_trip(body: dict[str, object], number: int, lengths: list[int]) -> None:
    rng = np.random.default_rng(0)
    arrays = {f"a{i}": rng.normal(size=(n, 2)).astype(np.float32) for i, n in enumerate(lengths)}
    back = decode([bytes(frame) for frame in encode(Message("sample", "s", number, body, arrays))])
    assert (back.kind, back.session, back.number, back.body) == ("sample", "s", number, body)
    assert back.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(back.arrays[name], array)


def test_arrays_are_sent_in_c_order_and_other_types_are_refused() -> None:
    transposed = np.arange(6, dtype=np.int32).reshape(2, 3).T
    back = decode([bytes(f) for f in encode(Message("k", "s", 0, {}, {"x": transposed}))])
    np.testing.assert_array_equal(back.arrays["x"], transposed)
    with pytest.raises(ValueError, match="complex128"):
        encode(Message("k", "s", 0, {}, {"x": np.zeros(2, dtype=complex)}))
    with pytest.raises(ValueError, match=">i4"):  # its bytes would be read in the other order
        encode(Message("k", "s", 0, {}, {"x": np.ones(2, dtype=">i4")}))


@settings(max_examples=500)
@given(frames=st.lists(st.binary(max_size=60), max_size=4))
def test_random_frames_are_refused_and_nothing_else_happens(frames: list[bytes]) -> None:
    with pytest.raises(MalformedMessage):
        decode(frames)


@settings(max_examples=500)
@given(position=st.integers(0, 10_000), value=st.integers(0, 255))
def test_a_flipped_byte_is_refused_or_gives_a_message(position: int, value: int) -> None:
    frames = [bytes(f) for f in encode(Message("k", "s", 7, {"x": [1, 2]}, {"t": np.arange(5, dtype=np.int32)}))]
    damaged = bytearray(frames[0])
    damaged[position % len(damaged)] = value
    try:
        message = decode([bytes(damaged), *frames[1:]])
    except MalformedMessage:
        return
    assert isinstance(message.kind, str)
    assert message.number >= 0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"v": "99"}, "protocol version '99', this is 2"),
        ({"n": -1}, "natural number"),
        ({"n": True}, "natural number"),
        ({"k": 3}, "wrong type"),
        ({"b": []}, "wrong type"),
        ({"a": [["x", "int32", [3]]]}, "do not fill"),
        ({"a": [["x", "object", [2]]]}, "unknown name or type"),
        ({"a": [["x", "int32", [-1]]]}, "natural numbers"),
        ({"a": []}, "number of array frames"),
        ({"z": 1}, "not a map"),
    ],
)
def test_what_is_wrong_is_said(change: dict[str, object], why: str) -> None:
    envelope = {"v": PROTOCOL_VERSION, "k": "k", "s": "s", "n": 0, "b": {}, "a": [["x", "int32", [2]]]} | change
    with pytest.raises(MalformedMessage, match=why):
        decode([msgpack.packb(envelope), b"\0" * 8])


def test_another_version_is_told_from_nonsense_whatever_its_envelope_has_besides() -> None:
    with pytest.raises(OtherVersion, match=f"^protocol version 99 there, {PROTOCOL_VERSION} here$"):
        decode([msgpack.packb({"v": 99, "new": 1})])
    for version in (-1, True, None, "99"):
        with pytest.raises(MalformedMessage) as caught:
            decode([msgpack.packb({"v": version, "new": 1})])
        assert not isinstance(caught.value, OtherVersion)


def test_what_is_plain_has_text_for_keys_and_an_end_in_depth_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(map(is_plain, (None, True, 1, 1.5, "x", [], {}, {"a": [{"b": None}, []]})))
    assert not any(map(is_plain, (b"x", {1: 2}, [{"a": b"x"}], {"a": (1, 2)})))
    deep: list[object] = []
    for _ in range(MAX_NESTING - 1):
        deep = [deep]
    assert is_plain(deep) and not is_plain([deep])
    monkeypatch.setattr(wire, "MOST_PLAIN", 6)
    assert is_plain({"a": [1, 2], "b": {"c": 3}, "d": 4}) and not is_plain({"a": [1, 2, 5], "b": {"c": 3}, "d": 4})
    assert not is_plain([[]] * 7)
