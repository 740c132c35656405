"""Reward functions of examples/own_reward.yaml: one call scores one completion."""

from __future__ import annotations

import re
from decimal import Decimal

NUMBER = re.compile(r"-?\d+(?:,\d{3}(?!\d))*(?:\.\d+)?(?:[eE][+-]?\d{1,3})?")


def last_number(text: str) -> Decimal | None:
    """Return the last number of a text, such as 1234.5 of "#### 1,234.50"; None: it has none."""
    numbers = NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def right_and_short(completion: str, *, prompt: str, answer: object) -> float:
    """Return 1 if the last numbers of completion and answer are equal, less 0.001 for each of its characters.

    Args:
        completion: the model's text, without special tokens.
        prompt: the user's message, with the task's suffix.
        answer: the value of the answer column: a number, or a text whose last number counts.
    """
    found = last_number(completion)
    return float(found is not None and found == last_number(str(answer))) - 0.001 * len(completion)
