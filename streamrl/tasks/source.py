"""The numbered prompts of a run: prompt i depends on the tasks, the seed and i only, so a resumed run repeats them.

    index i --mix--> (task, its k-th prompt) --order--> (epoch, item)

`mix` interleaves the tasks by weight. A task without an end (reasoning-gym, an agent's `items`) takes item k; a finite
one (a file, reasoning-gym with `config.size`, `items` with `count`) takes its items in a new permutation each epoch,
without replacement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from streamrl.config.tasks import AgentTask, FileTask, Task
from streamrl.rollouts.seeds import derive_seed
from streamrl.tasks.task_items import PromptMessage, TaskItems, items_of, with_suffix

HALF = Fraction(1, 2)
MOST_PERMUTED = 1 << 24
"""Most items whose order of an epoch is made as a whole: it takes 8 bytes each."""
FEISTEL_ROUNDS = 4
"""Rounds that make a permutation look random: the fewest for which that is proven (Luby and Rackoff)."""


@dataclass(frozen=True)
class Prompt:
    """One prompt, with the input for scoring its completions."""

    prompt_id: str
    """Prompt id, 'task/item'. A file's item is its row (from 0); one that is made is the seed of its random generator,
    so that an id means the same question in runs with other seeds (as long as the task's settings are the same)."""
    task: str
    """Key of the task."""
    text: str
    """The user's message: the question and, on a line of its own, the task's suffix."""
    epoch: int
    """Number of earlier uses of this prompt (0: first time)."""
    reward_input: dict[str, Any]
    """Input of the verifier besides the completion, or of the agent; plain values, lists and dicts only."""
    agent: bool = False
    """Whether an agent leads an episode from `reward_input`."""
    earlier: tuple[PromptMessage, ...] = ()
    """Messages before the user's, where a row has several."""

    @property
    def messages(self) -> list[PromptMessage]:
        """All messages of the prompt, the user's last."""
        return [*self.earlier, {"role": "user", "content": self.text}]

    @property
    def shown(self) -> str:
        """The prompt for people and for the ranker: the user's message; of several, all with their roles."""
        if not self.earlier:
            return self.text
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in self.messages)


class TaskContent(TypedDict):
    """What a task with an end holds."""

    rows: int
    digest: str
    """Digest of all rows, in order; '': they are made."""


def mix(weights: Sequence[float], index: int) -> tuple[int, int]:
    """Return (task, k): the task of prompt `index`, and how many prompts that task had before.

    Task t's k-th prompt is due at time (k + 1/2) / weight[t]; prompts come in the order of these times (ties:
    first task first). So every stretch of the run holds each task in its share, to within about one prompt:
    weights 2, 1 give A B A A B A ... Arithmetic is exact, and the cost does not grow with the index.
    """
    shares = [Fraction(weight) for weight in weights]
    # everything due before this time is at most `index` prompts (each count is at most time * share + 1/2)
    time = max(Fraction(0), Fraction(index - len(shares)) / sum(shares))
    used = [max(0, math.ceil(time * share - HALF)) for share in shares]
    task = 0
    for _ in range(index - sum(used) + 1):
        task = min(range(len(shares)), key=lambda t: (used[t] + HALF) / shares[t])
        used[task] += 1
    return task, used[task] - 1


class PromptSource:
    """The prompts of a run by number. It reads every file once, and keeps only caches between calls."""

    def __init__(self, tasks: Sequence[Task], seed: int, read: Sequence[PromptSource] | None = None) -> None:
        """Open every task.

        Args:
            tasks: the tasks.
            seed: the run's.
            read: sources of each of the tasks alone, maybe under other names; the files that they have read are not
                read again.

        Raises:
            UserError: a task's file or settings are wrong; the message names file and line or row.
        """
        if not tasks:
            raise ValueError("a prompt source needs at least one task")
        self._tasks = list(tasks)
        self._seed = seed
        known = [source.read_rows for source in read] if read is not None else [None] * len(self._tasks)
        self._items = [items or items_of(task, seed) for task, items in zip(tasks, known, strict=True)]
        self._permutation = lru_cache(2 * len(self._tasks))(self._make_permutation)

    def prompt(self, index: int) -> Prompt:
        """Return prompt number `index` (from 0) of the run; in any order, any number of times.

        Raises:
            RunFailed: reasoning-gym could not make the item.
        """
        if index < 0:
            raise ValueError(f"prompts count from 0, got {index}")
        number, k = mix([task.weight for task in self._tasks], index)
        task, items = self._tasks[number], self._items[number]
        epoch, item = 0, k
        if items.count is not None:
            epoch, position = divmod(k, items.count)
            item = self._item(number, epoch, position)
        return Prompt(
            prompt_id=f"{task.key}/{items.base + item}",
            task=task.key,
            text=with_suffix(items.question(item), task.question_suffix),
            epoch=epoch,
            reward_input=items.reward_input(item),
            agent=isinstance(task, AgentTask),
            earlier=items.earlier(item),
        )

    def contents(self) -> dict[str, TaskContent]:
        """Return what each task with an end holds, by its key."""
        tasks = zip(self._tasks, self._items, strict=True)
        return {
            task.key: TaskContent(rows=items.count, digest=items.digest())
            for task, items in tasks
            if items.count is not None
        }

    @property
    def read_rows(self) -> TaskItems | None:
        """The rows of the only task, if it is a file; None: its items depend on its name or on the seed."""
        (items,) = self._items
        return items if isinstance(self._tasks[0], FileTask) else None

    @property
    def problem(self) -> str:
        """The first item of which no completion can get the reward; '': none is known."""
        return next((items.problem for items in self._items if items.problem), "")

    @property
    def ordered_rows(self) -> int:
        """Rows of all tasks, if each has an end and one keeps its order, in which long rows may be together; else 0."""
        counts = [items.count for items in self._items]
        if all(task.shuffles for task in self._tasks):
            return 0
        return 0 if None in counts else sum(filter(None, counts))

    def _item(self, number: int, epoch: int, position: int) -> int:
        """Return the item at a position of an epoch."""
        count, task = self._items[number].count, self._tasks[number]
        assert count is not None
        if not task.shuffles:
            return position
        if count > MOST_PERMUTED:
            return _scattered(position, count, derive_seed(self._seed, f"{task.key}/{epoch}"))
        return int(self._permutation(number, epoch)[position])

    def _make_permutation(self, number: int, epoch: int) -> npt.NDArray[np.int64]:
        count, task = self._items[number].count, self._tasks[number]
        assert count is not None
        return np.random.default_rng([derive_seed(self._seed, task.key), epoch]).permutation(count)


def _scattered(position: int, count: int, key: int) -> int:
    """Return the number at a position of a permutation of `range(count)` that is never made as a whole.

    It is a Feistel network of as many bits as `count` needs, one more if they are odd, applied again until the number
    is below `count`.
    """
    half = ((count - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    while True:
        left, right = position >> half, position & mask
        for turn in range(FEISTEL_ROUNDS):
            left, right = right, left ^ (derive_seed(key, f"{turn}/{right}") & mask)
        position = left << half | right
        if position < count:
            return position
