"""Copy what is new in a run's folder to a tracker, from where the record of earlier deliveries ends.

The files of the run are all that is kept: what could not be delivered is read again later. Each row is sent once. A
step that was trained again after a restart replaces the first try where the tracker can forget; elsewhere the first
try stays, and the follower says so.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from streamrl.config.trackers import TrackerConfig
from streamrl.rollouts.rollout_store import RolloutStore
from streamrl.run_dir import layout
from streamrl.run_dir.appended_lines import AppendedRows
from streamrl.run_dir.evaluations import EvaluationRow
from streamrl.run_dir.figures import evaluation_figures, step_figures
from streamrl.run_dir.jsonl import AnyRow
from streamrl.run_dir.metrics import MetricsRow
from streamrl.trackers.rollout_table import rollout_table
from streamrl.trackers.sent_rows import Kind, SentRows
from streamrl.trackers.tracker import TrackedRun, Tracker

Opener = Callable[[TrackerConfig, TrackedRun, SentRows], Tracker]


MOST_OPEN = 4096
"""Rows that are open at which no further ones are read: a file may have any size, and a tracker be away for long."""


class NewRows(AppendedRows[AnyRow]):
    """The rows of a file that were not dealt with yet; others are not held. Those of one that began anew come again."""

    def open_rows(self) -> list[AnyRow]:
        """Read what is new and return the rows that are open, the oldest first; of many only the first ones."""
        if len(self.rows) < MOST_OPEN:
            self.look(MOST_OPEN)
        return list(self.rows)

    def close_first(self) -> None:
        """Take the first open row as dealt with."""
        del self.rows[0]


class RunFollower:
    """What follows one run for one tracker; everything here may block or raise as the tracker does."""

    def __init__(
        self, run: TrackedRun, config: TrackerConfig, sent: SentRows, open_tracker: Opener, say: Callable[[str], None]
    ) -> None:
        """Take the run, the tracker's keys and record, what opens it, and what shows a line to the user."""
        self._run, self._config, self._sent, self._open, self._say = run, config, sent, open_tracker, say
        self._steps = NewRows(run.folder / layout.METRICS, MetricsRow, largest=None)
        self._evaluations = NewRows(run.folder / layout.EVALUATIONS, EvaluationRow, largest=None)
        self._rollouts = RolloutStore(run.folder / layout.ROLLOUTS)
        self._tracker: Tracker | None = None
        self._has_until = 0
        """Newest step that the tracker says it has, though the record may not say so."""
        self._said_kept = False

    @property
    def waiting(self) -> int:
        """Steps and evaluations that are not delivered yet; from `MOST_OPEN` on there may be more."""
        return len(self._steps.open_rows()) + len(self._evaluations.open_rows())

    def send(self) -> None:
        """Send all that is new.

        Raises:
            Exception: whatever the tracker raises; what was sent before is marked, the rest is sent next time.
        """
        self._opened()  # before the first step, so that a key that is missing is said as the run starts
        while rows := self._steps.open_rows():
            for row in rows:
                self._send_step(row)
                self._steps.close_first()
        while evaluations := self._evaluations.open_rows():
            for evaluation in evaluations:
                if self._is_new("evaluation", evaluation.step, evaluation.time):
                    self._opened().log_evaluation(evaluation.step, evaluation.time, evaluation_figures(evaluation))
                    self._sent.mark("evaluation", evaluation.step, evaluation.time)
                self._evaluations.close_first()

    def close(self) -> None:
        """Let the tracker deliver what it holds."""
        if self._tracker is not None:
            self._tracker.close()
            self._tracker = None

    def _send_step(self, row: MetricsRow) -> None:
        step = row.step
        if self._is_new("step", step, row.time):
            tracker = self._opened()
            if step > self._has_until:
                tracker.log_step(step, row.time, step_figures(row))
            self._sent.mark("step", step, row.time)
        if self._config.samples_due(step) and self._sent.time_of("samples", step) is None:
            try:
                table = rollout_table(self._rollouts.path(step), step, self._config.samples)
            except (OSError, pa.ArrowException):
                return  # a copy without rollouts, or a step that was taken back meanwhile
            self._opened().log_samples(step, table)
            self._sent.mark("samples", step, row.time)

    def _is_new(self, kind: Kind, step: int, time: float) -> bool:
        """Whether a row is to be sent; the tracker first forgets an earlier try of its step if it can."""
        sent = self._sent.time_of(kind, step)
        if sent is None or sent == time:
            return sent is None
        if self._opened().rewind(step - 1):
            self._sent.rewind(step - 1)
            self._has_until = min(self._has_until, step - 1)
            return True
        if not self._said_kept:
            self._say(f"keeps its first figures of step {step}, and of others that a restart has trained again")
        self._said_kept = True
        self._sent.mark(kind, step, time)
        return False

    def _opened(self) -> Tracker:
        if self._tracker is None:
            self._tracker = self._open(self._config, self._run, self._sent)
            self._sent.name(self._tracker.id)
            if (has := self._tracker.last_step) is not None:
                self._has_until = has
                if has < self._sent.last_step:
                    self._sent.rewind(has)
        return self._tracker
