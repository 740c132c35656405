"""An environment of your own, without any package: walk a corridor to its door.

streamrl env add corridor --make corridor:make --path examples/environments
streamrl env test corridor
"""

from __future__ import annotations

import random
from typing import Any


class Corridor:
    """A corridor with a door at one end; the player begins somewhere and says left or right."""

    def __init__(self, length: int) -> None:
        self.length = length

    def reset(self, item: dict[str, Any]) -> str:
        """Begin an episode: where the door is and where the player stands follows from the item's seed."""
        draw = random.Random(item["seed"])
        self.door = draw.choice([0, self.length - 1])
        self.place = draw.randrange(1, self.length - 1)
        return f"You are in a corridor with a door D. Answer with one word, left or right.\n{self.seen()}"

    def step(self, text: str) -> tuple[str, float, bool]:
        """Move as the answer says; reaching the door is worth 1, and every step costs 0.02."""
        words = text.lower().split()
        if ("left" in words) == ("right" in words):
            return "Answer with one word, left or right.", -0.02, False
        self.place += -1 if "left" in words else 1
        self.place = min(max(self.place, 0), self.length - 1)
        there = self.place == self.door
        return self.seen(), 1.0 if there else -0.02, there

    def seen(self) -> str:
        """Return what the player sees."""
        return "".join("@" if n == self.place else "D" if n == self.door else "." for n in range(self.length))

    def random_answer(self, draw: random.Random) -> str:
        """Return an answer for `streamrl env test`."""
        return draw.choice(["left", "right"])


def make(config: dict[str, Any]) -> Corridor:
    """Make the environment."""
    return Corridor(int(config.get("length", 7)))
