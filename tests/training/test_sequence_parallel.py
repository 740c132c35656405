"""Rows in parts: what is divided and joined again is the same, and so are its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AttentionInterface

from scheduler.cost.model_shapes import undivided_heads
from streamrl.errors import RunFailed
from streamrl.training.attention_in_parts import IN_PARTS, SDPA
from streamrl.training.packing import ROW_MULTIPLE, GroupLayout, pack
from streamrl.training.policy_model import load_policy
from streamrl.training.sequence_parallel import check_heads, divided, filled, in_order, joined, local_places
from tests.training.conftest import random_groups

SIZES = st.lists(st.integers(1, 4), min_size=2, max_size=4)


@given(SIZES, st.integers(1, 4), st.data())
def test_joining_undoes_dividing_and_so_do_the_gradients(sizes: list[int], parts: int, data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(sizes) - 1))
    sizes[dim] *= parts
    x = torch.arange(torch.Size(sizes).numel(), dtype=torch.float64).view(sizes).requires_grad_()
    there = divided(x, dim, parts)
    for number, part in enumerate(x.chunk(parts, dim)):
        assert torch.equal(there[number], part), "consecutive parts"
    back = joined(there, dim)
    assert torch.equal(back, x)
    weights = torch.rand_like(x)
    (back * weights).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, weights)


def exchanged(held: Sequence[torch.Tensor], split: int, join: int) -> list[torch.Tensor]:
    """What `SequenceRanks.exchange` gives each rank, of what each rank has."""
    sent = torch.stack([divided(x, split, len(held)) for x in held])
    return [joined(sent[:, rank], join) for rank in range(len(held))]


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))
def test_heads_of_whole_rows_come_from_parts_of_rows_and_go_back(
    ranks: int, rows: int, heads: int, tokens: int, width: int
) -> None:
    whole = torch.rand(rows, heads * ranks, tokens * ranks, width, dtype=torch.float64, requires_grad=True)
    by_heads = exchanged(whole.chunk(ranks, 2), split=1, join=2)
    for mine, expected in zip(by_heads, whole.chunk(ranks, 1), strict=True):
        assert torch.equal(mine, expected), "all tokens, in their order, of this rank's heads"
    outputs = [x.transpose(1, 2) for x in by_heads]  # as attention functions return them
    back = exchanged(outputs, split=1, join=2)
    assert torch.equal(torch.cat(back, 1), whole.transpose(1, 2))
    weights = torch.rand_like(whole)
    (torch.cat(back, 1).transpose(1, 2) * weights).sum().backward()
    assert whole.grad is not None and torch.equal(whole.grad, weights)


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.integers(1, 3))
def test_every_place_is_found_in_one_part(parts: int, each: int, rows: int, width: int) -> None:
    columns = parts * each
    whole = torch.rand(rows, columns, width)
    owners, places = local_places(torch.arange(rows * columns), columns, parts)
    shares = [part.flatten(0, 1) for part in whole.chunk(parts, 1)]
    found = torch.stack([shares[owner][place] for owner, place in zip(owners, places, strict=True)])
    assert torch.equal(found, whole.flatten(0, 1))


@given(st.lists(st.integers(0, 3), max_size=20), st.integers(0, 3))
def test_values_return_to_the_order_of_their_tokens(owners: list[int], filling: int) -> None:
    values, of = torch.rand(len(owners)), torch.tensor(owners, dtype=torch.int64)
    numbers = [torch.nonzero(of == rank)[:, 0] for rank in range(4)]
    parts = [torch.cat([values[one], torch.full((filling,), torch.nan)]) for one in numbers]
    assert torch.equal(in_order(parts, numbers), values)


@given(st.integers(1, 8), st.integers(0, 9))
def test_rows_are_filled_up_with_a_prompt_that_nothing_sees(parts: int, count: int) -> None:
    batch = pack(random_groups(count)) if count else pack(random_groups(1))
    tokens = batch.input_ids.shape[1]
    layout, columns = filled(batch.layout, tokens, parts)
    assert columns % (parts * ROW_MULTIPLE) == 0 and 0 <= columns - tokens < parts * ROW_MULTIPLE
    assert layout[: len(batch.layout)] == batch.layout and layout[-1].stop == columns
    assert layout[len(batch.layout) :] in ((), (GroupLayout(tokens, columns - tokens, ()),))


def test_heads_that_ranks_cannot_share_are_refused(tiny_model: Path) -> None:
    assert undivided_heads(28, 4, 7) == "expected a divisor or a multiple of the 4 key-value heads"
    assert undivided_heads(28, 4, 8) == "expected a divisor of the 28 attention heads"
    assert not any(undivided_heads(32, 8, ranks) for ranks in (1, 2, 4, 8, 16, 32))
    config = load_policy(str(tiny_model)).model.config
    check_heads(config, 2)  # both ranks have the one key-value head
    with pytest.raises(
        RunFailed, match=r"sequence_parallel is 3: expected a divisor of the 2 attention heads of llama"
    ):
        check_heads(config, 3)


def test_a_layer_that_is_not_told_who_shares_its_rows_is_refused() -> None:
    attention, heads = AttentionInterface()[IN_PARTS[SDPA]], torch.zeros(1, 2, 3, 8)
    with pytest.raises(ValueError, match="Linear is not told by its model which ranks share its rows"):
        attention(torch.nn.Linear(1, 1), heads, heads, heads, None)
