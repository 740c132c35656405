"""A taskset of verifiers, as prime-rl's reverse-text: say a text backwards; the reward is how similar the answer is.

streamrl env add reverse_text verifiers --make verifiers:reverse_text --path examples/environments
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Iterator

import verifiers.v1 as vf


class ReverseTextData(vf.TaskData):
    """A text and what it is backwards."""

    answer: str = ""


class ReverseTextTask(vf.Task[ReverseTextData]):
    """Scored by difflib's ratio of matching characters, 0 to 1."""

    @vf.reward(weight=1.0)
    async def similarity(self, trace: vf.Trace) -> float:
        """Compare the last answer with the text backwards."""
        return difflib.SequenceMatcher(None, trace.last_reply.strip(), self.data.answer).ratio()


class ReverseTextConfig(vf.TasksetConfig):
    """How many texts, of how many letters."""

    num_tasks: int = 200
    letters: int = 5


class ReverseTextTaskset(vf.Taskset[ReverseTextTask, ReverseTextConfig]):
    """Texts of random letters, the same ones each time."""

    def load(self) -> Iterator[ReverseTextTask]:
        """Yield the tasks."""
        draw = random.Random(0)
        for _ in range(self.config.num_tasks):
            text = "".join(draw.choice("abcdefgh") for _ in range(self.config.letters))
            prompt = f"Say it backwards, and nothing else: {text}"
            yield ReverseTextTask(ReverseTextData(prompt=prompt, answer=text[::-1]), self.config.task)


__all__ = ["ReverseTextTaskset"]
