"""Batches of samples: when they go, packing that is exact, and compression that pays."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.generation.site import sample_batches
from streamrl.generation.site.sample_batches import (
    CompressionChoice,
    HighMark,
    Item,
    SampleBatcher,
    pack_samples,
    sample_bytes,
    unpack_samples,
)
from streamrl.generation.site.uplink import Uplink
from streamrl.protocol.samples import TOKEN_ARRAYS
from streamrl.rollouts.ledger import pack_content, unpack_content
from tests.generation.samples import assert_same, item, items, over_the_wire
from tests.strings import any_text

# -- when a batch goes


def test_a_batch_goes_when_its_oldest_sample_has_waited_long_enough() -> None:
    batcher: SampleBatcher[str] = SampleBatcher(2.0, 1000, 10)
    assert batcher.due(5.0) is None and batcher.take() == []
    batcher.add("a", 10, 5.0)
    batcher.add("b", 10, 6.5)
    assert batcher.due(6.5) == 7.0
    assert batcher.due(9.0) == 9.0  # late: at once
    assert batcher.take() == ["a", "b"] and batcher.due(9.0) is None


def test_a_batch_goes_at_once_when_it_is_large_enough_and_never_exceeds_its_limits() -> None:
    batcher: SampleBatcher[str] = SampleBatcher(60.0, 100, 3)
    for name, nbytes in (("a", 40), ("b", 50)):
        batcher.add(name, nbytes, 0.0)
    assert batcher.due(0.0) == 60.0
    batcher.add("c", 30, 1.0)
    assert batcher.due(1.0) == 1.0
    assert batcher.take() == ["a", "b"]  # all three are 120 bytes
    assert batcher.due(1.0) == 61.0
    batcher.add("huge", 5000, 2.0)
    assert batcher.take() == ["c"] and batcher.due(2.0) == 2.0
    assert batcher.take() == ["huge"] and len(batcher) == 0
    for name in "defg":
        batcher.add(name, 1, 3.0)
    assert batcher.due(3.0) == 3.0
    assert batcher.take() == ["d", "e", "f"] and batcher.due(3.0) == 63.0


def test_without_waiting_each_sample_goes_at_once() -> None:
    batcher: SampleBatcher[str] = SampleBatcher(0.0, 1000, 10)
    batcher.add("a", 1, 5.0)
    assert batcher.due(5.0) == 5.0 and batcher.take() == ["a"]


@pytest.mark.parametrize("limits", [(-1.0, 10, 10), (1.0, 0, 10), (1.0, 10, 0)])
def test_a_batcher_that_lets_nothing_through_is_refused(limits: tuple[float, int, int]) -> None:
    with pytest.raises(ValueError, match="no batch can be made"):
        SampleBatcher(*limits)


def test_a_high_mark_is_passed_above_it_and_left_below_half_of_it() -> None:
    mark = HighMark(100)
    assert [mark.update(level) or mark.passed for level in (100, 60)] == [False, False]
    assert mark.update(101) and mark.passed
    assert not mark.update(50) and mark.passed
    assert mark.update(49) and not mark.passed
    assert not mark.update(100)


def test_the_mark_of_a_link_is_what_it_carries_in_ten_seconds_within_bounds() -> None:
    assert Uplink.marks(2e6, 0.5) == 21_000_000
    assert Uplink.marks(1e3, 0.1) == 4_000_000
    assert Uplink.marks(1e9, 0.1) == Uplink.marks(None, 0.0) == 256_000_000


# -- packing

VALUES = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | any_text(max_size=40)
)
BODIES = st.dictionaries(any_text(max_size=8), VALUES | st.lists(VALUES, max_size=3), max_size=6)


@st.composite
def samples(draw: st.DrawFn) -> Item:
    length = draw(st.integers(0, 30))

    def words() -> np.ndarray:
        """Any bits: any float32, NaNs and infinities too; or small numbers, of which some may be negative."""
        bits = np.frombuffer(
            draw(st.binary(min_size=4 * length, max_size=4 * length)), draw(st.sampled_from(["<u4", "<i4"]))
        )
        return bits >> draw(st.sampled_from([0, 8, 16]))

    return draw(BODIES), {name: words().view(dtype) for name, dtype in TOKEN_ARRAYS.items()}


@settings(max_examples=60)
@given(st.lists(samples(), max_size=6), st.booleans())
def test_packing_is_exact(some: list[Item], compress: bool) -> None:
    assert_same(unpack_samples(*over_the_wire(*pack_samples(some, compress))), some)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("largest", [1 << 16, 150_000], ids=["narrow", "wide"])
def test_empty_completions_and_tokens_of_any_size_are_kept(compress: bool, largest: int) -> None:
    some = [item("a", 0), item("b", 300, largest=largest), item("c", 0), item("d", 1)]
    some[1][1]["completion_tokens"][:2] = (0, largest - 1)
    some[1][1]["token_versions"][0] = -1
    some[0][0]["text"] = "Ünïcödé 漢字 🙂 \x00"
    assert_same(unpack_samples(*over_the_wire(*pack_samples(some, compress))), some)


def test_the_ledger_keeps_a_sample_that_came_in_a_batch() -> None:
    body, arrays = unpack_samples(*pack_samples(items(3), True))[1]
    assert_same([unpack_content(pack_content(body, arrays))], [item("g.1")])


def test_the_size_of_samples_is_that_of_their_raw_batch() -> None:
    some = items(40)
    _, arrays = pack_samples(some)
    packed = sum(array.nbytes for array in arrays.values())
    assert 0 <= packed - sum(sample_bytes(*one) for one in some) <= 5  # the header of the list of bodies


def test_compression_makes_texts_and_versions_smaller() -> None:
    some = items(40, tokens=200)
    raw, small = (sum(array.nbytes for array in pack_samples(some, compress)[1].values()) for compress in (False, True))
    assert small < 0.6 * raw


def test_a_batch_that_is_too_large_to_be_unpacked_at_a_senders_word_goes_raw(monkeypatch: pytest.MonkeyPatch) -> None:
    some = items(4)
    monkeypatch.setattr(sample_batches, "MAX_UNPACKED_BYTES", sum(sample_bytes(*one) for one in some) - 1)
    body, arrays = pack_samples(some, True)
    assert body == {"packing": "raw"}
    assert_same(unpack_samples(body, arrays), some)


def test_what_is_not_a_sample_is_refused_by_name() -> None:
    body, arrays = item("a")
    with pytest.raises(ValueError, match="has the arrays"):
        sample_bytes(body, {"logprobs": arrays["logprobs"]})
    with pytest.raises(ValueError, match="one length"):
        sample_bytes(body, arrays | {"logprobs": arrays["logprobs"][1:]})
    with pytest.raises(ValueError, match="one length"):
        sample_bytes(body, {name: array.reshape(2, 10) for name, array in arrays.items()})
    with pytest.raises(ValueError, match="'logprobs' is of type float32"):
        pack_samples([(body, arrays | {"logprobs": arrays["logprobs"].astype(np.float64)})])
    for wrong in (object(), 2**70, "\ud800"):
        with pytest.raises(ValueError):
            sample_bytes({"x": wrong}, arrays)


def test_a_batch_that_claims_too_much_is_refused_before_memory_is_taken() -> None:
    body, arrays = pack_samples(items(2), True)
    for key in ("samples", "tokens", "bodies"):
        with pytest.raises(ValueError, match="a batch has no"):
            unpack_samples(body | {key: 2**40}, arrays)
    with pytest.raises(ValueError, match="may be compressed"):
        unpack_samples(body | {"tokens": sample_batches.MAX_UNPACKED_BYTES // 2}, arrays)
    for key, number in (("samples", sample_batches.BATCH_SAMPLES), ("bodies", sample_batches.MAX_BODIES_BYTES)):
        with pytest.raises(ValueError, match="at most 256 in 16777216"):
            unpack_samples(body | {key: number + 1}, arrays)


def test_more_samples_than_a_batch_ever_has_are_neither_packed_nor_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    most = sample_batches.BATCH_SAMPLES
    assert len(unpack_samples(*pack_samples([item("a", 0)] * most, True))) == most
    with pytest.raises(ValueError, match="a batch of 257 samples"):
        pack_samples([item("a", 0)] * (most + 1))
    body, arrays = pack_samples(items(2))
    monkeypatch.setattr(msgpack, "unpackb", None)  # nothing is unpacked before it is counted
    many = {"bodies": np.frombuffer(b"\xdd\x00\x0f\x42\x40" + b"\x80" * 10**6, np.uint8)}
    with pytest.raises(ValueError, match="not a list of 2 maps"):
        unpack_samples(body, arrays | many)
    with pytest.raises(ValueError, match="a batch of 1000000 samples"):
        unpack_samples(body, arrays | many | {"lengths": np.zeros(10**6, np.int32)})


JUNK = [
    None,
    True,
    -1,
    0,
    1,
    3,
    2**33,
    2**70,
    1.5,
    float("nan"),
    "",
    "raw",
    "zstd",
    [],
    ["logprobs"],
    [[]],
    {},
    b"\xff",
]


def mutated(rng: random.Random, body: dict[str, Any], arrays: dict[str, np.ndarray]) -> tuple[Any, Any]:
    body, arrays = dict(body), {name: array.copy() for name, array in arrays.items()}
    name = rng.choice(list(arrays))
    array = arrays[name]
    match rng.randrange(8):
        case 0 | 1 | 2:  # bytes of an array
            data = array.view(np.uint8)
            for _ in range(rng.choice((1, 1, 5))):
                data[rng.randrange(len(data))] = rng.randrange(256)
        case 3:
            arrays[name] = array[: rng.randrange(len(array))] if rng.random() < 0.5 else np.concatenate([array, array])
        case 4:
            arrays[name] = rng.choice(
                [array.reshape(-1, 1), array.astype(np.float64), array.astype(np.int32), array.view(np.uint8)]
            )
        case 5:
            arrays.pop(name)
        case 6:
            arrays[rng.choice(["x", "payload", "bodies"])] = np.frombuffer(rng.randbytes(30), np.uint8)
        case 7:
            key = rng.choice(["packing", "samples", "tokens", "bodies", "narrow"])
            body[key] = rng.choice(JUNK)
            if isinstance(before := body.get(rng.choice(list(body))), int):
                body[key] = before + rng.choice((-1, 1, 7))
    return body, arrays


@pytest.mark.parametrize("compress", [False, True])
def test_malformed_batches_are_refused_with_one_kind_of_error(compress: bool) -> None:
    rng = random.Random(7)
    body, arrays = pack_samples([item("a", 0), item("ü", 7), item("c", 30)], compress)
    refused = 0
    for _ in range(2500):
        try:
            found = unpack_samples(*mutated(rng, body, arrays))
        except ValueError:
            refused += 1
        else:  # a flipped bit may be another sample, but it is one
            assert all(len({len(array) for array in got.values()}) == 1 for _, got in found)
    assert refused > 1000


@pytest.mark.parametrize(
    "bodies", [[{}], [{}, 1], {}, [{}, {1: 2}], [{}, {}, {}]], ids=["few", "no map", "no list", "key", "many"]
)
def test_bodies_that_are_not_one_map_per_sample_are_refused(bodies: Any) -> None:
    body, arrays = pack_samples(items(2))
    with pytest.raises(ValueError, match="bodies are not"):
        unpack_samples(body, arrays | {"bodies": np.frombuffer(msgpack.packb(bodies), np.uint8)})


def test_lengths_that_add_up_only_with_a_negative_one_are_refused() -> None:
    body, arrays = pack_samples(items(2))
    with pytest.raises(ValueError, match="do not add up"):
        unpack_samples(body, arrays | {"lengths": np.array([-1, 41], np.int32)})


# -- whether compression pays


def measured(
    bytes_per_s: float | None, batches_sent: int, mb_per_s: float = 200, ratio: float = 0.4
) -> tuple[Any, ...]:
    """How each batch of 10^6 bytes was packed, and the choice afterwards."""
    choice = CompressionChoice(bytes_per_s)
    ways = []
    for _ in range(batches_sent):
        way = choice.next()
        if way != "zstd":
            choice.packed_raw(10**6, 0.001)
        if way != "raw":
            choice.packed_small(10**6, 1 / mb_per_s, int(ratio * 10**6))
        ways.append(way)
    return ways, choice


def test_a_slow_link_gets_compressed_batches_a_fast_one_raw_ones_and_both_are_measured_again() -> None:
    for bytes_per_s, way in ((12.5e6, "zstd"), (1.25e9, "raw")):
        ways, choice = measured(bytes_per_s, 130)
        assert ways[:5] == ["both"] * 4 + [way]
        assert [number for number, one in enumerate(ways) if one == "both"] == [0, 1, 2, 3, 64, 128]
        assert set(ways) == {"both", way} and choice.compressing == (way == "zstd")
        assert choice.ratio == pytest.approx(0.4) and choice.mb_per_s == pytest.approx(200)


def test_the_choice_is_where_the_time_saved_on_the_wire_is_the_time_to_compress() -> None:
    # a raw byte takes 1 ns to pack, so it pays below (1 - 0.4) / (5 ns - 1 ns) = 150 MB/s
    assert measured(149e6, 5)[1].compressing and not measured(151e6, 5)[1].compressing


def test_the_choice_changes_when_samples_no_longer_shrink() -> None:
    ways, choice = measured(12.5e6, 5)
    assert ways[-1] == "zstd"
    for _ in range(12):
        choice.packed_small(10**6, 0.1, 990_000)
    assert not choice.compressing and choice.next() == "raw"


@pytest.mark.parametrize("bytes_per_s", [None, float("inf")])
def test_without_a_known_limit_nothing_is_compressed_or_measured(bytes_per_s: float | None) -> None:
    ways, choice = measured(bytes_per_s, 70)
    assert set(ways) == {"raw"} and choice.ratio is None and choice.mb_per_s is None and not choice.compressing


@pytest.mark.parametrize("bytes_per_s", [0.0, -1.0, float("nan")])
def test_a_link_that_carries_nothing_is_refused(bytes_per_s: float) -> None:
    with pytest.raises(ValueError, match="carries nothing"):
        CompressionChoice(bytes_per_s)
