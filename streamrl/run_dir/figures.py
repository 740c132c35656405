"""The figures of a row under the names that trackers and Prometheus know them by.

A figure is a number, or true or false (1 or 0); texts and the length audit are none. Its name follows from its key in
the file, so that one list documents all: docs/reference/metrics.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from streamrl.run_dir.evaluations import EvaluationRow, Scores
from streamrl.run_dir.metrics import MetricsRow

STEP_PREFIX, EVALUATION_PREFIX = "train", "evaluation"
"""First parts of the names in trackers, which show figures with the same first part together."""
NOT_FIGURES = frozenset({"step", "time", "length_audit", "step_refused", "mismatch_warning", "length_bias_warning"})
"""Keys of rows that are no figures; the newest warnings are in `status.json` and in the report."""
LABELS: Mapping[str, tuple[str, ...]] = {
    "void_rate_by_cause": ("cause",),
    "accepted_by_route": ("route",),
    "reward_by_task": ("task",),
    "output_length_by_task": ("task",),
    "usd_by_process": ("site", "process"),
    "agent_metrics_by_task": ("task", "name"),
}
"""What tells the numbers of a figure apart, of those that are more than one number."""


def numbers(value: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the numbers of a figure with their names: none if it is one number, one if it is one per task."""
    if isinstance(value, int | float):
        yield names, float(value)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from numbers(item, (*names, name))


def step_figures(row: MetricsRow) -> dict[str, float]:
    """Return a step's figures by their names in trackers, such as train/loss and train/reward_by_task/sum."""
    return _named(STEP_PREFIX, row, NOT_FIGURES)


def evaluation_figures(row: EvaluationRow) -> dict[str, float]:
    """Return an evaluation's figures, such as evaluation/overall/pass_at_4 and evaluation/by_task/sum/reward."""
    found = _named(EVALUATION_PREFIX, row, NOT_FIGURES | {"overall", "by_task"})
    found |= _scores(f"{EVALUATION_PREFIX}/overall", row.overall)
    for task, scores in row.by_task.items():
        found |= _scores(f"{EVALUATION_PREFIX}/by_task/{task}", scores)
    return found


def _scores(prefix: str, scores: Scores) -> dict[str, float]:
    found = _named(prefix, scores, frozenset({"pass_at"}))
    if scores.reward is not None:
        found[f"{prefix}/reward"] = scores.reward
    return found | {f"{prefix}/pass_at_{j}": chance for j, chance in enumerate(scores.pass_at, 1)}


def _named(prefix: str, row: BaseModel, left_out: frozenset[str]) -> dict[str, float]:
    found = {
        (prefix, key, *names): number
        for key in type(row).model_fields
        if key not in left_out
        for names, number in numbers(getattr(row, key))
    }
    return dict(zip(_joined(list(found)), found.values(), strict=True))


def _joined(paths: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the names of different figures, of which no two are equal: their parts with `/` between them.

    Parts of tasks and of users' metrics may hold `/` themselves. Of names that would be equal, `/` within a part is
    %2F and % is %25, which no two have in common; others stay as they are.
    """
    names = ["/".join(path) for path in paths]
    while len(set(names)) < len(names):
        count = Counter(names)
        names = [name if count[name] == 1 else _escaped(path) for name, path in zip(names, paths, strict=True)]
    return names


def _escaped(path: tuple[str, ...]) -> str:
    return "/".join(part.replace("%", "%25").replace("/", "%2F") for part in path)
