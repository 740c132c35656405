"""The `evaluation:` section of a run file: held-out tasks that are evaluated during training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pydantic import Field, model_validator

from streamrl.config.cluster import StrictModel
from streamrl.config.tasks import Task


class EvaluationConfig(StrictModel):
    """Evaluation of the policy on held-out tasks."""

    every: int = Field(10, ge=1, description="optimizer steps between evaluations (the last step is always evaluated)")
    at_start: bool = Field(True, description="also evaluate the untrained model (version 0)")
    tasks: list[Task] = Field(
        default_factory=list,
        description="held-out tasks; files must differ from those in training. Empty: the run's own procedural tasks "
        "with other items",
    )
    prompts: int = Field(64, ge=1, description="prompts per evaluation, the same ones each time")
    samples: int = Field(
        4, ge=0, description="sampled completions per prompt: the n of pass@k, for k up to n (0: greedy only)"
    )
    greedy: bool = Field(True, description="also generate one greedy completion per prompt")
    temperature: float | None = Field(
        None,
        ge=0.01,
        le=2,
        description="temperature of the samples (default: as in training, like top_p, top_k and min_p always)",
    )
    threshold: float = Field(
        1.0, description="smallest reward with which a completion passes; set it for rewards that never reach 1"
    )
    seed: int = Field(
        0,
        ge=0,
        description="with the run's seed, chooses the held-out items of procedural tasks and the order of a file",
    )

    @model_validator(mode="after")
    def _something_to_do(self) -> Self:
        if not self.samples and not self.greedy:
            raise ValueError("evaluation with samples: 0 and greedy: false would generate nothing")
        return self

    def held_out(self, run_tasks: Sequence[Task]) -> list[Task]:
        """Return the evaluation's tasks under names of their own, by which prompts are issued and scored.

        A procedural task derives the seed of its items from the run's seed and its name, so a different name gives it
        items that differ from those in training.

        Args:
            run_tasks: the tasks of the training.

        Raises:
            ValueError: a file is also trained on, two tasks share a name, or there is nothing to evaluate on.
        """
        tasks: list[Task] = list(self.tasks) or [task for task in run_tasks if task.is_procedural]
        if not tasks:
            raise ValueError(
                "evaluation.tasks is empty and no task of the run is procedural: name a held-out file, or the "
                "task of an environment, with an environment.config of its own where episodes do not follow from the "
                "item's seed (verifiers: another split of the taskset)"
            )
        names = [task.key for task in tasks]
        if len(names) != len(set(names)):
            raise ValueError(f"evaluation.tasks need different names (set label), got {names}")
        trained = {task.rows: task.key for task in run_tasks if task.rows is not None}
        for task in tasks:
            if (rows := task.rows) in trained:
                raise ValueError(
                    f"evaluation task {task.key!r} reads {rows}, which is trained on by task {trained[rows]!r}: name "
                    "another file or split"
                )
        return [task.renamed(f"eval-{self.seed}/{task.key}") for task in tasks]


def plain_name(task: str) -> str:
    """Return a held-out task's name without the prefix that `held_out` adds."""
    return task.partition("/")[2] or task
