"""A simulator as text: the model drives a MuJoCo walker with one word per turn, and each word is held for a while.

    streamrl env add walker "gymnasium[mujoco]" --make walker:make --path examples/environments
    streamrl env test walker

A turn simulates `hold` steps, which cost real CPU time (some milliseconds to seconds, as `hold` says).
"""

from __future__ import annotations

import random
from typing import Any

import gymnasium
import numpy as np

WORDS = ("push", "rest", "lift", "fold")


class Walker:
    """Walker2d of gymnasium; the reward of a turn is how far it came, in metres."""

    def __init__(self, hold: int) -> None:
        self.hold = hold
        self.env = gymnasium.make("Walker2d-v5", terminate_when_unhealthy=False, max_episode_steps=10**6)
        size = int(np.prod(self.env.action_space.shape or ()))
        draw = np.random.default_rng(0)
        self.torques = {word: draw.uniform(-0.5, 0.5, size) * (word != "rest") for word in WORDS}

    def reset(self, item: dict[str, Any]) -> str:
        """Begin an episode from the item's seed."""
        seen, _ = self.env.reset(seed=item["seed"] % 2**31)
        return f"You drive a walking robot. Answer with one word: {', '.join(WORDS)}.\n{self.told(seen)}"

    def step(self, text: str) -> tuple[str, float, bool, dict[str, float]]:
        """Hold the torques of a word."""
        word = next((one for one in WORDS if one in text.lower()), "rest")
        before, seen = self.place(), None
        for _ in range(self.hold):
            seen = self.env.step(self.torques[word])[0]
        return self.told(seen), self.place() - before, False, {"simulated": self.hold}

    def place(self) -> float:
        """Return how far it is, in metres."""
        return float(self.env.unwrapped.data.qpos[0])  # type: ignore[attr-defined]

    def told(self, seen: Any) -> str:
        """Return what the model is told."""
        return f"height {seen[0]:.2f}, angle {seen[1]:.2f}, speed {seen[8]:.2f}"

    def random_answer(self, draw: random.Random) -> str:
        """Return an answer for `streamrl env test`."""
        return draw.choice(WORDS)

    def close(self) -> None:
        """Release the simulator."""
        self.env.close()


def make(config: dict[str, Any]) -> Walker:
    """Make the environment; `hold`: simulator steps of a turn."""
    return Walker(int(config.get("hold", 200)))
