"""Cutting groups into micro-batches and ranks' shares: exact cases, and limits hit exactly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from streamrl.rollouts.micro_batch import loss_normalizer, split_into_micro_batches, split_into_rows
from streamrl.rollouts.rank_shares import balance
from streamrl.rollouts.train_groups import TrainGroup, TrainSequence


def group(name: str, prompt: int, *completions: int) -> TrainGroup:
    """A group by its lengths; a completion's advantage is its place."""
    sequences = [
        TrainSequence(np.arange(length, dtype=np.int32), np.full(length, -0.5, np.float32), float(place))
        for place, length in enumerate(completions)
    ]
    return TrainGroup(name, np.arange(prompt, dtype=np.int32), sequences)


def lengths(parts: list[list[TrainGroup]]) -> list[list[tuple[str, int, list[int]]]]:
    """Each part's groups: name, tokens of the prompt, tokens of each completion."""
    return [
        [(one.group_id, len(one.prompt_tokens), [len(s.completion_tokens) for s in one.sequences]) for one in part]
        for part in parts
    ]


def test_groups_fill_a_micro_batch_to_its_last_token() -> None:
    groups = [group("a", 2, 3), group("b", 1, 4), group("c", 1, 1), group("d", 2, 6)]
    assert lengths(split_into_micro_batches(groups, 10)) == [
        [("a", 2, [3]), ("b", 1, [4])],  # 5 + 5
        [("c", 1, [1]), ("d", 2, [6])],  # 2 + 8
    ]
    assert lengths(split_into_micro_batches(groups, 9)) == [
        [("a", 2, [3])],
        [("b", 1, [4]), ("c", 1, [1])],
        [("d", 2, [6])],
    ]
    assert split_into_micro_batches([], 9) == []
    # each run begins empty: two of 5 tokens exceed 9 wherever they are
    fives = [group(name, 1, 4) for name in "abc"]
    assert split_into_micro_batches(fives, 9) == [[one] for one in fives]


def test_only_a_group_that_is_too_large_is_split_and_its_parts_repeat_the_prompt() -> None:
    assert lengths(split_into_micro_batches([group("a", 2, 3, 3)], 8)) == [[("a", 2, [3, 3])]]
    assert lengths(split_into_micro_batches([group("a", 2, 3, 3, 1)], 8)) == [[("a", 2, [3, 3])], [("a", 2, [1])]]
    # a single sequence may be larger than the limit
    assert lengths(split_into_micro_batches([group("a", 2, 9, 3, 3)], 8)) == [[("a", 2, [9])], [("a", 2, [3, 3])]]
    # the last part shares its micro-batch with what follows
    assert lengths(split_into_micro_batches([group("a", 2, 5, 2), group("b", 1, 3)], 8)) == [
        [("a", 2, [5])],
        [("a", 2, [2]), ("b", 1, [3])],
    ]


def test_rows_of_their_own_are_padded_to_the_longest() -> None:
    # rows of 4, 4 and 6: 2 x 4 = 8; with the third 3 x 6 = 18
    assert lengths(split_into_rows([group("a", 2, 2, 2, 4)], 18)) == [[("a", 2, [2, 2, 4])]]
    assert lengths(split_into_rows([group("a", 2, 2, 2, 4)], 17)) == [[("a", 2, [2, 2])], [("a", 2, [4])]]
    # a shorter one is padded, too: 2 x 6 = 12
    assert lengths(split_into_rows([group("a", 2, 4), group("b", 1, 1, 1)], 12)) == [
        [("a", 2, [4]), ("b", 1, [1])],
        [("b", 1, [1])],
    ]
    assert lengths(split_into_rows([group("a", 2, 4), group("b", 1, 1, 1)], 11)) == [
        [("a", 2, [4])],
        [("b", 1, [1, 1])],
    ]
    assert lengths(split_into_rows([group("a", 2, 9, 1)], 5)) == [[("a", 2, [9])], [("a", 2, [1])]]
    # the padding of an earlier run is forgotten: 3 x 2 = 6
    assert lengths(split_into_rows([group("a", 1, 5, 1, 1, 1)], 6)) == [[("a", 1, [5])], [("a", 1, [1, 1, 1])]]
    assert split_into_rows([], 5) == []
    # what was one group is one again, wherever in the run it is
    assert lengths(split_into_rows([group("a", 2, 4), group("b", 1, 1, 1)], 18)) == [[("a", 2, [4]), ("b", 1, [1, 1])]]


def test_rows_that_are_not_padded_take_their_own_lengths() -> None:
    # rows of 4, 4 and 6: 14 together
    assert lengths(split_into_rows([group("a", 2, 2, 2, 4)], 14, padded=False)) == [[("a", 2, [2, 2, 4])]]
    assert lengths(split_into_rows([group("a", 2, 2, 2, 4)], 13, padded=False)) == [[("a", 2, [2, 2])], [("a", 2, [4])]]
    # each run begins empty: 4 + 3 fit in 7, 4 + 4 do not
    rows = [group("a", 2, 2, 1), group("b", 2, 2, 2)]
    assert lengths(split_into_rows(rows, 7, padded=False)) == [[("a", 2, [2, 1])], [("b", 2, [2])], [("b", 2, [2])]]
    assert lengths(split_into_rows(rows, 8, padded=False)) == [[("a", 2, [2, 1])], [("b", 2, [2, 2])]]


def test_groups_of_one_trajectory_are_never_cut_from_each_other_nor_dealt_to_two_ranks() -> None:
    rows = [replace(group(name, 1, 2, 2), trajectory="x") for name in "abc"]
    groups = [group("d", 1, 1), *rows, replace(group("e", 1, 1), trajectory="y"), group("f", 1, 1)]
    names = [[one.group_id for one in part] for part in split_into_micro_batches(groups, 4)]
    assert names == [["d"], ["a", "b", "c"], ["e", "f"]]
    assert [[one.group_id for one in part] for part in split_into_rows(groups, 3)] == [
        ["d"],
        ["a", "b", "c"],
        ["e"],
        ["f"],
    ]
    assert [[one.group_id for one in part] for part in balance(groups, 2)] == [["a", "b", "c"], ["d", "e", "f"]]
    same = rows[0].prompt_tokens  # groups of a trajectory are kept apart where they share a prompt
    joined = split_into_rows([rows[0], replace(rows[1], prompt_tokens=same)], 9)
    assert lengths(joined) == [[("a", 1, [2, 2]), ("b", 1, [2, 2])]]


def test_the_normalizer_is_at_least_1() -> None:
    assert [loss_normalizer(kind, 0, 0, 8) for kind in ("token", "sequence", "constant")] == [1.0] * 3  # type: ignore[arg-type]
    assert loss_normalizer("token", 1, 9, 8) == 1.0 and loss_normalizer("token", 2, 9, 8) == 2.0
    assert loss_normalizer("sequence", 9, 2, 8) == 2.0 and loss_normalizer("constant", 9, 2, 8) == 16.0
