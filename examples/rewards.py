"""Reward functions of examples/own_reward.yaml: one call scores one completion."""

from __future__ import annotations

import re


def right_and_short(completion: str, *, prompt: str, answer: object) -> float:
    """Return 1 if the last number of a completion is the answer, less 0.001 for each of its characters.

    Args:
        completion: the model's text, without special tokens.
        prompt: the user's message, with the task's suffix.
        answer: the value of the answer column.
    """
    numbers = re.findall(r"-?\d+", completion)
    return float(bool(numbers) and numbers[-1] == str(answer)) - 0.001 * len(completion)
