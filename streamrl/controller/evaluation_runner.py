"""The evaluator of a running job: holds samples until they are scored, and writes the rows.

`evaluation_plan.py` decides. Without `evaluation` in the run file nothing is ever due.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from streamrl.config.evaluation import EvaluationConfig
from streamrl.config.run import RunConfig
from streamrl.controller.evaluation_plan import Evaluations, choose_prompts
from streamrl.controller.group_source import GroupSource, SampleDraw
from streamrl.rollouts.types import Group, Sample
from streamrl.run_dir import layout
from streamrl.run_dir.evaluations import EvaluationRow, best, read_evaluations
from streamrl.run_dir.jsonl import RowWriter
from streamrl.tasks.source import PromptSource


class Evaluator(Evaluations):
    """The evaluations of a run, if it has any."""

    def __init__(
        self, run: RunConfig, run_dir: Path, groups: GroupSource, mark_best: Callable[[int | None, float], None]
    ) -> None:
        """Choose the prompts, in the chat template of `groups`.

        Args:
            mark_best: called with the step and the score of a version that is the best so far; with None if a run
                goes back to where no version is.

        Raises:
            UserError: there are not enough prompts that fit the context.
            RunFailed: a procedural task could not make an item.
        """
        self._mark_best = mark_best
        self._samples: dict[str, Sample] = {}
        """Generated samples that wait for their reward, by id."""
        self._writer: RowWriter[EvaluationRow] | None = None
        prompts: list[Group] = []
        if (config := run.evaluation) is not None:
            source = PromptSource(config.held_out(run.tasks), run.seed)
            prompts = choose_prompts(config.prompts, source, groups.tokens, groups.longest_prompt)
            self._writer = RowWriter(run_dir / layout.EVALUATIONS, EvaluationRow)
        super().__init__(config or EvaluationConfig(), run.seed, prompts, run.steps)

    @property
    def generating(self) -> int:
        """Number of awaited samples that generation has not finished, over all versions."""
        return self.unfinished - self.unscored

    @property
    def unscored(self) -> int:
        """Number of generated samples that wait for their reward, over all versions."""
        return len(self._samples)

    def rewind(self, step: int) -> None:
        """Rewind to a resumed run's step: forget evaluations of later versions and mark earlier ones as done.

        The best version is then the best of the earlier ones: the one before may have been a later one.
        """
        if self._writer is not None:
            self._writer.rewind(step)
            rows = read_evaluations(self._writer.path)
            self.restore(rows)
            found = best(rows)
            self._mark_best(None if found is None else found.step, 0.0 if found is None else found.score)
            self.plan(step, -1)

    def due(self, step: int, coming: Collection[int] = ()) -> bool:
        """Return whether a version should be evaluated, now that it is served; arguments as in `Evaluations.due`."""
        return self._writer is not None and super().due(step, coming)

    def unfinished_samples(self, group: Group) -> list[SampleDraw]:
        """Return the completions of a group that generation has not finished."""
        return [sample for sample in self.samples(group) if self.generates(sample[0])]

    def generates(self, sample_id: str) -> bool:
        """Return whether a sample belongs to an evaluation and has not arrived yet."""
        return self.awaits(sample_id) and sample_id not in self._samples

    def received(self, sample: Sample) -> Group:
        """Record a generated sample; return its group, which says how to score it."""
        self._samples[sample.sample_id] = sample
        return self.group_of(sample.sample_id)

    def scored(self, sample_id: str, reward: float | None, now: float) -> None:
        """Record a sample's reward (None: void).

        With the last one of a version, mark the version if it is the best and write its row. A run whose last version
        has a row has nothing left to do, and is not resumed: a kill in between must leave the mark, not the row.
        """
        assert self._writer is not None
        sample = self._samples.pop(sample_id)
        row = self.finish(sample_id, reward, sample.output_length, sample.sampled_versions, now)
        if row is not None:
            if best([*read_evaluations(self._writer.path), row]) == row:
                self._mark_best(row.step, row.score)
            self._writer.append(row)
