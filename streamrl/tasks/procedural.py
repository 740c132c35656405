"""Reasoning-gym tasks as sequences of items that can be read in any order and in any process.

Items come in chunks of `CHUNK`: chunk c is the data set with seed `base + c * CHUNK` and that many items.
Nearly all data sets draw item i from `Random(seed + i)`, so this is one unbroken sequence without repeats;
the few that prepare every item when they are made (acre, gsm_symbolic) prepare one chunk at a time.

The prompt source and the reward workers each build the data set and exchange item numbers only: metadata may hold
tuples, sets, fractions or numpy values that no wire format keeps exactly. The question's checksum is sent along,
because some data sets (ransom_note, isomorphic_strings, polynomial_multiplication) depend on Python's string hashing:
processes that must see the same items need the same PYTHONHASHSEED.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import io
import random
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from streamrl.config.tasks import MOST_ITEMS, ReasoningGymTask
from streamrl.errors import RunFailed, UserError
from streamrl.rollouts.seeds import derive_seed
from streamrl.tasks.answers import EXTRACTORS
from streamrl.tasks.extras import import_extra
from streamrl.tasks.task_items import ScoredItems

CHUNK = 1000
CACHED_CHUNKS = 4
CACHED_ENTRIES = 64  # a group's samples are scored one after another, from one cached entry


class ProceduralItems(ScoredItems):
    """The items of one reasoning-gym task; `config.size` makes them finite (then they repeat in epochs)."""

    def __init__(self, task: ReasoningGymTask, seed: int) -> None:
        """Check name and settings, and make the first item.

        Raises:
            UserError: no such data set, or it refuses its settings.
        """
        _check(task)
        self.key = task.key
        self.base = derive_seed(seed, task.key)
        self._name = task.name
        self._extract = EXTRACTORS[task.answer]
        self._config = {name: value for name, value in task.config.items() if name != "size"}
        self.count = task.config.get("size")
        self._chunk = lru_cache(CACHED_CHUNKS)(self._make_chunk)
        self.entry = lru_cache(CACHED_ENTRIES)(self._make_entry)
        try:
            self._chunk(0)
            question = self._draw(0)["question"]
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise UserError(f"task {task.key!r}: reasoning-gym's {task.name} refuses its config: {reason}") from error
        if not isinstance(question, str):
            raise UserError(f"task {task.key!r}: reasoning-gym's {task.name} does not ask in text")

    def question(self, index: int) -> str:
        """Return the question of item `index`."""
        return str(self.entry(index)["question"])

    def reward_input(self, index: int) -> dict[str, Any]:
        """Return what a reward worker needs to find the item again."""
        return {"index": index, "check": _checksum(self.question(index))}

    def score(self, completion: str, reward_input: dict[str, Any]) -> float:
        """Return the verifier's reward of the completion's answer, usually in [0, 1]; no answer gets 0.

        Raises:
            RuntimeError: the item's question differs from the one in the process that issued the prompt.
        """
        entry = self.entry(reward_input["index"])
        if _checksum(entry["question"]) != reward_input["check"]:
            raise RuntimeError(
                f"item {reward_input['index']} of {self._name} is another question here than where it was "
                "asked: start every process with PYTHONHASHSEED=0 and the same version of reasoning-gym"
            )
        answer = self._extract(completion)
        if answer is None:
            return 0.0
        reward: float = self._chunk(reward_input["index"] // CHUNK).score_answer(answer, entry)
        return reward

    def _make_chunk(self, number: int) -> Any:
        first = number * CHUNK
        size = CHUNK if self.count is None else min(CHUNK, self.count - first)
        gym = import_extra("reasoning_gym", f"task {self.key!r}")
        return gym.create_dataset(self._name, seed=(self.base + first) % 2**32, size=size, **self._config)

    def _make_entry(self, index: int) -> dict[str, Any]:
        try:
            return self._draw(index)
        except Exception as error:
            raise RunFailed(f"reasoning-gym's {self._name} failed to make item {index} ({error!r})") from error

    def _draw(self, index: int) -> dict[str, Any]:
        with _seeded_globals(self.base + index), contextlib.redirect_stdout(io.StringIO()):
            entry: dict[str, Any] = self._chunk(index // CHUNK)[index % CHUNK]
        return entry


@contextlib.contextmanager
def _seeded_globals(seed: int) -> Iterator[None]:
    """Seed the global random generators for a while: some items of list_functions and codeio draw from them."""
    before, before_numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(before_numpy)


def _checksum(question: str) -> str:
    return hashlib.sha256(question.encode(errors="surrogatepass")).hexdigest()[:8]


def _check(task: ReasoningGymTask) -> None:
    size = task.config.get("size")
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MOST_ITEMS):
        raise UserError(
            f"task {task.key!r}: config.size must be a whole number from 1 to {MOST_ITEMS}, got {size!r:.60}; left "
            "out, items never end"
        )
    factory = import_extra("reasoning_gym.factory", f"task {task.key!r}")
    if task.name == "composite":
        raise UserError(f"task {task.key!r}: list the parts of a composite as tasks of their own, with weights")
    if task.name not in factory.DATASETS:
        raise UserError(
            f"task {task.key!r}: reasoning-gym has no data set {task.name!r}"
            + nearest(task.name, list(factory.DATASETS))
        )
    if "seed" in task.config:
        raise UserError(f"task {task.key!r}: config.seed is not allowed; the run's seed chooses the items")
    allowed = [field.name for field in dataclasses.fields(factory.DATASETS[task.name][1]) if field.name != "seed"]
    for name in task.config:
        if name not in allowed:
            raise UserError(
                f"task {task.key!r}: {task.name} has no setting config.{name}{nearest(name, allowed)} "
                f"(it has {', '.join(allowed)})"
            )


def nearest(name: str, known: list[str]) -> str:
    """Return ' (did you mean ...?)', or '' if no name is close."""
    close = difflib.get_close_matches(name, known, n=3)
    return f" (did you mean {' or '.join(close)}?)" if close else ""
