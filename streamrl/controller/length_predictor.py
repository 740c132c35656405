"""The length predictor of a run: predicts output lengths of issued groups and learns from finished ones.

The ranker (`ranker.online`) observes every finished sample and is refitted in a thread, for which no step waits
(`ranker_refits`): the newest model that is ready predicts the next prompts. All predictions are recorded and compared
with the actual lengths. Forecasts are corrected by what earlier ones were worth (`scheduler.cost.recalibration`), and
all that follows is about corrected ones. Dispatch gets them only while two judges agree: the ranking is right
(`ranker.online`), and each step, replayed with its true lengths, shows that dispatch by the forecasts would not have
cost time (`scheduler.dispatch.outcome_trust`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ranker.data import EPISODE
from ranker.errors import RankerError
from ranker.model import LengthModel
from ranker.online import OnlineRanker, Trust
from scheduler.cost.length_forecast import Forecast
from scheduler.cost.recalibration import Recalibration
from scheduler.dispatch.outcome_trust import OutcomeTrust
from scheduler.dispatch.registry import BLIND, objective_of, policy_for
from scheduler.simulation.generation_simulator import SimulatedInstance, SimulatedRequest
from scheduler.simulation.saving import Replay, Saving
from streamrl.config.run import RunConfig
from streamrl.controller.group_source import sample_ids
from streamrl.controller.ranker_refits import LONG_PAUSE, PAUSE, RankerRefits
from streamrl.errors import UserError, reaching
from streamrl.rollouts.types import Group, Sample

log = logging.getLogger(__name__)

_OF_GROUP = ("group_id", "task", "epoch", "step", "prompt")
_OF_SAMPLE = ("sample_id", "output_length", "finish_reason")
COLUMNS = (*_OF_GROUP, *_OF_SAMPLE, "void_cause", EPISODE)
"""Columns of a rollout row that the ranker learns from."""
MOST_SIMULATED = 8192
"""Samples of a step that are simulated, whole groups from the first on; more would take too many seconds."""


@dataclass(frozen=True)
class StepLengths:
    """Quality of a finished step's length predictions."""

    measured: Trust | None
    """Accuracy of the predictions; None: nothing was predicted, or too few samples finished."""
    saving: Saving | None
    """Saving by dispatch, simulated from the step's lengths and the instances' step times, 0 if it went by load; None:
    not simulated, as of episodes, whose turns come one at a time.
    """
    dispatched_by: bool = False
    """Whether dispatch went by the predictions."""
    refit_s: float | None = None
    """Seconds of the ranker's refit that has ended since the step before; None: none has."""


class LengthPredictor:
    """The ranker of a run, with the trust in its predictions."""

    def __init__(self, run: RunConfig, sites: int = 1) -> None:
        """
        Args:
            run: the run.
            sites: number of its sites: with several, the choice of a site goes by forecasts, whatever the policy.

        Raises:
            UserError: the file of `ranker.path` is not a ranker.
        """
        self.run = run
        model = load_ranker(run)
        self.ranker = OnlineRanker(model, seed=run.seed, window=run.ranker.window, written_by=run.model.path)
        self.recalibration = Recalibration()
        """Corrects forecasts of completions; episodes keep theirs."""
        self.outcome = OutcomeTrust()
        """Judges forecasts by what dispatch by them would have cost or saved."""
        self.train_tokens_s: float | None = None
        """Tokens that the trainer processed per second in the last step; None before the first."""
        self._max_turns = {task.key: task.max_turns for task in run.agent_tasks}
        self._policy = policy_for(run.schedule.name, run.dispatch.policy)
        self.refits = RankerRefits(self.ranker, LONG_PAUSE if self._policy in BLIND and sites == 1 else PAUSE)
        self._refit_s: float | None = None
        """Seconds of the refit that ended last; None: it has been reported."""
        self._forecasts: dict[str, Forecast] = {}
        """Forecasts of groups in flight, whether dispatch got them or not."""
        self._uncorrected: dict[str, Forecast] = {}
        """The same as the ranker gave them."""
        self.note = ""
        """Last change of trust, as shown to the operator."""
        self._reported_trusted = False
        self._report_trust(0)
        if model is not None and not self.ranker.same_writer:
            writers = ", ".join(model.written_by) or "a model that its file does not name"
            self.note = (
                f"ranker.path: {run.ranker.path} learned from answers of {writers}, and this run's model is "
                f"{run.model.path}: its predictions are not trusted before they have been right here"
            )
            log.warning(self.note)

    def restore(self, rows: Iterable[dict[str, Any]]) -> None:
        """Learn from a resumed run's earlier rollouts, oldest first."""
        self.ranker.observe(list(rows))
        if self.run.ranker.refit_every:
            self.refits.refit_now()

    def predict(self, groups: Sequence[Group]) -> None:
        """Set the predictions of new groups, which may be of several steps, in place."""
        if not groups:
            return
        self._adopt_refit()
        limit = np.array([max(1, self._most_tokens(group)) for group in groups])
        prediction = self.ranker.predict(
            [group.prompt for group in groups],
            [group.task for group in groups],
            max(group.step for group in groups),  # what has been observed is all of earlier steps
            limit=limit,
        )
        if prediction is None:
            return
        told = [Forecast.from_quantiles(prediction.levels, quantiles) for quantiles in prediction.quantiles]
        self._uncorrected |= {group.group_id: forecast for group, forecast in zip(groups, told, strict=True)}
        forecasts = [
            forecast if group.agent else self.recalibration.corrected(forecast, float(most))
            for group, forecast, most in zip(groups, told, limit, strict=True)
        ]
        for group, forecast in zip(groups, forecasts, strict=True):
            group.predicted_length = forecast.mean
            self._forecasts[group.group_id] = forecast
            group.forecast = forecast if self.trusted else None
            self.ranker.expect(sample_ids(group), forecast.mean)

    def _adopt_refit(self) -> None:
        """Go on with the model of a refit that has ended."""
        if (seconds := self.refits.adopt()) is not None:
            self._refit_s = seconds

    def _most_tokens(self, group: Group) -> int:
        """Return the most tokens that one sample of a group may have: a completion, or all turns of an episode."""
        longest = self.run.sampling.max_tokens
        if group.agent:
            return longest * self._max_turns[group.task]
        return min(longest, self.run.model.max_context - len(group.prompt_tokens))

    @property
    def trusted(self) -> bool:
        """Whether requests get forecasts; a policy that ignores them leaves nothing to replay."""
        return self.ranker.trusted and (self._policy in BLIND or self.outcome.trusted)

    @property
    def doubts(self) -> str:
        """Why requests get no forecasts; '': they do."""
        if self.trusted or self.ranker.doubts:
            return self.ranker.doubts
        if (mean := self.outcome.mean) is None:
            return "no step has been replayed by them"
        rarely = "" if mean > 1 else ", and too many of them clearly more"
        return f"replays by them take {mean:.2f} of least-loaded's time{rarely}"

    def step_trained(self, groups: Sequence[Group], seconds: float) -> float | None:
        """Record the seconds in which the trainer worked on a step's groups; return its tokens per second."""
        tokens = sum(len(g.prompt_tokens) + m.sample.output_length for g in groups for m in g.members())
        if tokens and seconds > 0:
            self.train_tokens_s = tokens / seconds
        return self.train_tokens_s

    def observe(self, groups: Sequence[Group]) -> Trust | None:
        """Observe all samples of a step; return the accuracy of its predictions, which decides on trust."""
        rows: list[dict[str, Any]] = []
        for group in groups:
            shared = {name: getattr(group, name) for name in _OF_GROUP}
            for m in group.members():
                ended = {"void_cause": m.void and m.void.cause.value, EPISODE: True if m.sample.trajectory else None}
                rows.append(shared | {name: getattr(m.sample, name) for name in _OF_SAMPLE} | ended)
        self.ranker.observe(rows)
        return self.ranker.end_step()

    async def learn(self, groups: Sequence[Group], fleet: Sequence[SimulatedInstance]) -> StepLengths:
        """Observe a complete step, begin a refit if due and simulate the saving; the slow parts run in threads."""
        measured = self.observe(groups)
        self._adopt_refit()
        every = self.run.ranker.refit_every
        if every and groups[0].step % every == 0:
            await self.refits.begin()
            self._adopt_refit()
        forecasts = {group.group_id: self._forecasts.pop(group.group_id, None) for group in groups}
        uncorrected = {group.group_id: self._uncorrected.pop(group.group_id, None) for group in groups}
        dispatched = [group for group in groups if not group.agent]  # a site places turns, which it forecasts itself
        self._recalibrate(dispatched, uncorrected)
        saving = await self._replay(dispatched, forecasts, fleet)
        used = self._policy not in BLIND and any(group.forecast for group in dispatched)
        if saving is not None and not used:
            saving = replace(saving, policy=saving.least_loaded)
        self._report_trust(groups[0].step)
        seconds, self._refit_s = self._refit_s, None
        return StepLengths(measured, saving, used, seconds)

    async def _replay(
        self, groups: Sequence[Group], forecasts: Mapping[str, Forecast | None], fleet: Sequence[SimulatedInstance]
    ) -> Saving | None:
        """Simulate a step with its true lengths, and judge its forecasts by the outcome.

        Args:
            groups: the step's groups of single completions.
            forecasts: the forecast of each group, by its id, whether dispatch got it or not.
            fleet: the instances; none if all have died since.

        Returns:
            The saving by dispatch by these forecasts; None: there is nothing to simulate.
        """
        requests: list[SimulatedRequest] = []
        for group in groups:
            own = [_simulated(group, m.sample, forecasts[group.group_id]) for m in group.members()]
            requests += own if len(requests) + len(own) <= MOST_SIMULATED else []
        if not requests or not fleet:
            return None
        objective = objective_of(self.run.schedule.name, self.train_tokens_s or math.inf)
        longest, affinity = self.run.sampling.max_tokens, self.run.batch.samples_per_prompt
        replay = Replay(fleet, self._policy, longest, affinity, objective)
        saving = await asyncio.to_thread(replay.saving, requests)
        forecast = self._policy not in BLIND and any(forecasts[group.group_id] for group in groups)
        if forecast and saving.least_loaded > 0:
            others = await asyncio.to_thread(replay.resampled_ratios, requests)
            self.outcome.record([saving.policy / saving.least_loaded, *others])
        return saving

    def _recalibrate(self, groups: Sequence[Group], told: Mapping[str, Forecast | None]) -> None:
        """Learn what a step's forecasts, as the ranker gave them, were worth."""
        seen = [
            (forecast, length, group.group_id, length < self._most_tokens(group))
            for group in groups
            if (forecast := told[group.group_id]) is not None
            for length in (member.sample.output_length for member in group.members())
            if length  # 0: no site could generate it
        ]
        if seen:
            self.recalibration.record(*zip(*seen, strict=True))

    def state(self) -> dict[str, Any]:
        """Return the state of the predictions, for the run's status."""
        trust = self.ranker.trust
        return {
            "trusted": self.trusted,
            "used": self.trusted and self._policy not in BLIND,
            "recall_at_20": trust.recall_at_20 if trust else None,
            "kendall_tau": trust.kendall_tau if trust else None,
            "doubts": self.doubts,
            "note": self.note,
        }

    def _report_trust(self, step: int) -> None:
        """Log a change of trust."""
        if self.trusted == self._reported_trusted:
            return
        self._reported_trusted = self.trusted
        trust, mean = self.ranker.trust, self.outcome.mean
        found = [f"recall@20 {trust.recall_at_20:.2f}, tau {trust.kendall_tau:.2f}"] if trust else []
        found += [f"by replays {mean:.2f} of least-loaded's time"] if mean is not None else []
        found = found if self.trusted else [self.doubts]
        after = f"after step {step}" if step else "from the start"
        what, then = ("trusted", "goes by them") if self.trusted else ("not trusted any more", "by load alone")
        if self._policy in BLIND:
            then = f"is {self._policy}, which ignores them"
        self.note = f"length predictions are {what} {after} ({', '.join(found)}): dispatch {then}"
        log.info(self.note)


def _simulated(group: Group, sample: Sample, forecast: Forecast | None) -> SimulatedRequest:
    return SimulatedRequest(
        sample.sample_id, sample.output_length, group.group_id, len(group.prompt_tokens), forecast=forecast
    )


def load_ranker(run: RunConfig) -> LengthModel | None:
    """Load the model that a run begins with; None: the run file names none.

    Raises:
        UserError: the file is not a ranker.
    """
    if run.ranker.path is None:
        return None
    try:
        with reaching("ranker.path"):
            return LengthModel.load(Path(run.ranker.path))
    except RankerError as error:
        raise UserError(f"ranker.path: {error}") from error
