"""The evaluator of a running job: holds samples until they are scored, and writes the rows.

`evaluation_plan.py` decides. Without `evaluation` in the run file nothing is ever due.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from streamrl.config.run import RunConfig
from streamrl.controller.evaluation_plan import Evaluations, EvaluationSample
from streamrl.controller.group_source import GroupSource
from streamrl.rollouts.types import Group, Sample
from streamrl.run_dir import layout
from streamrl.run_dir.evaluations import EvaluationRow, best, read_evaluations
from streamrl.run_dir.jsonl import RowWriter
from streamrl.tasks.source import PromptSource


class Evaluator:
    """The evaluations of a run, if it has any."""

    def __init__(
        self, run: RunConfig, run_dir: Path, groups: GroupSource, mark_best: Callable[[int, float], None]
    ) -> None:
        """
        Args:
            run: the run file.
            run_dir: the run's folder.
            groups: source of groups, for its chat template.
            mark_best: called with the step and the score of a version that is the best so far.

        Raises:
            UserError: there are not enough prompts that fit the context.
            RunFailed: a procedural task could not make an item.
        """
        self._evaluations: Evaluations | None = None
        self._mark_best = mark_best
        self._samples: dict[str, Sample] = {}
        """Generated samples that wait for their reward, by id."""
        if run.evaluation is None:
            return
        source = PromptSource(run.evaluation.held_out(run.tasks), run.seed)
        self._evaluations = Evaluations(
            run.evaluation, run.seed, source, groups.tokens, groups.longest_prompt, run.steps
        )
        self._path = run_dir / layout.EVALUATIONS
        self._writer = RowWriter(self._path, EvaluationRow)

    def rewind(self, step: int) -> None:
        """Rewind to a resumed run's step: forget evaluations of later versions and mark earlier ones as done."""
        if self._evaluations is not None:
            self._writer.rewind(step)
            self._evaluations.restore(read_evaluations(self._path))

    @property
    def pending(self) -> list[int]:
        """Versions that are being evaluated."""
        return self._evaluations.pending if self._evaluations else []

    @property
    def unfinished(self) -> int:
        """Number of samples without a reward."""
        return self._evaluations.unfinished if self._evaluations else 0

    def due(self, version: int) -> bool:
        """Return whether a version that is now served should be evaluated."""
        return self._evaluations is not None and self._evaluations.due(version)

    def begin(self, version: int, now: float) -> list[Group]:
        """Begin a version's evaluation; return its groups."""
        assert self._evaluations is not None
        return self._evaluations.begin(version, now)

    def samples(self, group: Group) -> list[EvaluationSample]:
        """Return the completions to generate of a group."""
        assert self._evaluations is not None
        return self._evaluations.samples(group)

    def open_groups(self) -> dict[str, Group]:
        """Return the groups of evaluations in flight, by id."""
        return self._evaluations.open_groups() if self._evaluations else {}

    def unfinished_samples(self, group: Group) -> list[EvaluationSample]:
        """Return the completions of a group that generation has not finished."""
        return [sample for sample in self.samples(group) if self.awaits(sample[0]) and sample[0] not in self._samples]

    def awaits(self, sample_id: str) -> bool:
        """Return whether a sample belongs to an evaluation and has no reward yet."""
        return self._evaluations is not None and self._evaluations.awaits(sample_id)

    def received(self, sample: Sample) -> Group:
        """Record a generated sample; return its group, which says how to score it."""
        assert self._evaluations is not None
        self._samples[sample.sample_id] = sample
        return self._evaluations.group_of(sample.sample_id)

    def scored(self, sample_id: str, reward: float, error: str | None, now: float) -> None:
        """Record a sample's reward; with the last one of a version, write its row and mark it if it is the best."""
        assert self._evaluations is not None
        sample = self._samples.pop(sample_id)
        row = self._evaluations.finish(sample_id, reward, error, sample.output_length, sample.token_versions, now)
        if row is None:
            return
        self._writer.append(row)
        if best(read_evaluations(self._path)) == row:
            self._mark_best(row.step, row.score)
