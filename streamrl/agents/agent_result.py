"""What an agent returns at the end of an episode: a reward, or a mapping with the reward and further numbers."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any

from streamrl.rollouts.plain_text import plain_text
from streamrl.rollouts.trajectory import MOST_METRICS, MOST_NAME
from streamrl.rollouts.void import real_number, wrong_with_reward
from streamrl.tasks.void_reward import VoidReward


def outcome_of(found: Any) -> tuple[float, dict[str, float]]:
    """Return the reward and the metrics that an agent's result stands for.

    Raises:
        VoidReward: it is neither a reward (`wrong_with_reward`) nor a mapping of finite numbers with one.
    """
    if not isinstance(found, Mapping):
        return _reward(found), {}
    if "reward" not in found:
        raise VoidReward(text=f"the agent returned a mapping without `reward`: {reprlib.repr(dict(found))}")
    if len(found) - 1 > MOST_METRICS:
        text = f"there are {len(found) - 1} numbers beside the reward, at most {MOST_METRICS} are recorded"
        raise VoidReward(text=text)
    metrics = {
        plain_text(str(name), MOST_NAME): _finite(f"{name!r:.{MOST_NAME}}", value)
        for name, value in found.items()
        if name != "reward"
    }
    return _reward(found["reward"]), metrics


def _reward(value: Any) -> float:
    if (wrong := wrong_with_reward(number := _finite("the reward", value))) is not None:
        raise VoidReward(text=f"the reward {wrong}")
    return number


def _finite(name: str, value: Any) -> float:
    try:
        number = real_number(value)
    except TypeError as error:
        raise VoidReward(text=f"{name} must be a number, {error}") from None
    if not math.isfinite(number):
        raise VoidReward(text=f"{name} must be finite, got {number}")
    return number
