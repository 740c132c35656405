"""The tool task of agent_trl.py: a sum that the model may have a calculator compute, the same for both systems."""

from __future__ import annotations

import json
import random
import re
from typing import Any

from streamrl.agents.client import BadToolInput
from streamrl.agents.example_tools import calculate as compute
from streamrl.agents.tools import answer_calls, function_tool

TURNS = 3
"""Most answers of the model in an episode."""
SHOWN = ((31, 4), (58, 77))
"""Sums whose solution the conversation begins with."""


class Calculator:
    """An environment as TRL takes it: every public method but `reset` is a tool."""

    def __init__(self) -> None:
        self.computed = 0
        """Expressions that were computed in this episode."""

    def reset(self, **_: Any) -> None:
        """Begin an episode."""
        self.computed = 0

    def calculate(self, expression: str) -> str:
        """Compute an arithmetic expression.

        Args:
            expression: The expression.
        """
        try:
            found = compute(expression)
        except BadToolInput as error:
            return f"error: {error}"
        self.computed += 1
        return found


SCHEMA = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Compute an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "The expression."}},
            "required": ["expression"],
        },
        "return": {"type": "string"},
    },
}
"""The tool as TRL describes `Calculator.calculate` to the model."""


def question(a: int, b: int) -> dict[str, Any]:
    """Ask for a sum."""
    return {"role": "user", "content": f"What is {a} + {b}?"}


def conversation(a: int, b: int) -> list[dict[str, Any]]:
    """Begin an episode: sums that the calculator has solved, and the one to solve."""
    messages = []
    for number, (c, d) in enumerate(SHOWN):
        function = {"name": "calculate", "arguments": json.dumps({"expression": f"{c} + {d}"})}
        call = {"id": f"shown_{number}", "type": "function", "function": function}
        messages += [
            question(c, d),
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "calculate", "tool_call_id": call["id"], "content": str(c + d)},
            {"role": "assistant", "content": f"The answer is {c + d}."},
        ]
    return [*messages, question(a, b)]


def item(index: int, seed: int) -> dict[str, Any]:
    """Draw a sum."""
    draw = random.Random(seed)
    a, b = draw.randint(100, 999), draw.randint(100, 999)
    return {"prompt": f"{a} + {b}", "a": a, "b": b}


def reward(computed: int, last: dict[str, Any], answer: int) -> float:
    """Return 0.2 for a call that was computed, and 0.8 for the right answer in words."""
    numbers = re.findall(r"\d+", str(last.get("content") or ""))
    return 0.2 * (computed > 0) + 0.8 * (last["role"] == "assistant" and numbers[-1:] == [str(answer)])


async def run(task: dict[str, Any], client: Any) -> dict[str, float]:
    """Play an episode as an agent of this system."""
    environment = Calculator()
    tool = function_tool(environment.calculate)
    messages, turns = conversation(task["a"], task["b"]), 0
    while turns < TURNS:
        turns += 1
        messages.append(await client.chat(messages, tools=[SCHEMA]))
        if turns == TURNS or not (answers := await answer_calls(client, [tool], messages[-1])):
            break
        messages += answers
    score = reward(environment.computed, messages[-1], task["a"] + task["b"])
    return {"reward": score, "turns": turns, "computed": environment.computed}
