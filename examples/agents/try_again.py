"""An agent for the small reasoner: it answers a sum in tags, and is asked again as long as the answer is not right."""

from __future__ import annotations

import random
from typing import Any

QUESTION = "State the final answer to the following arithmetic problem: "
TRIES = 3


def item(index: int, seed: int) -> dict[str, Any]:
    """Draw a sum of three numbers of one digit."""
    draw = random.Random(seed)
    a, b, c = (draw.randint(1, 9) for _ in range(3))
    return {"prompt": f"{QUESTION}{a} + {b} + {c} =", "answer": a + b + c}


async def run(task: dict[str, Any], client: Any) -> dict[str, float]:
    """Ask until the tagged answer is right; each further try costs 0.3, and the reward is 0 after the last."""
    messages: list[dict[str, Any]] = []
    for tries in range(1, TRIES + 1):
        messages.append({"role": "user", "content": task["prompt"]})
        messages.append(await client.chat(messages))
        if messages[-1]["content"].rstrip().endswith(f"<answer>{task['answer']}</answer>"):
            return {"reward": 1.0 - 0.3 * (tries - 1), "tries": tries}
    return {"reward": 0.0, "tries": TRIES}
