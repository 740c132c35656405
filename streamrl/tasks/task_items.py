"""The prompts of one task by number: what the items of every kind of task have."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from streamrl.config.tasks import Task

PromptMessage = dict[str, str]
"""A chat message: `role` and `content`."""


class TaskItems(ABC):
    """The items of a task, numbered from 0; `(task, run's seed)` makes them."""

    base: int = 0
    """Added to an item's number in prompt ids."""
    count: int | None = None
    """Number of different items; None: unlimited."""
    problem: str = ""
    """Why no completion of some item can get the reward, for which no new run starts; '': nothing is known."""

    @abstractmethod
    def question(self, index: int) -> str:
        """Return the text of item `index`, without the task's suffix."""

    @abstractmethod
    def reward_input(self, index: int) -> dict[str, Any]:
        """Return what the verifier or the agent gets with a completion of item `index`: plain values only."""

    def earlier(self, index: int) -> tuple[PromptMessage, ...]:
        """Return the messages before the user's of item `index`."""
        return ()

    def digest(self) -> str:
        """Return a digest of all items, read from a file, in order; '': they are made."""
        return ""


class ScoredItems(TaskItems):
    """Items that come with their verifier."""

    @abstractmethod
    def score(self, completion: str, reward_input: dict[str, Any]) -> float:
        """Return the reward of a completion."""


def digest_of(rows: Iterable[Any]) -> str:
    """Return a digest of rows of plain values, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(json.dumps(row, default=str).encode() + b"\n")
    return digest.hexdigest()


def with_suffix(question: str, suffix: str) -> str:
    """Return the user's message: the question, with the suffix on a line of its own."""
    return f"{question}\n{suffix}" if suffix else question


def items_of(task: Task, seed: int) -> TaskItems:
    """Make the items of a task.

    Raises:
        UserError: a file or a setting of the task is wrong.
    """
    module, _, name = task.items_class.partition(":")
    made: TaskItems = getattr(import_module(module), name)(task, seed)
    return made
