"""Deltas are exact for every bit pattern and about as small as they can be; nothing that is sent breaks a receiver."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.weights.codec import entropy
from streamrl.weights.codec.delta import PACKED, RAW, CorruptDelta, decode_tensor, encode_tensor, entropy_bound_bits
from streamrl.weights.version import CorruptWeights

SIZES = {
    **{"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1},
    **{"int64": 8, "int16": 2, "uint8": 1, "bool": 1, "float8_e8m0fnu": 1},
}
DENSITIES = (0.0, 1e-4, 0.01, 0.1, 0.5, 1.0)


def words(dtype: str, data: np.ndarray) -> np.ndarray:
    return data.view(f"<u{SIZES[dtype]}")


def random_bytes(rng: np.random.Generator, dtype: str, n: int) -> np.ndarray:
    """Any bit patterns: for floats NaNs, infinities, subnormal numbers and both zeros among them."""
    return rng.integers(0, 256, n * SIZES[dtype], dtype=np.uint8)


def changed(rng: np.random.Generator, dtype: str, old: np.ndarray, count: int, most: int) -> np.ndarray:
    """A copy of which `count` elements differ, by up to `most` in their bit patterns."""
    new = old.copy()
    where = rng.choice(len(words(dtype, old)), count, replace=False)
    steps = rng.integers(1, most, count, endpoint=True) * rng.choice([-1, 1], count)
    words(dtype, new)[where] += steps.astype(words(dtype, new).dtype)
    return new


def round_trip(new: np.ndarray, old: np.ndarray | None, dtype: str) -> np.ndarray:
    """The payload, after checking that it makes the new tensor and touches nothing beside it."""
    payload = encode_tensor(new, old, dtype)
    assert payload.dtype == np.uint8
    assert payload.size <= new.size + 1
    around = np.full(new.size + 128, 0xA5, dtype=np.uint8)
    target = around[64 : 64 + new.size]
    target[:] = 0x5A if old is None or payload[0] in (RAW, PACKED) else old
    decode_tensor(payload, target, dtype)
    assert target.tobytes() == new.tobytes()
    assert (around[:64] == 0xA5).all()
    assert (around[64 + new.size :] == 0xA5).all()
    return payload


def bf16_step(density: float, n: int = 1 << 20, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Old and new bytes of normal weights, of which a share moved, mostly by one ulp."""
    rng = np.random.default_rng(seed)
    weights = torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 0.02
    old = weights.bfloat16().view(torch.uint8).numpy()
    new = old.copy()
    where = rng.choice(n, round(density * n), replace=False)
    steps = rng.choice([1, -1, 2, -2, 3, -5], len(where), p=[0.45, 0.45, 0.03, 0.03, 0.02, 0.02])
    new.view(np.uint16)[where] += steps.astype(np.uint16)
    return old, new


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("n", [0, 1, 7, 1001, 70_001])
def test_any_share_of_changes_arrives_bit_for_bit(dtype: str, n: int) -> None:
    rng = np.random.default_rng(n)
    old = random_bytes(rng, dtype, n)
    for count in sorted({min(n, 1), *(round(density * n) for density in DENSITIES)}):
        for most in (1, 100):
            payload = round_trip(changed(rng, dtype, old, count, most), old, dtype)
            assert (payload.tobytes() == b"\0") == (count == 0)
    assert round_trip(old, None, dtype)[0] in (RAW, PACKED)


@pytest.mark.parametrize("share", [0.001, 0.3, 0.999])
def test_a_tensor_of_several_blocks_arrives_bit_for_bit(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entropy, "BLOCK", 4096)
    monkeypatch.setattr("streamrl.weights.codec.delta.BLOCK", 4096)
    rng = np.random.default_rng(1)
    old = random_bytes(rng, "bfloat16", 100_003)
    payload = round_trip(changed(rng, "bfloat16", old, round(share * 100_003), 3), old, "bfloat16")
    assert payload[0] not in (RAW, PACKED)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_every_bit_pattern_may_become_every_special_one(dtype: str) -> None:
    patterns = 1 << 8 * SIZES[dtype]
    old = np.arange(patterns, dtype=f"<u{SIZES[dtype]}")
    top = patterns >> 1
    infinity = {"bfloat16": 0x7F80, "float16": 0x7C00, "float8_e4m3fn": 0x7F, "float8_e5m2": 0x7C}[dtype]
    for special in (0, top, 1, top + 1, infinity, infinity + top, top - 1, patterns - 1):
        round_trip(np.full_like(old, special).view(np.uint8), old.view(np.uint8), dtype)
    round_trip(old[::-1].copy().view(np.uint8), old.view(np.uint8), dtype)
    round_trip((old ^ top).astype(old.dtype).view(np.uint8), old.view(np.uint8), dtype)  # all signs flipped


def test_changes_in_clusters_and_far_apart_arrive_bit_for_bit() -> None:
    old = np.zeros(2 * 20_000_000, dtype=np.uint8)
    for where in ([0], [19_999_999], [3, 4, 19_000_000], range(5_000_000, 5_000_900), [*range(100_000), 19_999_998]):
        new = old.copy()
        new.view(np.uint16)[list(where)] = 1
        assert round_trip(new, old, "bfloat16").size < 64 + len(where) // 8


@settings(max_examples=300)
@given(data=st.data(), dtype=st.sampled_from(list(SIZES)))
def test_random_words_arrive_bit_for_bit(data: st.DataObject, dtype: str) -> None:
    n = data.draw(st.integers(0, 600))
    old = np.frombuffer(data.draw(st.binary(min_size=n * SIZES[dtype], max_size=n * SIZES[dtype])), dtype=np.uint8)
    new = old.copy()
    some = st.lists(st.tuples(st.integers(0, max(n - 1, 0)), st.integers(0, 2**63)), max_size=60 if n else 0)
    for where, value in data.draw(some):
        words(dtype, new)[where] = value % 256 ** SIZES[dtype]
    round_trip(new, old, dtype)
    round_trip(new, None, dtype)


@pytest.mark.parametrize("density", [1e-4, 0.001, 0.01, 0.05, 0.2, 0.5])
def test_a_delta_is_close_to_the_entropy_of_its_positions_and_values(density: float) -> None:
    old, new = bf16_step(density)
    payload = round_trip(new, old, "bfloat16")
    assert 8 * payload.size <= 1.12 * entropy_bound_bits(old, new, "bfloat16")
    if density == 0.01:
        assert payload.size * 100 <= new.size


def test_a_step_across_zero_is_one_ulp() -> None:
    old = torch.zeros(10_000, dtype=torch.bfloat16)
    new = -old
    payload = encode_tensor(new.view(torch.uint8).numpy(), old.view(torch.uint8).numpy(), "bfloat16")
    assert payload.size < 40  # all changed, all by -1


def test_the_bound_counts_choices_and_values() -> None:
    old = np.zeros(2 * 8, dtype=np.uint8)
    new = old.copy()
    new.view(np.uint16)[[1, 4]] = 1
    assert entropy_bound_bits(old, new, "bfloat16") == pytest.approx(np.log2(28))  # 8 over 2; all values alike
    new.view(np.uint16)[4] = 2
    assert entropy_bound_bits(old, new, "bfloat16") == pytest.approx(np.log2(28) + 2)
    assert entropy_bound_bits(old, old, "bfloat16") == 0


@pytest.mark.parametrize("n", [5_000, 300_000])
def test_what_shares_nothing_with_the_old_tensor_is_sent_complete_and_compressed(n: int) -> None:
    old, new = (torch.randn(n, generator=torch.Generator().manual_seed(s)).bfloat16() for s in (1, 2))
    payload = round_trip(new.view(torch.uint8).numpy(), old.view(torch.uint8).numpy(), "bfloat16")
    assert payload[0] in (RAW, PACKED)
    assert payload.size < 0.75 * 2 * n
    noise = np.random.default_rng(0).integers(0, 256, 2 * n, dtype=np.uint8)
    assert round_trip(noise, old.view(torch.uint8).numpy(), "bfloat16").size == 2 * n + 1


def test_sizes_that_do_not_fit_are_the_callers_error() -> None:
    with pytest.raises(ValueError, match="3 bytes"):
        encode_tensor(np.zeros(3, np.uint8), None, "bfloat16")
    with pytest.raises(ValueError, match="4 bytes"):
        encode_tensor(np.zeros(4, np.uint8), np.zeros(2, np.uint8), "bfloat16")


def payloads() -> list[tuple[np.ndarray, np.ndarray, str]]:
    """(payload, old tensor, type) of every encoding and coding of positions."""
    rng = np.random.default_rng(3)
    made = []
    for dtype in ("bfloat16", "float32", "float8_e5m2"):
        for n, count, most in ((3000, 0, 1), (3000, 20, 40), (3000, 300, 2), (3000, 1200, 1), (3000, 2900, 9)):
            old = random_bytes(rng, dtype, n)
            made.append((encode_tensor(changed(rng, dtype, old, count, min(most, 100)), old, dtype), old, dtype))
        old = np.tile(np.arange(100, dtype=np.uint8), 40)
        made.append((encode_tensor(old, None, dtype), old, dtype))
    return made


def test_a_receiver_survives_whatever_is_sent() -> None:
    rng = np.random.default_rng(4)
    known = payloads()
    refused = 0
    for trial in range(6_000):
        payload, old, dtype = known[trial % len(known)]
        bad = payload.copy()
        if trial % 4 == 0:
            bad = rng.integers(0, 256, rng.integers(0, 60), dtype=np.uint8)
            if bad.size:
                bad[0] %= 5
        elif trial % 4 == 1:
            bad = bad[: rng.integers(0, bad.size)]
        else:  # a few bytes changed, in the header as often as elsewhere
            where = rng.integers(0, bad.size if trial % 4 == 2 else min(bad.size, 12), rng.integers(1, 4))
            bad[where] = rng.integers(0, 256, len(where))
        around = np.full(old.size + 128, 0xA5, dtype=np.uint8)
        target = around[64:-64]
        target[:] = old
        try:
            decode_tensor(bad, target, dtype)
        except CorruptDelta:
            refused += 1
            assert target.tobytes() == old.tobytes()
        assert (around[:64] == 0xA5).all()
        assert (around[-64:] == 0xA5).all()
    assert refused > 3_000


def test_a_payload_that_claims_to_be_huge_is_refused_before_memory_is_taken() -> None:
    huge = b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f"
    for head in (b"\x02", b"\x03", b"\x03\x05\x01", b"\x03\x05\x04", b"\x03" + b"\xff" * 20):
        with pytest.raises(CorruptDelta):
            decode_tensor(np.frombuffer(head + huge, np.uint8), np.zeros(64, np.uint8), "bfloat16")
    bomb = entropy._ZSTD.compress(b"\0" * 50_000_000, asbytes=True)
    writer = entropy.Writer()
    writer.number(2)
    writer.number(len(bomb))
    payload = np.concatenate((writer.payload(), np.frombuffer(bomb, np.uint8)))
    with pytest.raises(CorruptDelta):
        decode_tensor(payload, np.zeros(8192, np.uint8), "uint8")


def test_what_is_no_payload_is_refused() -> None:
    assert issubclass(CorruptDelta, CorruptWeights)
    for payload in (b"", b"\x04", b"\xff"):
        with pytest.raises(CorruptDelta):
            decode_tensor(np.frombuffer(payload, np.uint8), np.zeros(4, np.uint8), "bfloat16")
    with pytest.raises(CorruptDelta, match="no tensor"):
        decode_tensor(np.zeros(1, np.uint8), np.zeros(3, np.uint8), "bfloat16")
    with pytest.raises(CorruptDelta):
        decode_tensor(np.zeros(2, np.uint8), np.zeros(4, np.uint8), "bfloat16")
