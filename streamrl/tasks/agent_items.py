"""The items of an agent task: the rows of a file, what a user's function makes of a number and a seed, or
the number and the seed themselves, of which an environment makes its own.

An item is the mapping that the agent gets as `task`. It always has a text `prompt`, which names the episode in rollouts
and reports; whatever else it has is the agent's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from streamrl.config.tasks import AgentTask
from streamrl.errors import RunFailed, UserError
from streamrl.rollouts.plain_text import plain_text
from streamrl.rollouts.seeds import derive_seed
from streamrl.tasks.files import load_records, plain, unsendable
from streamrl.tasks.task_items import TaskItems, digest_of
from streamrl.tasks.user_functions import import_ordinary

CACHED = 64
"""Items kept: an item is asked for its text and for the rest."""


class AgentItems(TaskItems):
    """The items of one agent task."""

    def __init__(self, task: AgentTask, seed: int) -> None:
        """Read the file, or import the function and make its first item.

        Raises:
            UserError: the file or a row is wrong, or the function or its first item.
        """
        self.key = task.key
        self.count = task.count
        self._rows: list[dict[str, Any]] = []
        self.item: Callable[[int], dict[str, Any]]
        if task.items is None and task.path is None:  # the environment makes its own
            self.base = derive_seed(seed, task.key)
            self.item = self._seeded
            return
        if task.items is None:
            self._rows = load_records(task)
            self.count = len(self._rows)
            self.item = self._rows.__getitem__
            return
        self._spec = f"items {task.items!r}"
        self._function = _items_function(task)
        self.base = derive_seed(seed, task.key)
        self.item = lru_cache(CACHED)(self._make_item)
        try:
            self.item(0)
        except RunFailed as error:
            raise UserError(str(error)) from error

    def question(self, index: int) -> str:
        """Return the text `prompt` of item `index`."""
        return str(self.item(index)["prompt"])

    def reward_input(self, index: int) -> dict[str, Any]:
        """Return item `index`, as the agent gets it."""
        return self.item(index)

    def digest(self) -> str:
        """Return a digest of the file's rows; '': there is no file."""
        return digest_of(self._rows) if self._rows else ""

    def _seeded(self, index: int) -> dict[str, Any]:
        """Return the item of an environment that makes its own from a number or a seed."""
        return {"prompt": f"{self.key} {index}", "index": index, "seed": self.base + index}

    def _make_item(self, index: int) -> dict[str, Any]:
        """Call the user's function.

        Raises:
            RunFailed: it raised, or returned something other than an item.
        """
        try:
            found = self._function(index, self.base + index)
            return _checked(found)
        except Exception as error:
            reason = str(error) if isinstance(error, _NoItem) else f"{type(error).__name__}: {error}"
            raise RunFailed(f"task {self.key!r}: {self._spec}: item {index}: {reason}") from error


class _NoItem(Exception):
    """Something else than an item."""


def _items_function(task: AgentTask) -> Callable[[int, int], Any]:
    assert task.items is not None
    whose = f"task {task.key!r}: items {task.items!r}"
    found: Callable[[int, int], Any] = import_ordinary(task.items, whose, "f(index, seed)", 0, 0)
    return found


def _checked(found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise _NoItem(f"expected a mapping with a text `prompt`, got {type(found).__name__}")
    prompt = found.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        got = "none" if "prompt" not in found else "an empty one" if isinstance(prompt, str) else type(prompt).__name__
        raise _NoItem(f"expected a text `prompt`, got {got}")
    item: dict[str, Any] = {}
    for name, value in found.items():
        if not isinstance(name, str):
            raise _NoItem(f"expected texts as keys, got {name!r}")
        try:
            item[plain_text(name)] = plain(value)
        except TypeError as error:
            raise _NoItem(f"{name!r}: {error}") from error
    if reason := unsendable(item):
        raise _NoItem(reason)
    return item
