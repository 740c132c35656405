"""A ReAct agent: the model may call a calculator before it answers."""

from __future__ import annotations

import random
import re
from typing import Any

from streamrl.agents.example_tools import CALCULATOR
from streamrl.agents.tools import answer_calls

MOST_CALLS = 4


def item(index: int, seed: int) -> dict[str, Any]:
    """Make a sum that needs a calculator."""
    draw = random.Random(seed)
    a, b, c = draw.randint(11, 99), draw.randint(11, 99), draw.randint(101, 999)
    return {"prompt": f"What is {a} * {b} + {c}? End with the number.", "answer": a * b + c}


async def run(task: dict[str, Any], client: Any) -> dict[str, float]:
    """Let the model call the calculator until it answers; a call earns a little, the right answer the rest."""
    messages = [{"role": "user", "content": task["prompt"]}]
    calls = 0
    for _ in range(MOST_CALLS):
        messages.append(await client.chat(messages, tools=[CALCULATOR.schema]))
        if not (answers := await answer_calls(client, [CALCULATOR], messages[-1])):
            break
        calls += len(answers)
        messages += answers
    numbers = re.findall(r"-?\d+", str(messages[-1]["content"]).replace(",", ""))
    right = messages[-1]["role"] == "assistant" and numbers[-1:] == [str(task["answer"])]
    return {"reward": 0.9 * right + 0.1 * (calls > 0), "calls": calls}
