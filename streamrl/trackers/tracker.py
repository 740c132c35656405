"""What a tracker is: something outside of the run's folder that figures and samples are copied to.

A tracker may be slow, hang, or fail: it is called by a process of its own (`tracker_process.py`), and what a failed
call was about is sent again. So a tracker raises what it meets, and neither retries for long nor keeps anything itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class TrackedRun:
    """The run that is copied."""

    folder: Path
    name: str
    settings: Mapping[str, Any]
    """Its run file, every key, for the tracker's page of settings."""


@dataclass(frozen=True)
class RolloutTable:
    """Some samples of a step; the cells of a row are texts, numbers or None, in the order of `columns`."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | None, ...], ...]

    def cells(self) -> dict[str, list[Any]]:
        """Return the arguments `columns` and `data` from which W&B and Trackio make a table."""
        return {"columns": list(self.columns), "data": [list(row) for row in self.rows]}


class Tracker(Protocol):
    """An open tracker; one thread calls it.

    A figure's step is an optimizer step. Steps rise from call to call, except that evaluations are of an earlier one.
    """

    @property
    def id(self) -> str:
        """What finds the same run again: given to the tracker when it is opened next time."""
        ...

    @property
    def last_step(self) -> int | None:
        """Newest step that the service has; None: it cannot say, or has none."""
        ...

    def log_step(self, step: int, time: float, figures: Mapping[str, float]) -> None:
        """Take the figures of an optimizer step.

        Args:
            step: its number.
            time: unix seconds at which it ended.
            figures: by name (`run_dir/figures.py`).
        """
        ...

    def log_evaluation(self, step: int, time: float, figures: Mapping[str, float]) -> None:
        """Take the figures of an evaluation of the weights of a step."""
        ...

    def log_samples(self, step: int, table: RolloutTable) -> None:
        """Take some samples of a step."""
        ...

    def rewind(self, step: int) -> bool:
        """Forget everything after a step, which is trained again; return False if the service cannot do that."""
        ...

    def close(self) -> None:
        """Deliver what is still held here."""
        ...
