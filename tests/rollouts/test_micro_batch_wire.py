"""A micro-batch's wire form, written out and back; what is none is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streamrl.rollouts.micro_batch_wire import from_wire, to_wire
from streamrl.rollouts.train_groups import TrainGroup, TrainSequence
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
