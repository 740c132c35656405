"""Output lengths in a run: predicted when a step's groups are issued, learned from when they have finished.

The ranker (`ranker.online`) is told every finished sample and refitted in a thread while the trainer still works on the
step, so that the next step's prompts meet the newest model. Only predictions that are trusted become forecasts, which
dispatch goes by; all are recorded, and measured against what came.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ranker.errors import RankerError
from ranker.model import LengthModel
from ranker.online import OnlineRanker, Trust
from scheduler.cost.length_forecast import Forecast
from scheduler.simulation.generation_simulator import SimulatedInstance, SimulatedRequest
from scheduler.simulation.saving import Saving, saving
from streamrl.config.run import RunConfig
from streamrl.controller.group_source import samples_of
from streamrl.errors import UserError
from streamrl.rollouts.types import Group, Sample

log = logging.getLogger(__name__)

_OF_GROUP = ("group_id", "task", "epoch", "step", "prompt")
_OF_SAMPLE = ("sample_id", "output_length", "finish_reason")
COLUMNS = (*_OF_GROUP, *_OF_SAMPLE)
"""What the ranker learns from, of a rollout row."""
MOST_SIMULATED = 8192
"""Samples of a step above which the saving is not simulated: it would take more than some seconds."""


@dataclass(frozen=True)
class StepLengths:
    """What a finished step tells of its predictions."""

    measured: Trust | None
    """None: nothing was predicted, or too little has finished."""
    saving: Saving | None
    """Simulated from the step's lengths and the instances' step times; None: not done."""


class LengthPredictor:
    """The ranker of a run."""

    def __init__(self, run: RunConfig) -> None:
        """
        Raises:
            UserError: the run's ranker file is none.
        """
        self.run = run
        self.ranker = OnlineRanker(load_ranker(run), seed=run.seed, window=run.ranker.window)
        self.note = ""
        """What was last decided about trust, for people."""
        self._told_trusted = False
        self._tell(0)

    def restore(self, rows: Iterable[dict[str, Any]]) -> None:
        """Learns from a resumed run's earlier rollouts, oldest first."""
        self.ranker.observe(list(rows))
        if self.run.ranker.refit_every:
            self.ranker.refit()

    def predict(self, groups: Sequence[Group]) -> None:
        """Fills in the predictions of a step's groups."""
        if not groups:
            return
        prediction = self.ranker.predict(
            [group.prompt for group in groups],
            [group.task for group in groups],
            [group.group_id for group in groups],
            [[sample_id for sample_id, *_ in samples_of(group, self.run.seed)] for group in groups],
            groups[0].step,
        )
        if prediction is None:
            return
        ranks = places(prediction.score)
        for group, rank, quantiles in zip(groups, ranks, prediction.quantiles, strict=True):
            most = min(self.run.sampling.max_tokens, self.run.model.max_context - len(group.prompt_tokens))
            forecast = Forecast.from_quantiles(prediction.levels, np.minimum(quantiles, most))
            group.predicted_rank, group.predicted_length = float(rank), forecast.mean
            group.forecast = forecast if self.ranker.trusted else None

    def observe(self, groups: Sequence[Group]) -> Trust | None:
        """All samples of a step have come: measures its predictions, and whether they are to be trusted."""
        self.ranker.observe([row for group in groups for row in _rows(group)])
        measured = self.ranker.end_step()
        self._tell(groups[0].step)
        return measured

    async def learn(self, groups: Sequence[Group], fleet: Sequence[SimulatedInstance]) -> StepLengths:
        """The whole work on a step whose samples have come; what takes long runs in a thread."""
        measured = self.observe(groups)
        every = self.run.ranker.refit_every
        if every and groups[0].step % every == 0 and (job := self.ranker.refit_job()) is not None:
            self.ranker.model = await asyncio.to_thread(job)
        requests = [_simulated(group, m.sample) for group in groups for m in group.members()]
        if not 0 < len(requests) <= MOST_SIMULATED:
            return StepLengths(measured, None)
        longest, affinity = self.run.sampling.max_tokens, self.run.batch.samples_per_prompt
        saved = await asyncio.to_thread(saving, requests, fleet, self.run.dispatch.policy, longest, affinity)
        return StepLengths(measured, saved)

    def state(self) -> dict[str, Any]:
        """For the live view."""
        trust = self.ranker.trust
        return {
            "trusted": self.ranker.trusted,
            "recall_at_20": trust.recall_at_20 if trust else None,
            "kendall_tau": trust.kendall_tau if trust else None,
            "note": self.note,
        }

    def _tell(self, step: int) -> None:
        """Says when trust has changed."""
        if self.ranker.trusted == self._told_trusted:
            return
        self._told_trusted = self.ranker.trusted
        trust = self.ranker.trust
        found = f" (recall@20 {trust.recall_at_20:.2f}, tau {trust.kendall_tau:.2f})" if trust else ""
        after = f"after step {step}" if step else "from the start"
        self.note = (
            f"length predictions are trusted {after}{found}: dispatch goes by them"
            if self.ranker.trusted
            else f"length predictions are not trusted any more {after}{found}: dispatch by load alone"
        )
        log.info(self.note)


def _rows(group: Group) -> list[dict[str, Any]]:
    """A group's finished samples, with what the ranker learns from."""
    shared = {name: getattr(group, name) for name in _OF_GROUP}
    return [shared | {name: getattr(m.sample, name) for name in _OF_SAMPLE} for m in group.members()]


def _simulated(group: Group, sample: Sample) -> SimulatedRequest:
    return SimulatedRequest(
        sample.sample_id, sample.output_length, group.group_id, len(group.prompt_tokens), forecast=group.forecast
    )


def places(scores: Sequence[float] | np.ndarray) -> np.ndarray:
    """[n] each score's place among all: 0 the lowest, 1 the highest, equal ones share the mean of theirs."""
    values = np.asarray(scores, dtype=np.float64)
    if len(values) < 2:
        return np.zeros(len(values))
    ordered = np.sort(values)
    first, last = np.searchsorted(ordered, values, "left"), np.searchsorted(ordered, values, "right") - 1
    return np.asarray((first + last) / 2 / (len(values) - 1))


def load_ranker(run: RunConfig) -> LengthModel | None:
    """The model that a run begins with.

    Raises:
        UserError: the file is no ranker.
    """
    if run.ranker.path is None:
        return None
    try:
        return LengthModel.load(Path(run.ranker.path))
    except RankerError as error:
        raise UserError(f"ranker.path: {error}") from error
