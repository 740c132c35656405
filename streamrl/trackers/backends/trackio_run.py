"""Trackio: a run in its local database, or in a Hugging Face Space."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamrl.config.trackers import TrackioTracker
from streamrl.trackers.sent_rows import SentRows
from streamrl.trackers.tracker import RolloutTable, TrackedRun


class TrackioRun:
    """A run of Trackio, known by its name in the project."""

    def __init__(self, config: TrackioTracker, run: TrackedRun, sent: SentRows) -> None:
        """Open the run, or continue it; a thread of Trackio's writes.

        Raises:
            Exception: whatever Trackio raises, such as for a Space that cannot be reached.
        """
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        self._table = trackio.Table
        runs = SQLiteStorage.get_runs(config.project)
        if not sent.id:  # two runs of one name would be one
            names = [run.name, *(f"{run.name}-{number}" for number in range(2, len(runs) + 3))]
            sent.name(next(name for name in names if name not in runs))
        self.id = sent.id
        self.last_step: int | None = None
        if config.space_id is None and self.id in runs:
            self.last_step = SQLiteStorage.get_max_steps_for_runs(config.project).get(self.id)
        self._run: Any = trackio.init(
            project=config.project,
            name=self.id,
            space_id=config.space_id,
            config=dict(run.settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log_step(self, step: int, time: float, figures: Mapping[str, float]) -> None:
        """Hand a step's figures to Trackio's thread."""
        self._run.log(dict(figures), step=step)

    def log_evaluation(self, step: int, time: float, figures: Mapping[str, float]) -> None:
        """Hand an evaluation's figures to it."""
        self._run.log(dict(figures), step=step)

    def log_samples(self, step: int, table: RolloutTable) -> None:
        """Hand a table to it."""
        self._run.log({"samples": self._table(**table.cells())}, step=step)

    def rewind(self, step: int) -> bool:
        """Return False: Trackio cannot take back a part of a run."""
        return False

    def close(self) -> None:
        """Wait until all is written."""
        self._run.finish()
