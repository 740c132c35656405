"""What a group of the trainer counts, and when it is complete."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from streamrl.rollouts.train_groups import TrainGroup, TrainSequence, has_experts
from tests.rollouts.test_micro_batch import group


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


def test_the_experts_of_a_group_are_those_of_its_prompt_and_of_every_completion() -> None:
    prompt, rows = np.zeros((3, 2), np.uint8), np.zeros((1, 2), np.uint8)
    plain = group("a", 3, 2, 2)
    with_experts = [replace(seq, experts=rows) for seq in plain.sequences]
    assert has_experts(replace(plain, sequences=with_experts, prompt_experts=prompt)) is True
    assert has_experts(replace(plain, sequences=with_experts)) is False
    assert has_experts(replace(plain, prompt_experts=prompt)) is False
    assert has_experts(replace(plain, sequences=[with_experts[0], plain.sequences[1]], prompt_experts=prompt)) is False
