"""An episode as text for people: who said what, which tokens were trained, and how long each step took."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any


def conversation_text(told: str, metrics: Iterable[tuple[str, float]] = ()) -> str:
    """Return the messages, numbers and steps of an episode, one after the other.

    Args:
        told: the column `conversation` of its rollouts.
        metrics: the column `metrics`: what its agent returned beside the reward.

    Raises:
        ValueError, KeyError, TypeError, RecursionError: these are no such columns.
    """
    value = json.loads(told)
    parts = [f"[{message['role']}] {_content(message)}".rstrip() for message in value["messages"]]
    if numbers := [f"{name}: {number:g}" for name, number in metrics]:
        parts.append("\n".join(["[returned beside the reward]", *numbers]))
    steps = [_step(step) for step in value["steps"]]
    return "\n\n".join([*parts, *(["\n".join(["[steps]", *steps])] if steps else [])])


def _content(message: dict[str, Any]) -> str:
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or ()]
    return "\n".join([str(message.get("content") or ""), *(f"-> {call}" for call in calls)]).strip()


def _step(step: dict[str, Any]) -> str:
    tokens = f", {step['tokens']} tokens" if step["tokens"] else ""
    detail = f": {step['detail']}" if step["detail"] else ""
    return f"{step['kind']} {step['name']}, {step['finished'] - step['started']:.2f} s{tokens}{detail}"
