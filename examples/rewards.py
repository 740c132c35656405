"""Reward functions of examples/own_reward.yaml: one call scores one completion."""

from __future__ import annotations

from decimal import Decimal

from streamrl.tasks.answers import last_number


def right_and_short(completion: str, *, prompt: str, answer: object) -> float:
    """Return 1 if the last numbers of completion and answer are equal, less 0.001 for each of its characters.

    Args:
        completion: the model's text, without special tokens.
        prompt: the user's message, with the task's suffix.
        answer: the value of the answer column: a number, or a text whose last number counts.
    """
    found, right = last_number(completion), last_number(str(answer))
    return float(found is not None and right is not None and Decimal(found) == Decimal(right)) - 0.001 * len(completion)
