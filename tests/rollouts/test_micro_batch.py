"""Cutting groups into micro-batches and ranks' shares, and their wire form: exact cases, and limits hit exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streamrl.rollouts.micro_batch import (
    TrainGroup,
    TrainSequence,
    from_wire,
    loss_normalizer,
    split_into_micro_batches,
    split_into_rows,
    to_wire,
)
from streamrl.rollouts.rank_shares import balance


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


def test_a_group_counts_its_prompt_once() -> None:
    one = group("a", 3, 4, 5, 0)
    assert one.tokens == 12 and one.loss_tokens == 9


def test_the_squares_of_attention_by_hand() -> None:
    # 3^2 of the prompt; 4^2 + 2 x 3 x 4 and 5^2 + 2 x 3 x 5 of the completions
    assert group("a", 3, 4, 5, 0).squares == 9 + 40 + 55


def test_a_group_has_its_reference_if_every_completion_with_tokens_has() -> None:
    known = np.zeros(2, np.float32)
    pair, empty = np.zeros(2, np.int32), np.zeros(0, np.int32)
    has = [TrainSequence(pair, known, 0.0, known), TrainSequence(empty, known[:0], 0.0)]
    assert TrainGroup("a", pair, has).has_reference
    assert not TrainGroup("a", pair, [*has, TrainSequence(pair, known, 0.0)]).has_reference


def test_a_group_has_its_estimates_if_every_completion_with_tokens_has() -> None:
    pair, empty = np.zeros(2, np.int32), np.zeros(0, np.int32)
    logprobs, estimates = np.zeros(2, np.float32), np.zeros((2, 3), np.float32)
    has = [TrainSequence(pair, logprobs, 0.0, estimates=estimates), TrainSequence(empty, logprobs[:0], 0.0)]
    assert TrainGroup("a", pair, has).has_estimates is True
    assert TrainGroup("a", pair, [*has, TrainSequence(pair, logprobs, 0.0)]).has_estimates is False


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


def referenced() -> list[TrainGroup]:
    """Two groups; the second of three completions has reference log-probabilities, as has the third, with estimates."""
    first, second = group("a", 2, 3, 2), group("b", 1, 1)
    known = [np.asarray([-3.0, -4.0], np.float32), np.asarray([-7.0], np.float32)]
    with_reference = [
        TrainSequence(seq.completion_tokens, seq.logprobs, seq.advantage, reference)
        for seq, reference in zip((first.sequences[1], second.sequences[0]), known, strict=True)
    ]
    estimated = replace(with_reference[1], estimates=np.asarray([[1.0, 2.0, 3.0]], np.float32))
    return [
        TrainGroup("a", first.prompt_tokens, [first.sequences[0], with_reference[0]]),
        TrainGroup("b", second.prompt_tokens, [estimated]),
    ]


def test_the_wire_form_written_out_and_back() -> None:
    body, arrays = to_wire(referenced())
    assert body == {
        "groups": [["a", 2, [3, 2]], ["b", 1, [1]]],
        "advantages": [0.0, 1.0, 0.0],
        "has_reference": [False, True, True],
        "has_estimates": [False, False, True],
        "has_mask": [False, False, False],
        "trajectories": ["", ""],
        "trajectory_tokens": [None, None, None],
        "has_experts": [False, False],
    }
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "prompts": [0, 1, 0],
        "completions": [0, 1, 2, 0, 1, 0],
        "logprobs": [-0.5] * 6,
        "reference_logprobs": [-3.0, -4.0, -7.0],
        "estimates": [[1.0, 2.0, 3.0]],
        "masks": [],
        "experts": [],
    }
    assert [str(array.dtype) for array in arrays.values()] == ["int32", "int32", *["float32"] * 3, "uint8", "uint8"]
    back = from_wire(body, arrays)
    assert lengths([back]) == [[("a", 2, [3, 2]), ("b", 1, [1])]]
    again = to_wire(back)
    assert again[0] == body and all(np.array_equal(array, again[1][name]) for name, array in arrays.items())
    assert from_wire(*to_wire([])) == []
    assert lengths([from_wire(*to_wire([group("a", 1, 0, 2)]))]) == [[("a", 1, [0, 2])]]


def empty_twice(body: dict[str, Any], arrays: dict[str, Any]) -> None:
    body["groups"][1][2].append(0)


def negative(body: dict[str, Any], arrays: dict[str, Any]) -> None:
    body["groups"] = [["a", 4, [3, 2]], ["b", -1, [1]]]


def negative_completion(body: dict[str, Any], arrays: dict[str, Any]) -> None:
    body["groups"], body["has_reference"] = [["a", 2, [7, 2]], ["b", 1, [-3]]], [False, False, False]
    arrays["reference_logprobs"] = arrays["reference_logprobs"][:0]


def one_more(name: str) -> Any:
    def change(body: dict[str, Any], arrays: dict[str, Any]) -> None:
        arrays[name] = np.append(arrays[name], arrays[name][:1], axis=0)

    return change


def one_advantage_less(body: dict[str, Any], arrays: dict[str, Any]) -> None:
    body["advantages"].pop()


def one_trajectory_more(body: dict[str, Any], arrays: dict[str, Any]) -> None:
    body["trajectories"].append("x")


def one_length_less(body: dict[str, Any], arrays: dict[str, Any]) -> None:
    body["trajectory_tokens"].pop()


@pytest.mark.parametrize(
    "change", [one_trajectory_more, one_length_less, one_advantage_less, empty_twice, negative, negative_completion]
)
def test_a_body_that_is_none_is_refused(change: Any) -> None:
    body, arrays = to_wire(referenced())
    change(body, arrays)
    with pytest.raises(ValueError):
        from_wire(body, arrays)


@pytest.mark.parametrize("name", ["prompts", "completions", "logprobs", "reference_logprobs", "estimates"])
def test_arrays_that_do_not_add_up_are_refused(name: str) -> None:
    body, arrays = to_wire(referenced())
    one_more(name)(body, arrays)
    with pytest.raises(ValueError, match=r"do not add up|are not those of its tokens"):
        from_wire(body, arrays)
