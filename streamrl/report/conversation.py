"""An episode as text for people: who said what, which tokens were trained, and how long each step took."""

from __future__ import annotations

import json
from typing import Any


def conversation_text(told: str) -> str:
    """Return the messages and steps of an episode, one after the other.

    Args:
        told: the column `conversation` of its rollouts.

    Raises:
        ValueError, KeyError, TypeError: it is no such column.
    """
    value = json.loads(told)
    parts = [f"[{message['role']}] {_content(message)}".rstrip() for message in value["messages"]]
    steps = [_step(step) for step in value["steps"]]
    return "\n\n".join([*parts, *(["\n".join(["[steps]", *steps])] if steps else [])])


def _content(message: dict[str, Any]) -> str:
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or ()]
    return "\n".join([str(message.get("content") or ""), *(f"-> {call}" for call in calls)]).strip()


def _step(step: dict[str, Any]) -> str:
    tokens = f", {step['tokens']} tokens" if step["tokens"] else ""
    detail = f": {step['detail']}" if step["detail"] else ""
    return f"{step['kind']} {step['name']}, {step['finished'] - step['started']:.2f} s{tokens}{detail}"
