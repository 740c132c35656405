"""The ranker during a run: predicts, monitors its own accuracy, and follows the policy.

A run calls `predict` before requests start, `observe` as samples finish, `end_step` after each step and `refit` now and
then (the policy drifts, so only the newest rows count). `end_step` compares the step's finished samples with what was
expected *before they started*, and the mean over the newest steps decides whether the forecasts are `trusted`. Both go
by the expected length that the caller reports with `expect`: the one that it dispatches by.

    untrusted -> trusted    recall@20 and tau at or above the upper bounds
    trusted -> untrusted    one of them below its lower bound

Before the first measured step, held-out samples in the model's file decide by the same bounds, if the same language
model wrote them (`written_by`); a file of another one, or that does not say, has to earn its trust.

A random ranking has recall@20 of 0.2 and tau of 0. Between the bounds nothing changes, so that noise of a single step
does not toggle the dispatcher. A caller should dispatch by load alone while `trusted` is False: isolating
the wrong requests is slower than not isolating any. Without a model `predict` returns None.

There is no clock and no I/O here; the same calls with the same seed and threads give the same answers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ranker.data import EPISODE, from_rows, says_length
from ranker.errors import RankerError
from ranker.evaluate import kendall_tau, recall_at
from ranker.history import NOTHING, LiveHistory, Seen
from ranker.model import LengthModel, Prediction
from ranker.model_kinds import DEFAULT
from ranker.segments import Array
from ranker.train import refit as fit_again

WINDOW = 20_000
"""Number of newest samples that are kept and refitted on: some tens of steps, and a refit of some seconds."""
RECALL_UPPER, RECALL_LOWER = 0.40, 0.30
"""Bounds of recall@20: twice, and one and a half times, that of a random ranking."""
TAU_UPPER, TAU_LOWER = 0.15, 0.05
"""Bounds of Kendall's tau-b."""
STEPS = 3
"""Number of newest measured steps that count."""
MIN_SAMPLES = 25
"""Fewest samples of a measured step: the longest 20 % are then five. Fewer are kept for the next step."""


@dataclass(frozen=True)
class Trust:
    """Accuracy with which finished samples had been ranked before they started."""

    recall_at_20: float
    kendall_tau: float
    samples: int


class OnlineRanker:
    """A ranker that predicts, measures its accuracy and can be refitted during a run."""

    def __init__(
        self,
        model: LengthModel | None = None,
        *,
        seed: int = 0,
        threads: int = 1,
        window: int = WINDOW,
        written_by: str | None = None,
    ) -> None:
        """
        Args:
            model: the model to begin with.
            seed: seed of refits.
            threads: LightGBM's threads.
            window: number of newest samples to refit on.
            written_by: name of the language model that writes the run's answers.

        Raises:
            RankerError: the window is not positive.
        """
        if window < 1:
            raise RankerError(f"window is {window}; expected at least 1 sample")
        self.model = model
        self.seed = seed
        self.threads = threads
        self.trust: Trust | None = None
        """Means over the newest measured steps; None before the first."""
        self.trusted = False
        """Whether to dispatch by the predictions."""
        self.written_by = written_by
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=window)
        self._history = LiveHistory(window)
        # kept over refits: the prompts of the file may come later
        self._remembered = model.remembered if model is not None and self.same_writer else NOTHING
        self._window = window
        self._waiting: dict[str, float] = {}  # sample -> expected length before it started
        self._finished: list[tuple[float, float]] = []  # (expected, length) of samples since the last measurement
        self._measured: deque[Trust] = deque(maxlen=STEPS)
        self._refits = 0
        if model is not None and self.same_writer and len(model.judged.length) >= MIN_SAMPLES:
            self.trusted = self._clears(*_accuracy(model.judged.expected, model.judged.length))

    @property
    def same_writer(self) -> bool:
        """Whether the answers that the model was trained on are by the run's language model, and it alone."""
        return self.model is not None and self.written_by is not None and self.model.written_by == (self.written_by,)

    def predict(
        self,
        prompts: Sequence[str],
        tasks: Sequence[str | None] | None = None,
        step: int = 0,
        limit: Array | float | None = None,
    ) -> Prediction | None:
        """Predict the lengths of N requests that start in `step`; None without a model.

        Samples of earlier steps are taken into account; for a prompt without any, those that the run's first model was
        trained on, if the same language model wrote them. `limit` is the most tokens of each request [N], or of all.

        Raises:
            RankerError: the arguments differ in length.
        """
        count = len(prompts)
        if tasks is not None and len(tasks) != count:
            raise RankerError(f"{len(tasks)} tasks for {count} prompts")
        if self.model is None:
            return None
        named = list(tasks or [None] * count)
        history = self._remembered.fill(self._history.columns(list(prompts), named, step), prompts)
        return self.model.predict(prompts, named, history, self.threads, limit)

    def expect(self, sample_ids: Sequence[str], length: float) -> None:
        """Remember the expected length by which samples are dispatched, to compare it with those observed.

        The first one of a sample counts: later ones may know how it went.
        """
        for sample in sample_ids:
            self._waiting.setdefault(sample, length)
        while len(self._waiting) > self._window:  # requests that were predicted and never observed
            del self._waiting[next(iter(self._waiting))]

    def observe(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record finished samples: rows with `prompt` and `output_length`, and any other column of the rollout format.

        Those that say nothing of a length (`ranker.data.says_length`) are left out.

        Raises:
            RankerError: a row has no prompt, or no length of at least 0; then no row is recorded.
        """
        for row in rows:
            length = row.get("output_length")
            if not isinstance(row.get("prompt"), str):
                raise RankerError(
                    f"sample {row.get('sample_id')}: 'prompt' is {row.get('prompt')!r:.60}; expected text"
                )
            if isinstance(length, bool) or not isinstance(length, int | float | np.number) or not length >= 0:
                raise RankerError(f"sample {row.get('sample_id')}: 'output_length' is {length!r:.60}; expected tokens")
        for row in rows:
            expected = self._waiting.pop(str(row.get("sample_id")), None)
            ends = (row.get(name) for name in ("finish_reason", "void_cause", EPISODE))
            if not says_length(row["output_length"], *ends):
                continue
            length = max(1.0, float(row["output_length"]))
            self._rows.append(row)
            step = int(row.get("step") or 0)
            self._history.add(Seen(row["prompt"], row.get("task"), step, math.log(length)))
            if expected is not None:
                self._finished.append((expected, length))

    def end_step(self) -> Trust | None:
        """Measure on the samples observed since the last measurement, and update `trust` and `trusted`.

        Returns:
            This step's own figures; None if too few predicted samples have finished (they are kept for the next).
        """
        if len(self._finished) < MIN_SAMPLES:
            return None
        expected, length = np.array(self._finished).T
        self._finished = []
        measured = Trust(*_accuracy(expected, length), len(length))
        self._measured.append(measured)
        recall = sum(m.recall_at_20 for m in self._measured) / len(self._measured)
        tau = sum(m.kendall_tau for m in self._measured) / len(self._measured)
        self.trust = Trust(recall, tau, sum(m.samples for m in self._measured))
        if self.trusted:
            self.trusted = recall >= RECALL_LOWER and tau >= TAU_LOWER
        else:
            self.trusted = self._clears(recall, tau)
        return measured

    @staticmethod
    def _clears(recall: float, tau: float) -> bool:
        return recall >= RECALL_UPPER and tau >= TAU_UPPER

    def refit(self) -> bool:
        """Fit a model of the same kind on the newest rows; without any, return False and change nothing."""
        if (job := self.refit_job()) is None:
            return False
        self.model = job()
        return True

    def refit_job(self) -> Callable[[], LengthModel] | None:
        """Return a function that fits the new `model` from the current rows, for another thread; None without rows."""
        if not self._rows:
            return None
        kind = self.model.kind if self.model is not None else DEFAULT
        self._refits += 1
        return partial(_fit, kind, list(self._rows), self.seed + self._refits, self.threads, self.written_by)


def _accuracy(expected: Array, length: Array) -> tuple[float, float]:
    """Return recall@20 and tau (0 where it is undefined) of expected lengths [N]."""
    tau = kendall_tau(expected, length)
    return recall_at(expected, length, 0.2), 0.0 if math.isnan(tau) else tau


def _fit(kind: str, rows: list[Mapping[str, Any]], seed: int, threads: int, written_by: str | None) -> LengthModel:
    return fit_again(kind, from_rows(rows), seed, threads, (written_by,) if written_by else ())
