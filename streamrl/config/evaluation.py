"""The `evaluation:` of a run file: held-out tasks that are tried while training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pydantic import Field, model_validator

from streamrl.config.cluster import StrictModel
from streamrl.config.tasks import FileTask, ReasoningGymTask, Task


class EvaluationConfig(StrictModel):
    """When and on what the policy is evaluated."""

    every: int = Field(10, ge=1, description="optimizer steps between evaluations (the last step is always evaluated)")
    at_start: bool = Field(True, description="evaluate the untrained model too (version 0)")
    tasks: list[Task] = Field(
        default_factory=list,
        description="held-out tasks; a file must be another one than in training. Empty: the run's own procedural "
        "tasks, with other items",
    )
    prompts: int = Field(64, ge=1, description="prompts of each evaluation, always the same ones")
    samples: int = Field(4, ge=0, description="sampled completions per prompt: the k of pass@k (0: greedy only)")
    greedy: bool = Field(True, description="one completion per prompt by the likeliest token each time, too")
    temperature: float | None = Field(
        None, gt=0, le=5, description="of the samples (default: as in training; top_p and top_k always are)"
    )
    threshold: float = Field(1.0, description="a completion passes with a reward of at least this")
    seed: int = Field(
        0,
        ge=0,
        description="chooses the held-out items of procedural tasks and the order of a file, with the run's seed",
    )

    @model_validator(mode="after")
    def _something_to_do(self) -> Self:
        if not self.samples and not self.greedy:
            raise ValueError("evaluation with samples: 0 and greedy: false would generate nothing")
        return self

    def held_out(self, run_tasks: Sequence[Task]) -> list[Task]:
        """The tasks of an evaluation under names of their own: prompts are asked and scored under these names.

        A procedural task draws its items from a seed made of the run's seed and its name, so the other name is what
        makes its items other ones than in training.

        Args:
            run_tasks: the tasks that are trained on.

        Raises:
            ValueError: a file is trained on too, two tasks have one name, or there is nothing to evaluate on.
        """
        tasks: list[Task] = list(self.tasks) or [task for task in run_tasks if isinstance(task, ReasoningGymTask)]
        if not tasks:
            raise ValueError("evaluation.tasks is empty and no task of the run is procedural: name a held-out file")
        names = [task.key for task in tasks]
        if len(names) != len(set(names)):
            raise ValueError(f"evaluation.tasks need different names (set label), got {names}")
        trained = {(task.path, task.split) for task in run_tasks if isinstance(task, FileTask)}
        for task in tasks:
            if isinstance(task, FileTask) and (task.path, task.split) in trained:
                raise ValueError(f"evaluation task {task.key!r} reads {task.path} ({task.split}), which is trained on")
        return [self._renamed(task) for task in tasks]

    def _renamed(self, task: Task) -> Task:
        name = f"eval-{self.seed}/{task.key}"
        return task.model_copy(update={"label" if isinstance(task, ReasoningGymTask) else "name": name})


def plain_name(task: str) -> str:
    """A held-out task's name as its user knows it: without what `held_out` puts before it."""
    return task.partition("/")[2] or task
