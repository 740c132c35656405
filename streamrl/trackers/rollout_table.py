"""Choose some samples of a step, and lay them out as a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ranker.data import ROW_IDS, first_rows
from streamrl.rollouts.parquet_files import read_columns
from streamrl.trackers.tracker import RolloutTable

LIGHT = ("sample_id", "group_id", "task", "reward", "void_cause", "advantage", "output_length", "finish_reason")
TEXTS = ("prompt", "completion")
COLUMNS = ("step", *LIGHT, *TEXTS)
MOST_CHARACTERS = 4_000
"""Characters of a prompt or completion in a table."""


def spread(rewards: list[float | None], count: int) -> list[int]:
    """Return the numbers of `count` samples spread evenly over the rewards, the lowest first; void ones come last."""
    order = sorted(range(len(rewards)), key=lambda index: (rewards[index] is None, rewards[index] or 0.0, index))
    if count >= len(order):
        return order
    if count == 1:
        return order[-1:] if rewards[order[-1]] is not None else order[:1]
    return [order[round(place * (len(order) - 1) / (count - 1))] for place in range(count)]


def rollout_table(path: Path, step: int, count: int) -> RolloutTable:
    """Read `count` samples of a step's rollouts; of an episode the first row, whose completion is its conversation.

    Args:
        path: the step's file in `rollouts/`.
        step: its number.
        count: samples to choose.

    Raises:
        OSError, pa.ArrowException: the file cannot be read.
    """
    table = first_rows(read_columns(path, path.parents[1], (*LIGHT, *ROW_IDS, *TEXTS, "conversation")))
    chosen = spread(table.column("reward").to_pylist(), count)
    return RolloutTable(COLUMNS, tuple(_cells(row, step) for row in table.take(chosen).to_pylist()))


def _cells(row: dict[str, Any], step: int) -> tuple[str | float | None, ...]:
    completion = _episode(row.get("conversation")) or row.get("completion")
    texts = (None if text is None else text[:MOST_CHARACTERS] for text in (row.get("prompt"), completion))
    return (step, *(row.get(name) for name in LIGHT), *texts)


def _episode(conversation: str | None) -> str | None:
    """Return an episode's messages as one text; None: the row is no episode, or its conversation cannot be read."""
    if not conversation:
        return None
    try:
        messages = json.loads(conversation)["messages"]
        return "\n".join(f"{one['role']}: {one.get('content') or ''}" for one in messages)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
