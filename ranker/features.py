"""Feature columns of a request: its prompt's text, its task, and the history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ranker.history import HISTORY
from ranker.projection import Projection, fit_projection
from ranker.rare import RARE, RareWords, fit_rare_words
from ranker.segments import Array
from ranker.text import STRUCTURE, pack_batches, structure

TASKS = 100
"""Largest number of tasks with a number of their own; other known tasks are represented by their text alone."""
UNKNOWN = -1
"""Number of a named task that was not trained on."""


@dataclass(frozen=True)
class FeatureSchema:
    """Fitted parts of the features, and the order of the columns."""

    projection: Projection
    rare: RareWords
    tasks: tuple[str, ...]
    """Known tasks, the most frequent first; the first `TASKS` have a number."""
    difficulty: bool = False
    """Whether there is a column `difficulty`, as in files of version 5; nothing was ever told of it in a run."""

    @property
    def numbered(self) -> int:
        """Number of tasks with a number of their own."""
        return min(len(self.tasks), TASKS)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns [F]."""
        last = ("task", "difficulty") if self.difficulty else ("task",)
        return (*STRUCTURE, *RARE, *self.projection.names, *last, *HISTORY)

    @property
    def history(self) -> slice:
        """Slice of the history's columns, which are the last ones."""
        return slice(len(self.names) - len(HISTORY), len(self.names))


def fit_schema(texts: list[str], tasks: Sequence[str], seed: int) -> FeatureSchema:
    """Fit the parts that depend on the distinct prompts; `tasks` are the known ones, the most frequent first."""
    return FeatureSchema(fit_projection(texts, seed), fit_rare_words(texts), tuple(tasks))


def text_features(schema: FeatureSchema, texts: list[str]) -> Array:
    """Return the text's columns [N, T], float32, of distinct prompts."""
    parts = []
    for packed in pack_batches(texts):
        columns = (structure(packed), schema.rare.apply(packed), schema.projection.apply(packed))
        parts.append(np.concatenate(columns, axis=1))
    return np.concatenate(parts) if parts else np.zeros((0, schema.names.index("task")), np.float32)


def assemble(schema: FeatureSchema, text: Array, tasks: Array, history: Array | None) -> Array:
    """Join all columns [N, F], float32: text [N, T], task codes [N] (NaN: none), history [N, 9]."""
    out = np.full((len(text), len(schema.names)), np.nan, dtype=np.float32)
    width = text.shape[1]
    out[:, :width] = text
    out[:, width] = tasks
    if history is not None:
        out[:, schema.history] = history
    return out


def featurise(
    schema: FeatureSchema,
    prompts: Sequence[str],
    tasks: Sequence[str | None] | None = None,
    history: Array | None = None,
) -> Array:
    """Return the columns [N, F], float32, of N requests; a repeated text is processed once.

    Everything that is not given is NaN; the task of a name that was not trained on is `UNKNOWN`. `history` [N, 9]
    comes from `ranker.history`.
    """
    number: dict[str, int] = {}
    index = np.array([number.setdefault(prompt, len(number)) for prompt in prompts], dtype=np.int64)
    text = text_features(schema, list(number))[index]
    known: dict[str | None, float] = {task: i if i < TASKS else np.nan for i, task in enumerate(schema.tasks)}
    # without names in training, a name says nothing
    known[None] = known[""] = np.nan
    codes = np.full(len(index), np.nan)
    if tasks is not None and schema.tasks:
        codes = np.array([known.get(task, UNKNOWN) for task in tasks], dtype=float)
    return assemble(schema, text, codes, history)
