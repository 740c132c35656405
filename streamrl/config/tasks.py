"""The `tasks:` of a run file and of its evaluation: the sources of prompts and the rewards of completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from streamrl.config.cluster import StrictModel


class ReasoningGymTask(StrictModel):
    """A procedural task of the reasoning-gym package, scored by the package's verifier."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    name: str = Field(description="reasoning-gym data set name, e.g. chain_sum")
    label: str = Field("", description="name shown in rollouts and reports (default: the data set's name)")
    weight: float = Field(1.0, gt=0, description="share of the prompts, relative to the other tasks")
    config: dict[str, Any] = Field(default_factory=dict, description="settings of the data set; `size` makes it finite")
    answer: Literal["tag", "last_number", "last_line", "full"] = Field(
        "tag",
        description="where the answer is in a completion: tag: in <answer>...</answer>; last_number; last_line; "
        "full: all of it",
    )
    suffix: str = Field("", description="text after every question (e.g. how to format the answer)")

    @property
    def key(self) -> str:
        """Unique name of the task in a run."""
        return self.label or self.name


class Sandbox(StrictModel):
    """The sandbox in which code written by a model runs."""

    command: list[str] = Field(
        default_factory=list,
        description="sandbox program with its arguments, to which the command to run is appended: "
        "[nsjail, -Mo, --chroot, /srv/sandbox, --]; empty: bubblewrap if it is installed, else namespaces",
    )
    seconds: float = Field(5.0, gt=0, description="time limit of one completion's program and its tests, seconds")
    memory_mb: int = Field(1024, ge=64, description="address space limit of each process, MiB")


class FileTask(StrictModel):
    """A task whose prompts come from a JSONL or Parquet file, or from a Hugging Face data set."""

    kind: Literal["file", "hf_dataset"]
    name: str = Field(description="name shown in rollouts and reports")
    path: str = Field(description="file (.jsonl, .parquet), or Hugging Face data set: folder, id, or id:subset")
    split: str = Field("train", description="split of the data set (hf_dataset only)")
    weight: float = Field(1.0, gt=0, description="share of the prompts, relative to the other tasks")
    prompt_column: str = "prompt"
    answer_column: str | None = Field(
        "answer", description="column with the reference answer, passed to the reward; null: none"
    )
    reward: str = Field(
        "math_verify", description="'math_verify', 'exact_match', 'python_tests', or your own 'module:function'"
    )
    sandbox: Sandbox | None = Field(None, description="python_tests: sandbox for the model's code (required)")
    suffix: str = ""
    shuffle: bool = Field(True, description="a new order in every epoch; false: the file's order (a curriculum)")

    @property
    def key(self) -> str:
        """Unique name of the task in a run."""
        return self.name

    @model_validator(mode="after")
    def _runs_in_a_sandbox(self) -> Self:
        if self.reward == "python_tests" and self.sandbox is None:
            raise ValueError(
                "reward python_tests runs code that a model wrote: it is off until the task has a `sandbox` "
                "(`sandbox: {}`: bubblewrap if it is installed)"
            )
        if self.reward != "python_tests" and self.sandbox is not None:
            raise ValueError(f"reward {self.reward} does not use a sandbox: only python_tests does")
        return self


Task = Annotated[ReasoningGymTask | FileTask, Field(discriminator="kind")]


def default_tasks() -> list[Task]:
    """Return three easy reasoning-gym tasks that a 135M model sometimes solves."""
    return [
        ReasoningGymTask(
            name="chain_sum",
            config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            answer="last_number",
        ),
        ReasoningGymTask(name="letter_counting", config={"min_words": 1, "max_words": 2}, answer="last_number"),
        ReasoningGymTask(name="count_bits", config={"max_n": 15}, answer="last_number"),
    ]
