"""The ranker during a run: predicts, monitors its own accuracy, and follows the policy.

A run calls `predict` before requests start, `observe` as samples finish, `end_step` after each step and `refit` now and
then (the policy drifts, so only the newest rows count). `end_step` compares the step's finished samples with what was
predicted *before they started*, and the mean over the newest steps decides whether the ranking is `trusted`:

    untrusted -> trusted    recall@20 and tau at or above the upper bounds
    trusted -> untrusted    one of them below its lower bound

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

from ranker.data import from_rows
from ranker.errors import RankerError
from ranker.evaluate import kendall_tau, recall_at
from ranker.history import LiveHistory, Seen
from ranker.model import LengthModel, Prediction
from ranker.model_kinds import KINDS
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
        self, model: LengthModel | None = None, *, seed: int = 0, threads: int = 1, window: int = WINDOW
    ) -> None:
        if window < 1:
            raise RankerError(f"window is {window}; expected at least 1 sample")
        self.model = model
        self.seed = seed
        self.threads = threads
        self.trust: Trust | None = None
        """Means over the newest measured steps; None before the first."""
        self.trusted = False
        """Whether to dispatch by the predictions; before the first measurement, by the model's own held-out recall."""
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=window)
        self._history = LiveHistory(window)
        self._window = window
        self._waiting: dict[str, float] = {}  # sample -> score given before it started
        self._finished: list[tuple[float, float]] = []  # (score, length) of samples since the last measurement
        self._measured: deque[Trust] = deque(maxlen=STEPS)
        self._refits = 0
        if model is not None and model.kind in model.report.candidates:
            self.trusted = model.report.candidates[model.kind].recall.get("0.2", 0.0) >= RECALL_UPPER

    def predict(
        self,
        prompts: Sequence[str],
        tasks: Sequence[str | None] | None = None,
        group_ids: Sequence[str | None] | None = None,
        sample_ids: Sequence[Sequence[str]] | None = None,
        step: int = 0,
        difficulty: Sequence[float] | Array | None = None,
    ) -> Prediction | None:
        """Predict the lengths of N requests that start in `step`; None without a model.

        Samples of earlier steps, and finished siblings of `group_ids`, are taken into account. `sample_ids` are the
        samples of each request; the first prediction of each is remembered, and compared with its length when it is
        observed.

        Raises:
            RankerError: the arguments differ in length.
        """
        count = len(prompts)
        for name, values in (("tasks", tasks), ("group_ids", group_ids), ("sample_ids", sample_ids)):
            if values is not None and len(values) != count:
                raise RankerError(f"{len(values)} {name} for {count} prompts")
        if self.model is None:
            return None
        named, groups = list(tasks or [None] * count), list(group_ids or [None] * count)
        history = self._history.columns(list(prompts), named, groups, step)
        prediction = self.model.predict(prompts, named, difficulty, history, self.threads)
        for samples, score in zip(sample_ids or (), prediction.score, strict=False):
            for sample in samples:
                self._waiting.setdefault(sample, float(score))
        while len(self._waiting) > self._window:  # requests that were predicted and never observed
            del self._waiting[next(iter(self._waiting))]
        return prediction

    def observe(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record finished samples: rows with `prompt` and `output_length`, and any other column of the rollout format.

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
            length = max(1.0, float(row["output_length"]))
            self._rows.append(row)
            step = int(row.get("step") or 0)
            self._history.add(Seen(row["prompt"], row.get("task"), row.get("group_id"), step, math.log(length)))
            score = self._waiting.pop(str(row.get("sample_id")), None)
            if score is not None:
                self._finished.append((score, length))

    def end_step(self) -> Trust | None:
        """Measure on the samples observed since the last measurement, and update `trust` and `trusted`.

        Returns:
            This step's own figures; None if too few predicted samples have finished (they are kept for the next).
        """
        if len(self._finished) < MIN_SAMPLES:
            return None
        score, length = np.array(self._finished).T
        self._finished = []
        tau = kendall_tau(score, length)
        measured = Trust(recall_at(score, length, 0.2), 0.0 if math.isnan(tau) else tau, len(score))
        self._measured.append(measured)
        recall = sum(m.recall_at_20 for m in self._measured) / len(self._measured)
        tau = sum(m.kendall_tau for m in self._measured) / len(self._measured)
        self.trust = Trust(recall, tau, sum(m.samples for m in self._measured))
        if self.trusted:
            self.trusted = recall >= RECALL_LOWER and tau >= TAU_LOWER
        else:
            self.trusted = recall >= RECALL_UPPER and tau >= TAU_UPPER
        return measured

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
        kind = self.model.kind if self.model is not None else KINDS[0].name
        self._refits += 1
        return partial(_fit, kind, list(self._rows), self.seed + self._refits, self.threads)


def _fit(kind: str, rows: list[Mapping[str, Any]], seed: int, threads: int) -> LengthModel:
    return fit_again(kind, from_rows(rows), seed, threads)
