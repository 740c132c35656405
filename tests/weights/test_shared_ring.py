"""Which slot the writer may fill, whatever readers do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.weights.backends.shared_ring import Ring


def test_a_slot_is_filled_again_when_every_reader_has_copied_what_was_in_it() -> None:
    ring = Ring(2, [1, 2])
    for chunk in (0, 1):
        assert (ring.chunk, ring.slot, ring.waits_for) == (chunk, chunk, [])
        ring.filled()
    assert ring.waits_for == [1, 2]
    ring.copied(1, 0)
    ring.copied(1, 1)
    assert ring.waits_for == [2]
    with pytest.raises(ValueError, match=r"chunk 2 overwrites what \[2\] have not copied"):
        ring.filled()
    ring.copied(2, 0)
    assert (ring.chunk, ring.slot, ring.waits_for) == (2, 0, [])
    ring.filled()
    assert ring.waits_for == [2]


@pytest.mark.parametrize("chunk", [0, 2, 3])
def test_a_reader_copies_one_chunk_after_the_other_and_none_that_is_not_written(chunk: int) -> None:
    ring = Ring(4, [1])
    for _ in range(3):
        ring.filled()
    ring.copied(1, 0)
    with pytest.raises(ValueError, match=rf"reader 1 says that it has copied chunk {chunk}; expected 1, of 3"):
        ring.copied(1, chunk)
    ring.copied(1, 1)
    ring.copied(1, 2)
    with pytest.raises(ValueError, match="chunk 3; expected 3, of 3 written"):
        ring.copied(1, 3)


@given(slots=st.integers(1, 4), readers=st.integers(0, 3), moves=st.lists(st.integers(0, 3), max_size=60))
def test_whoever_moves_when_every_reader_finds_every_chunk_in_its_slot_and_somebody_can_always_move(
    slots: int, readers: int, moves: list[int]
) -> None:
    ring, kept = Ring(slots, range(1, readers + 1)), dict[int, int]()
    written, copied = 0, [0] * (readers + 1)
    for who in moves:
        if who == 0 and not ring.waits_for:
            kept[ring.slot] = ring.chunk
            ring.filled()
            written += 1
        elif 0 < who <= readers and copied[who] < written:
            assert kept[copied[who] % slots] == copied[who]
            ring.copied(who, copied[who])
            copied[who] += 1
        assert not ring.waits_for or all(copied[reader] < written for reader in ring.waits_for)
    assert ring.chunk == written
