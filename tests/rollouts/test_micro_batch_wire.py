"""A micro-batch's wire form, written out and back; what is none is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streamrl.rollouts.micro_batch_wire import from_wire, to_wire
from streamrl.rollouts.train_groups import TrainGroup, TrainSequence
from streamrl.rollouts.types import ByteArray
from tests.rollouts.test_micro_batch import group, lengths


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
    assert arrays["experts"].shape == (0, 0)
    back = from_wire(body, arrays)
    assert lengths([back]) == [[("a", 2, [3, 2]), ("b", 1, [1])]]
    again = to_wire(back)
    assert again[0] == body and all(np.array_equal(array, again[1][name]) for name, array in arrays.items())
    assert from_wire(*to_wire([])) == []
    assert lengths([from_wire(*to_wire([group("a", 1, 0, 2)]))]) == [[("a", 1, [0, 2])]]


def with_experts() -> list[TrainGroup]:
    """Two groups with recorded experts, each row another byte, around one without; one completion has no tokens."""
    first, plain, last = group("a", 2, 3, 0, 1), group("b", 1, 2), group("c", 1, 2)
    rows = iter(np.arange(20, dtype=np.uint8).reshape(10, 2))

    def recorded(one: TrainGroup) -> TrainGroup:
        prompt = _rows(rows, len(one.prompt_tokens))
        sequences = [replace(seq, experts=_rows(rows, len(seq.completion_tokens) - 1)) for seq in one.sequences]
        return replace(one, sequences=sequences, prompt_experts=prompt)

    return [recorded(first), plain, recorded(last)]


def _rows(rows: Iterator[ByteArray], count: int) -> ByteArray:
    return np.asarray([next(rows) for _ in range(count)], np.uint8).reshape(-1, 2)


def test_experts_come_back_with_the_prompts_and_completions_that_have_some() -> None:
    groups = with_experts()
    body, arrays = to_wire(groups)
    assert body["has_experts"] == [True, False, True] and arrays["experts"].tolist() == [
        *([0, 1], [2, 3], [4, 5], [6, 7]),  # the prompt's two, and two of the completion of three tokens
        *([8, 9], [10, 11]),  # the other group's prompt and completion
    ]
    back = from_wire(body, arrays)
    for one, sent in zip(back, groups, strict=True):
        _assert_equal(one.prompt_experts, sent.prompt_experts)
        for seq, expected in zip(one.sequences, sent.sequences, strict=True):
            _assert_equal(seq.experts, expected.experts)


def _assert_equal(found: ByteArray | None, expected: ByteArray | None) -> None:
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.shape == expected.shape and np.array_equal(found, expected)


@pytest.mark.parametrize(
    "change", [lambda rows: rows.astype(np.float32), lambda rows: rows[:, 0], lambda rows: rows[1:]]
)
def test_experts_that_are_no_rows_of_bytes_or_too_few_are_refused(change: Any) -> None:
    body, arrays = to_wire(with_experts())
    with pytest.raises(ValueError, match="experts in a micro-batch are"):
        from_wire(body, arrays | {"experts": change(arrays["experts"])})


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
