"""The figures of all steps as columns, so that a page asks for the new ones only."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from streamrl.run_dir import layout
from streamrl.run_dir.appended_lines import AppendedRows
from streamrl.run_dir.evaluations import EvaluationRow
from streamrl.run_dir.metrics import MetricsRow
from streamrl.run_dir.priced_rows import PricedRows


def _depth(figure: str) -> int:
    """Return how many names a figure's numbers have: 0 if it is one number, 1 if it is one per task."""
    depth, kind = 0, MetricsRow.model_fields[figure].annotation
    while get_origin(kind) is dict:
        depth, kind = depth + 1, get_args(kind)[1]
    return depth


BY_NAME = tuple(name for name in MetricsRow.model_fields if _depth(name) == 1)
"""Figures that are one number per cause, route or task."""
WARNINGS = ("step_refused", "mismatch_warning", "length_bias_warning")
"""Texts of a row that are shown with their step."""
SHOWN = tuple(
    name
    for name in MetricsRow.model_fields
    if _depth(name) == 0 and name not in (*WARNINGS, "length_audit", "step", "time")
)
"""Figures that are one number, or true or false, per step."""


def describe_figures() -> dict[str, str]:
    """Return each figure's description in `metrics.jsonl`, for headings."""
    return {name: MetricsRow.model_fields[name].description or name for name in SHOWN}


class StepSeries:
    """The rows of `metrics.jsonl` and `evaluations.jsonl` of one run, which may still grow."""

    def __init__(self, folder: Path) -> None:
        self._steps = PricedRows(folder)
        self._evaluations = AppendedRows(folder / layout.EVALUATIONS, EvaluationRow)

    def skipped(self) -> set[int]:
        """Return the steps none of whose updates has changed the weights: refused, or too far off-policy."""
        with contextlib.suppress(OSError):  # the run's other pages say why it cannot be read
            self._steps.look()
        return {row.step for row in self._steps.rows if row.changed_nothing}

    def since(self, cursor: str) -> dict[str, Any]:
        """Return what a page has not seen yet, as columns, ready for JSON.

        Args:
            cursor: the answer's `cursor` of last time; empty for all.
        """
        self._evaluations.look()
        self._steps.look()
        new, reset = self._steps.since(cursor)
        return {
            "cursor": self._steps.cursor,
            "reset": reset,
            "step": [row.step for row in new],
            "time": [row.time for row in new],
            "figures": {name: [getattr(row, name) for row in new] for name in SHOWN},
            "by_name": {name: _columns([getattr(row, name) for row in new]) for name in BY_NAME},
            "warnings": [
                {"step": row.step, "text": f"{name.replace('_', ' ')}: {text}"}
                for row in new
                for name in WARNINGS
                if (text := getattr(row, name))
            ],
            "usd": self._steps.usd,
            "costs": _costs(self._steps.usd_by_process),
            "evaluations": [_evaluation(row) for row in sorted(self._evaluations.rows, key=lambda row: row.step)],
        }


def _columns(rows: Sequence[dict[str, float | None]]) -> dict[str, list[float | None]]:
    """Return one column per name; None where a row lacks it."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [row.get(name) for row in rows] for name in names}


def _costs(usd_by_process: Mapping[tuple[str, str], float]) -> list[dict[str, Any]]:
    """Return what each process, and the link to each site, has cost in the finished steps, dearest first."""
    dearest = sorted(usd_by_process.items(), key=lambda item: -item[1])
    return [{"site": site, "process": process, "usd": usd} for (site, process), usd in dearest]


def _evaluation(row: EvaluationRow) -> dict[str, Any]:
    overall = row.overall
    return {
        "step": row.step,
        "reward": overall.reward,
        "pass_at": overall.pass_at,
        "length": overall.length_mean,
        "void": overall.rewards_void,
    }
