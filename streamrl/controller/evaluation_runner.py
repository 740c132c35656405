"""Evaluation in a running job: `evaluation_plan.py` decides, here samples wait for their rewards and rows are
written. Without an `evaluation` in the run file nothing is ever due."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from streamrl.config.run import RunConfig
from streamrl.controller.evaluation_plan import Evaluations, EvaluationSample
from streamrl.controller.group_source import GroupSource
from streamrl.rollouts.types import Group, Sample
from streamrl.run_dir import layout
from streamrl.run_dir.evaluations import EvaluationWriter, best, read_evaluations
from streamrl.tasks.source import PromptSource


class Evaluator:
    """The evaluations of a run, if it has any."""

    def __init__(
        self, run: RunConfig, run_dir: Path, groups: GroupSource, mark_best: Callable[[int, float], None]
    ) -> None:
        """
        Args:
            run: the run file.
            run_dir: its folder.
            groups: knows the chat template.
            mark_best: told of the step and the score of the version that is the best so far.

        Raises:
            UserError, RunFailed: there are not enough prompts.
        """
        self._evaluations: Evaluations | None = None
        self._mark_best = mark_best
        self._samples: dict[str, Sample] = {}
        """Generated, without a reward."""
        if run.evaluation is None:
            return
        source = PromptSource(run.evaluation.held_out(run.tasks), run.seed)
        self._evaluations = Evaluations(
            run.evaluation, run.seed, source, groups.tokens, groups.longest_prompt, run.steps
        )
        self._path = run_dir / layout.EVALUATIONS
        self._writer = EvaluationWriter(self._path)

    def rewind(self, step: int) -> None:
        """A resumed run: evaluations of later versions are forgotten, earlier ones are done."""
        if self._evaluations is not None:
            self._writer.rewind(step)
            self._evaluations.restore(read_evaluations(self._path))

    @property
    def pending(self) -> list[int]:
        """Versions that are being evaluated."""
        return self._evaluations.pending if self._evaluations else []

    @property
    def unfinished(self) -> int:
        """Samples without a reward."""
        return self._evaluations.unfinished if self._evaluations else 0

    def due(self, version: int) -> bool:
        """Whether a version is to be evaluated, once it is served."""
        return self._evaluations is not None and self._evaluations.due(version)

    def begin(self, version: int, now: float) -> list[Group]:
        """The groups of a version's evaluation."""
        assert self._evaluations is not None
        return self._evaluations.begin(version, now)

    def samples(self, group: Group) -> list[EvaluationSample]:
        """The completions wanted of a group."""
        assert self._evaluations is not None
        return self._evaluations.samples(group)

    def open_groups(self) -> dict[str, Group]:
        """Groups of evaluations under way, by id."""
        return self._evaluations.open_groups() if self._evaluations else {}

    def unfinished_samples(self, group: Group) -> list[EvaluationSample]:
        """The completions of a group that generation owes."""
        return [sample for sample in self.samples(group) if self.awaits(sample[0]) and sample[0] not in self._samples]

    def awaits(self, sample_id: str) -> bool:
        """Whether a sample is part of an evaluation and has no reward yet."""
        return self._evaluations is not None and self._evaluations.awaits(sample_id)

    def received(self, sample: Sample) -> Group:
        """A sample has been generated; its group says how it is scored."""
        assert self._evaluations is not None
        self._samples[sample.sample_id] = sample
        return self._evaluations.group_of(sample.sample_id)

    def scored(self, sample_id: str, reward: float, error: str | None, now: float) -> None:
        """A sample has its reward. With the last one of its version the row is written, and the best checkpoint may be
        another."""
        assert self._evaluations is not None
        sample = self._samples.pop(sample_id)
        row = self._evaluations.finish(sample_id, reward, error, sample.output_length, sample.token_versions, now)
        if row is None:
            return
        self._writer.append(row)
        if best(read_evaluations(self._path)) == row:
            self._mark_best(row.step, row.score)
