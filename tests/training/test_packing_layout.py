"""The packed row of two groups, written out; sizes and costs that are counted by hand. No model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from scheduler.cost.model_shapes import Transformer
from streamrl.rollouts.train_groups import TrainGroup, TrainSequence
from streamrl.training.packing import GroupLayout, pack, pack_share


def sequence(tokens: list[int], advantage: float, reference: bool = False) -> TrainSequence:
    logprobs = np.asarray([-token / 8 for token in tokens], np.float32)
    return TrainSequence(
        np.asarray(tokens, np.int32), logprobs, advantage, logprobs - 1 if reference else None, sample_id="s"
    )


def group(name: str, prompt: list[int], *sequences: TrainSequence) -> TrainGroup:
    return TrainGroup(name, np.asarray(prompt, np.int32), list(sequences))


TWO = [
    group("a", [1, 2, 3], sequence([4, 5], 0.5), sequence([6, 7, 8], -0.5)),
    group("b", [9, 10], sequence([], 9.0), sequence([11], 2.0)),
]


def test_two_groups_written_out() -> None:
    batch = pack(TWO)
    # place:                       0  1  2  3  4  5  6  7  8  9  10  11 to 15
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0, 0, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 4, 5, 0, 1, 2, 0, 1, 2, 3, 4]]
    assert batch.layout == (GroupLayout(0, 3, (2, 3)), GroupLayout(8, 2, (1,)), GroupLayout(11, 5, ()))
    assert [one.stop for one in batch.layout] == [8, 11, 16]
    assert batch.source_index.tolist() == [2, 3, 2, 5, 6, 9]
    assert batch.targets.tolist() == [4, 5, 6, 7, 8, 11]
    assert batch.generator_logprobs.tolist() == [-token / 8 for token in (4, 5, 6, 7, 8, 11)]
    assert batch.advantages.tolist() == [0.5, 0.5, -0.5, -0.5, -0.5, 2.0]
    assert batch.sequence_ids.tolist() == batch.row_ids.tolist() == [0, 0, 1, 1, 1, 2]
    assert batch.sequence_tokens.tolist() == [2, 2, 3, 3, 3, 1]
    assert batch.reference_logprobs is None
    assert batch.loss_tokens == 6 and batch.sequences == 3
    types = [batch.input_ids, batch.position_ids, batch.source_index, batch.targets, batch.sequence_ids]
    assert {one.dtype for one in types} == {torch.int64}
    assert {batch.generator_logprobs.dtype, batch.advantages.dtype} == {torch.float32}


def test_a_row_of_sixteen_tokens_gets_no_filler() -> None:
    batch = pack([group("a", list(range(15)), sequence([4], 1.0))])
    assert batch.input_ids.tolist() == [[*range(15), 4]] and batch.layout == (GroupLayout(0, 15, (1,)),)


def test_reference_log_probabilities_are_there_if_every_sequence_with_tokens_has_them() -> None:
    full = group("a", [1], sequence([2, 3], 1.0, reference=True), sequence([], 1.0))
    batch = pack([full])
    assert batch.reference_logprobs is not None
    assert batch.reference_logprobs.tolist() == [-2 / 8 - 1, -3 / 8 - 1]
    assert pack([full, group("b", [1], sequence([2], 1.0))]).reference_logprobs is None


def test_estimates_are_there_if_every_sequence_with_tokens_has_them() -> None:
    def estimated(tokens: list[int], first: float) -> TrainSequence:
        values = first + np.arange(3 * len(tokens), dtype=np.float32).reshape(-1, 3)
        return replace(sequence(tokens, 1.0), estimates=values)

    full = group("a", [1], estimated([2, 3], 0.0), sequence([], 1.0), estimated([4], 10.0))
    batch = pack([full])
    assert batch.estimates is not None
    assert batch.estimates.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [10.0, 11.0, 12.0]]
    assert pack([full, group("b", [1], sequence([2], 1.0))]).estimates is None
    empty = pack([group("a", [1], estimated([], 0.0))]).estimates
    assert empty is not None and empty.shape == (0, 3)


def test_a_share_for_a_cpu_is_there_at_once() -> None:
    share = pack_share([TWO[:1], TWO[1:]], torch.device("cpu"), None)
    assert share.copied is None and share.arrived() == share.batches
    assert [batch.targets.tolist() for batch in share.batches] == [[4, 5, 6, 7, 8], [11]]


def test_tokens_without_a_loss_are_left_out_and_the_others_are_counted_among_all() -> None:
    own = replace(sequence([5, 6, 7], 1.0), mask=np.asarray([True, False, True]), logprobs=np.zeros(3, np.float32))
    batch = pack([group("a", [1, 2], sequence([3, 4], 1.0), own)])
    assert batch.targets.tolist() == [3, 4, 5, 7] and batch.with_loss is not None
    assert batch.with_loss.tolist() == [0, 1, 2, 4]


def test_nothing_is_an_empty_row() -> None:
    batch = pack([])
    assert batch.input_ids.shape == (1, 0) and batch.targets.shape == (0,) and batch.layout == ()
    assert batch.sequences == batch.loss_tokens == batch.row_tokens(False) == batch.squares(False) == 0


def test_a_row_costs_its_tokens_packed_and_prompt_and_completion_without_the_last_token_separate() -> None:
    batch = pack(TWO)
    assert batch.row_tokens(separate=False) == 16
    assert batch.row_tokens(separate=True) == (3 + 1) + (3 + 2) + (2 + 0)


def test_the_pairs_of_attention_packed_and_separate() -> None:
    batch = pack(TWO)
    first, second, filler = 3**2 + 2 * (2 + 6) + 3 * (3 + 6), 2**2 + 1 * (1 + 4), 5**2
    assert batch.squares(separate=False) == first + second + filler == 86
    assert batch.squares(separate=True) == 4**2 + 5**2 + 2**2
    window = Transformer("small", 1, 8, 2, 2, 4, 16, 32, True, "test", window=2, windowed=1)
    assert window.pairs(5.0) == 2 * (2 * 5 - 2) == 16 and window.pairs(1.0) == 1
    first, second, filler = 8 + (16 - 8) + (20 - 8), 4 + (8 - 4), 16
    assert batch.squares(separate=False, pairs=window.pairs) == first + second + filler
    assert batch.squares(separate=True, pairs=window.pairs) == 12 + 16 + 4
    for separate in (False, True):  # a number of numpy cannot be sent
        assert type(batch.squares(separate, window.pairs)) is float


def test_a_group_without_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="group a has an empty prompt"):
        pack([group("a", [], sequence([1], 1.0))])


def test_a_batch_on_another_device_has_every_tensor_there_and_the_same_layout() -> None:
    batch = pack(TWO)
    assert batch.to(torch.device("cpu")) is batch
    moved = batch.to(torch.device("meta"))
    tensors = [one for one in vars(moved).values() if isinstance(one, torch.Tensor)]
    assert len(tensors) == 9 and all(one.device.type == "meta" for one in tensors)
    assert moved.layout == batch.layout and moved.reference_logprobs is None


def test_a_thread_that_moves_a_share_has_its_device_when_it_leaves_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would go back to GPU 0 there otherwise, and give it a context."""
    now: list[object] = []
    left: list[list[object]] = []

    @contextmanager
    def current(what: object) -> Iterator[None]:
        now.append(what)
        yield
        left.append(now[:])
        now.pop()

    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, current)
    monkeypatch.setattr(torch.cuda, "Event", Mock)
    device, copies = torch.device("meta"), Mock()
    share = pack_share([TWO], device, copies)
    assert left == [[device, copies], [device]]
    assert [batch.input_ids.device for batch in share.batches] == [device]
