"""The agent of agent_logprobs.py: it asks for one sentence after another, whatever the model answers."""

from __future__ import annotations

import random
from typing import Any

TURNS = 6
WORDS = ("rivers", "bread", "trains", "stars", "music", "rain", "paper", "horses", "islands", "glass", "winter", "maps")


def item(index: int, seed: int) -> dict[str, Any]:
    """Draw what the sentences are about."""
    return {"prompt": "Say short sentences.", "words": random.Random(seed).sample(WORDS, TURNS)}


async def run(task: dict[str, Any], client: Any) -> float:
    """Ask for a sentence about each word, in one conversation."""
    messages: list[dict[str, Any]] = []
    for word in task["words"]:
        messages.append({"role": "user", "content": f"Say one short sentence about {word}."})
        messages.append(await client.chat(messages))
    return float(len(messages[-1]["content"]))
