"""An agent of many turns: the model guesses a number, and is told after each guess whether it is higher or lower."""

from __future__ import annotations

import random
import re
from typing import Any

HIGHEST, GUESSES = 20, 5
QUESTION = f"I think of a whole number from 1 to {HIGHEST}. Guess it. Answer with one number and nothing else."


def item(index: int, seed: int) -> dict[str, Any]:
    """Make a number to guess."""
    return {"prompt": QUESTION, "number": random.Random(seed).randint(1, HIGHEST)}


def hint(answer: str, number: int) -> tuple[str, float]:
    """Return what the guesser is told, and a score: 1 for the number, up to 0.5 for one that is near."""
    found = re.findall(r"\d+", answer)
    if not found:
        return "That is no number. Answer with one number.", 0.0
    guess = int(found[-1][:9])
    if guess == number:
        return "Right.", 1.0
    direction = "higher" if guess < number else "lower"
    return f"My number is {direction} than {guess}. Guess again.", 0.5 * max(0.0, 1 - abs(guess - number) / HIGHEST)


async def run(task: dict[str, Any], client: Any) -> dict[str, float]:
    """Play until the number is found or the guesses are used up; an earlier hit earns more."""
    messages = [{"role": "user", "content": task["prompt"]}]
    for guesses in range(1, GUESSES + 1):
        messages.append(await client.chat(messages))
        said, score = hint(messages[-1]["content"], task["number"])
        if score == 1.0:
            return {"reward": 1.0 - 0.1 * (guesses - 1), "guesses": guesses, "found": 1.0}
        messages.append({"role": "user", "content": said})
    return {"reward": score, "guesses": GUESSES, "found": 0.0}
