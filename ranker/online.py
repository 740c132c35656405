"""The ranker during a run: predicts, monitors its own accuracy, and follows the policy.

A run calls `predict` before requests start, `observe` as samples finish, `end_step` after each step and `refit` now and
then (the policy drifts, so only the newest rows count). `end_step` compares the step's finished samples with what was
expected *before they started*, and the mean over the newest steps decides whether the forecasts are `trusted`. Both go
by the expected length that the caller reports with `expect`: the one that it dispatches by.

    untrusted -> trusted    skill and tau at or above the upper bounds
    trusted -> untrusted    one of them below its lower bound

Before the first measured step, held-out samples in the model's file decide by the same bounds, if the same language
model wrote them (`written_by`); a file of another one, or that does not say, has to earn its trust.

Skill is what recall@20 has beyond that of a random ranking, 0.2, as a share of what the best possible ranking has
beyond it: where more than 20 % of the samples reach the length limit, no ranking finds all of "the longest" (of a share
c, recall@20 is at most 0.2 / c). A random ranking has skill and tau of 0. Where nearly all lengths are equal, skill is
0 as well: hardly anything is gained or lost by a ranking, and few samples would decide. Between the bounds nothing
changes, so that noise of a single step does not toggle the dispatcher. A caller should dispatch by load alone while
`trusted` is False: isolating the wrong requests is slower than not isolating any. Without a model `predict` returns
None.

There is no clock and no I/O here; the same calls with the same seed give the same answers.
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
SKILL_UPPER, SKILL_LOWER = 0.25, 0.125
"""Bounds of skill: where no lengths are equal, recall@20 of twice, and one and a half times, that of a random
ranking."""
LEAST_TO_FIND = 0.005
"""Least difference in recall@20 between the best possible and a random ranking: some 97 % of the lengths are equal."""
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
    possible_recall: float = 1.0
    """recall@20 of the best possible ranking."""
    chance: float = 0.2
    """recall@20 of a random ranking; not 0.2 where a fifth of the samples is no whole number."""

    @property
    def skill(self) -> float:
        """Share of what the best possible ranking has beyond a random one (see the module)."""
        return (self.recall_at_20 - self.chance) / (self.possible_recall - self.chance) if self.tells else 0.0

    @property
    def tells(self) -> bool:
        """Whether lengths differ so much that a ranking can be right or wrong."""
        return self.possible_recall - self.chance >= LEAST_TO_FIND

    @property
    def clears(self) -> bool:
        """Whether it reaches the upper bounds."""
        return self.skill >= SKILL_UPPER and self.kendall_tau >= TAU_UPPER


class OnlineRanker:
    """A ranker that predicts, measures its accuracy and can be refitted during a run."""

    def __init__(
        self,
        model: LengthModel | None = None,
        *,
        seed: int = 0,
        window: int = WINDOW,
        written_by: str | None = None,
    ) -> None:
        """
        Args:
            model: the model to begin with.
            seed: seed of refits.
            window: number of newest samples to refit on.
            written_by: name of the language model that writes the run's answers.

        Raises:
            RankerError: the window is not positive.
        """
        if window < 1:
            raise RankerError(f"window is {window}; expected at least 1 sample")
        self.model = model
        self.seed = seed
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
            self.trusted = _accuracy(model.judged.expected, model.judged.length).clears

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
        return self.model.predict(prompts, named, history, limit=limit)

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
        measured = _accuracy(expected, length)
        self._measured.append(measured)
        steps = list(self._measured)
        figures = [(m.recall_at_20, m.kendall_tau, m.possible_recall, m.chance) for m in steps]
        recall, tau, possible, chance = (sum(values) / len(steps) for values in zip(*figures, strict=True))
        self.trust = now = Trust(recall, tau, sum(m.samples for m in steps), possible, chance)
        self.trusted = now.skill >= SKILL_LOWER and tau >= TAU_LOWER if self.trusted else now.clears
        return measured

    @property
    def doubts(self) -> str:
        """Why predictions are not trusted; '': they are."""
        if self.trusted:
            return ""
        if self.trust is None:
            return "none of this run has been measured yet"
        if not self.trust.tells:
            return "nearly all lengths are equal"
        recall, possible, chance = self.trust.recall_at_20, self.trust.possible_recall, self.trust.chance
        if self.trust.skill < SKILL_UPPER:
            needed = chance + SKILL_UPPER * (possible - chance)
            return f"recall@20 is {recall:.2f}, {needed:.2f} is needed and {possible:.2f} possible"
        return f"Kendall's tau is {self.trust.kendall_tau:.2f}, {TAU_UPPER:.2f} is needed"

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
        return partial(_fit, kind, list(self._rows), self.seed + self._refits, self.written_by)


def _accuracy(expected: Array, length: Array) -> Trust:
    """Return the accuracy of expected lengths [N]; tau is 0 where it is undefined."""
    tau = kendall_tau(expected, length)
    recall, possible, chance = (recall_at(score, length, 0.2) for score in (expected, length, np.zeros(len(length))))
    return Trust(recall, 0.0 if math.isnan(tau) else tau, len(length), possible, chance)


def _fit(kind: str, rows: list[Mapping[str, Any]], seed: int, written_by: str | None) -> LengthModel:
    return fit_again(kind, from_rows(rows), seed, written_by=(written_by,) if written_by else ())
