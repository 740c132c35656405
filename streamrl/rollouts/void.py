"""Void rewards: a sample whose reward could not be determined has none; it is not given a 0 that nobody has judged.

A void sample keeps its place in the ledger and the rollouts, but is in no mean, deviation, advantage or loss. A failure
that the policy itself has caused is no void: a program that a completion contains and that loops, crashes or uses too
much memory in its sandbox is scored as the task says (usually 0).
"""

from __future__ import annotations

import math
import numbers
import reprlib
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Any

MOST_REWARD = 1e12
"""Largest reward, above and below 0; the squares of far larger ones overflow, which would make advantages 0."""
LONGEST_TEXT = 1000
"""Most characters of a failure in one line."""
LONGEST_TRACEBACK = 2000
"""Most characters of a traceback, its end, that comes with a failure."""


class VoidCause(StrEnum):
    """What failed, so that a reward is void."""

    PROVIDER = "provider"
    """A service that the reward asked (a judge model, an API) refused, failed, or could not be reached."""
    VERIFIER = "verifier"
    """The reward function raised, or returned something that is no reward (`wrong_with_reward`)."""
    SANDBOX = "sandbox"
    """The sandbox did not start the program that it was to run."""
    TOOL = "tool"
    """A tool that the reward uses failed; only a reward function can name this cause."""
    ENVIRONMENT = "environment"
    """The machine failed (memory, disk, a missing package), or the environment that the completion acts in."""
    TIMEOUT = "timeout"
    """The reward took longer than `deadlines.reward_s`, or a wait inside of it expired."""
    CRASH = "crash"
    """The process that computed the reward died."""
    GENERATION = "generation"
    """No site could generate the sample in a form that can be used, so there is nothing to judge."""


def wrong_with_reward(value: float) -> str | None:
    """Return why a number cannot be a reward, to follow its name in a sentence, or None."""
    if not math.isfinite(value):
        return f"must be finite, got {value}"
    return None if abs(value) <= MOST_REWARD else f"must be between {-MOST_REWARD:g} and {MOST_REWARD:g}, got {value:g}"


@dataclass(frozen=True)
class Void:
    """Why a reward is void."""

    cause: VoidCause
    text: str
    """The failure in one line; what exceeds `LONGEST_TEXT` is cut off."""

    def __post_init__(self) -> None:
        """Cut the text."""
        object.__setattr__(self, "text", self.text[:LONGEST_TEXT])


def real_number(value: Any) -> float:
    """Return a real number of Python, a `Decimal`, or a scalar of numpy or torch as a float.

    One of hundreds of digits, which no float can be, is infinity, whatever its sign.

    Raises:
        TypeError: it is something else; the text says what, to follow what was expected.
    """
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, Decimal) and value.is_nan():  # no float is a signaling one
        return math.nan
    if not isinstance(value, numbers.Real | Decimal):
        raise TypeError(f"got {type(value).__name__} {reprlib.repr(value)}")
    try:
        return float(value)
    except OverflowError:
        return math.inf
