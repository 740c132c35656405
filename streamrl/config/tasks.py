"""The `tasks:` of a run file and of its evaluation: the sources of prompts and the rewards of completions."""

from __future__ import annotations

import os.path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from streamrl.config.cluster import StrictModel

PYTHON_TESTS = "python_tests"
"""The reward that runs tests."""
MOST_ITEMS = 2**31
"""Most items of a task that makes them: up to there, each has a random seed of its own that numpy takes."""


class TaskKeys(StrictModel):
    """Base of the kinds of tasks, with what the rest of a run asks of any of them."""

    if TYPE_CHECKING:
        name: str
        weight: float
    items_class: ClassVar[str]
    """'module:class' of its items, a `TaskItems` (`streamrl/tasks/task_items.py`)."""

    @property
    def key(self) -> str:
        """Unique name of the task in a run."""
        return self.name

    @property
    def question_suffix(self) -> str:
        """Text after every question; '': none."""
        return ""

    @property
    def shuffles(self) -> bool:
        """Whether items of a fixed number have a new order in every epoch."""
        return True

    @property
    def is_procedural(self) -> bool:
        """Whether it makes other items from another seed, so that an evaluation can hold some out."""
        return False

    @property
    def rows(self) -> str | None:
        """What names the rows that it reads, the same for the same file; None: it makes its items."""
        return None

    @property
    def library(self) -> str | None:
        """Module that its verifier needs and that is slow to import; None: none."""
        return None

    def renamed(self, key: str) -> Self:
        """Return the same task with another `key`."""
        return self.model_copy(update={"name": key})


class ReasoningGymTask(TaskKeys):
    """A procedural task of the reasoning-gym package, scored by the package's verifier."""

    items_class: ClassVar[str] = "streamrl.tasks.procedural:ProceduralItems"

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

    @property
    def question_suffix(self) -> str:
        """Text after every question."""
        return self.suffix

    @property
    def is_procedural(self) -> bool:
        """Always: the seed makes the items."""
        return True

    @property
    def library(self) -> str | None:
        """The package with its verifier."""
        return "reasoning_gym"

    def renamed(self, key: str) -> Self:
        """Return the same task under another label."""
        return self.model_copy(update={"label": key})


class Sandbox(StrictModel):
    """The sandbox in which code written by a model runs."""

    command: list[str] = Field(
        default_factory=list,
        description="sandbox program with its arguments, to which the command to run is appended: "
        "[nsjail, -Mo, --chroot, /srv/sandbox, --]; empty: bubblewrap if it is installed, else namespaces",
    )
    seconds: float = Field(
        5.0, gt=0, description="time limit of one completion's program and its tests, seconds from their start"
    )
    memory_mb: int = Field(1024, ge=64, description="address space limit of each process, MiB")


class FileTask(TaskKeys):
    """A task whose prompts come from a JSONL or Parquet file, or from a Hugging Face data set."""

    items_class: ClassVar[str] = "streamrl.tasks.files:FileItems"

    kind: Literal["file", "hf_dataset"]
    name: str = Field(description="name shown in rollouts and reports")
    path: str = Field(
        description="file (.jsonl, .ndjson, .parquet), or Hugging Face data set: folder, id, or id:subset"
    )
    split: str | None = Field(
        None,
        description="split of the data set (hf_dataset only); none: train, or what a `Dataset` on disk holds",
    )
    weight: float = Field(1.0, gt=0, description="share of the prompts, relative to the other tasks")
    prompt_column: str = Field(
        "prompt", description="column with the prompt: a text, or a list of chat messages that ends with the user's"
    )
    answer_column: str | None = Field(
        "answer", description="column with the reference answer, passed to the reward; null: none"
    )
    reward: str = Field(
        "math_verify", description="'math_verify', 'exact_match', 'python_tests', or your own 'module:function'"
    )
    sandbox: Sandbox | None = Field(None, description="python_tests: sandbox for the model's code (required)")
    suffix: str = Field("", description="text after every prompt (e.g. how to format the answer)")
    shuffle: bool = Field(True, description="a new order in every epoch; false: the file's order (a curriculum)")

    @property
    def question_suffix(self) -> str:
        """Text after every prompt."""
        return self.suffix

    @property
    def shuffles(self) -> bool:
        """Whether every epoch has a new order."""
        return self.shuffle

    @property
    def rows(self) -> str | None:
        """The file that its path leads to; of a data set, its folder or id, and the split if it may have several."""
        place = _place(self.path)
        if self.kind == "file" or is_saved_alone(place):
            return place
        return f"{place if os.path.isdir(place) else self.path} ({self.split_read})"

    @property
    def data_set(self) -> tuple[str, str, str] | None:
        """Folder or id, subset and split of its data set, the same however the path is written; None: it is a file."""
        if self.kind == "file":
            return None
        name, subset = name_and_subset(self.path)
        return _place(name) if os.path.isdir(name) else name, subset or "default", self.split_read

    @property
    def split_read(self) -> str:
        """The split that is read where there are several."""
        return self.split or "train"

    @property
    def library(self) -> str | None:
        """The package of a named reward that needs one."""
        return "math_verify" if self.reward == "math_verify" else None

    @model_validator(mode="before")
    @classmethod
    def _has_splits(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("kind") != "file" or values.get("split") is None:
            return values
        if values["split"] != "train":  # the default once, which is in the configurations of older runs
            named = values["split"]
            raise ValueError(f"split ({named}) belongs to kind: hf_dataset: a file has no splits; leave it out")
        return {key: value for key, value in values.items() if key != "split"}

    @model_validator(mode="after")
    def _runs_in_a_sandbox(self) -> Self:
        if self.reward == PYTHON_TESTS and self.sandbox is None:
            raise ValueError(
                "reward python_tests runs code that a model wrote: it is off until the task has a `sandbox` "
                "(`sandbox: {}`: bubblewrap if it is installed)"
            )
        if self.reward != PYTHON_TESTS and self.sandbox is not None:
            raise ValueError(f"reward {self.reward} does not use a sandbox: only python_tests does")
        return self


class EpisodeDeadlines(StrictModel):
    """Time limits of an episode of an agent task; one that expires ends the episode without a reward."""

    call_s: float = Field(
        600.0,
        gt=0,
        description="seconds that an agent may wait for the whole answer of one call of the model; what it does "
        "between two parts of a stream, or with the rest unread, does not count",
    )
    tool_s: float = Field(30.0, gt=0, description="seconds that one call of a tool may take")
    turn_s: float = Field(
        900.0,
        gt=0,
        description="seconds from one call of the model to the next, or to the end: the answer, the tools, and what "
        "the agent does in between",
    )
    episode_s: float = Field(3600.0, gt=0, description="seconds that a whole episode may take")


class EnvironmentUse(StrictModel):
    """An environment that plays the episodes of an agent task, in processes of its own at each site."""

    name: str = Field(min_length=1, description="name that `streamrl env add` gave it; with a slash: its folder")
    config: dict[str, Any] = Field(
        default_factory=dict, description="keys that replace those of `streamrl env add --config`"
    )
    processes: int = Field(2, ge=1, le=1024, description="processes that step, one CPU core each")
    episodes: int = Field(128, ge=1, description="most episodes that one process has open; further ones wait")
    memory_gb: float = Field(
        2.0,
        gt=0,
        description="GiB that a process may use; at 80 % it gets no new episodes and is replaced, above it is killed. "
        "Programs that an MCP environment starts for its episodes count: only as many are open as fit into 80 %",
    )


class AgentTask(TaskKeys):
    """A task whose samples are episodes: an agent calls the model, and tools, as often as it needs."""

    items_class: ClassVar[str] = "streamrl.tasks.agent_items:AgentItems"

    kind: Literal["agent"]
    name: str = Field(description="name shown in rollouts and reports")
    run: str | None = Field(
        None,
        description="'module:function', an `async def run(task, client)` that plays one episode and returns its "
        "reward, or a mapping of `reward` and further numbers",
    )
    command: list[str] | None = Field(
        None,
        min_length=1,
        description="program with its arguments that plays one episode: it calls the endpoint that OPENAI_BASE_URL "
        'and OPENAI_API_KEY name, finds its item as JSON in TASK, and prints {"reward": ...} as its last line',
    )
    environment: EnvironmentUse | None = Field(
        None,
        description="environment that plays the episode: the model answers its messages until it says that it is over; "
        "without `items` and `path`, an item is a number and a seed",
    )
    path: str | None = Field(
        None, description="file of items (.jsonl, .ndjson, .parquet), all columns of which the agent gets"
    )
    prompt_column: str = Field("prompt", description="column with the text that the agent gets as `prompt`")
    answer_column: str | None = Field(
        None, description="column with the value that the agent gets as `answer`; null: as the column is named"
    )
    items: str | None = Field(
        None,
        description="'module:function', a function (index, seed) that makes item number `index` (from 0): a mapping "
        "of plain values with a text `prompt`; `seed` differs between items, and in evaluations",
    )
    count: int | None = Field(
        None, ge=1, le=MOST_ITEMS, description="number of different `items`; null: they never end"
    )
    weight: float = Field(1.0, gt=0, description="share of the prompts, relative to the other tasks")
    shuffle: bool = Field(True, description="a new order in every epoch; false: always the same (a curriculum)")
    max_turns: int = Field(32, ge=1, description="calls of the model in one episode; further ones are refused")
    deadlines: EpisodeDeadlines = Field(default_factory=EpisodeDeadlines)

    @property
    def shuffles(self) -> bool:
        """Whether every epoch has a new order."""
        return self.shuffle

    @property
    def is_procedural(self) -> bool:
        """Whether a function makes its items, and they never end; a fixed number may be a fixed list.

        An environment may make its own of the number alone, as those of verifiers do, whatever the seed.
        """
        return self.items is not None and self.count is None

    @property
    def rows(self) -> str | None:
        """The file that its path leads to, if it reads one."""
        return None if self.path is None else _place(self.path)

    @property
    def environment_key(self) -> str:
        """What names the processes of its environment, which tasks with the same key share; '': it has none."""
        if self.environment is None:
            return ""
        return f"{self.environment.model_dump_json()} {self.deadlines.tool_s}"

    @model_validator(mode="after")
    def _one_agent_and_one_source(self) -> Self:
        agents = [name for name in ("run", "command", "environment") if getattr(self, name) is not None]
        if len(agents) != 1:
            got = " and ".join(agents) or "none"
            raise ValueError(f"agent task {self.name!r} needs one of `run`, `command` and `environment`, got {got}")
        sources = [name for name in ("path", "items") if getattr(self, name) is not None]
        if len(sources) > 1 or (not sources and self.environment is None):
            given = "both" if sources else "neither"
            raise ValueError(f"agent task {self.name!r} needs either `path` or `items`, got {given}")
        if self.path is not None and self.count is not None:
            raise ValueError(f"agent task {self.name!r}: `count` belongs to `items`; a file has as many as it has rows")
        if self.path is None and (self.prompt_column != "prompt" or self.answer_column is not None):
            raise ValueError(f"agent task {self.name!r}: prompt_column and answer_column belong to `path`")
        return self


Task = Annotated[ReasoningGymTask | FileTask | AgentTask, Field(discriminator="kind")]


def _place(path: str) -> str:
    """Return the absolute path that a run reads, which is seen from the working directory."""
    return os.path.realpath(os.path.expanduser(path))


def name_and_subset(path: str) -> tuple[str, str]:
    """Return the folder (with `~` as the user's) or id of the data set that a path names, and its subset; '': none."""
    name, subset = (path, "") if os.path.isdir(os.path.expanduser(path)) else path.partition(":")[::2]
    folder = os.path.expanduser(name)
    return folder if os.path.isdir(folder) else name, subset


def is_saved_alone(folder: str) -> bool:
    """Return whether a folder holds one data set that `save_to_disk` wrote, not a dictionary of splits."""
    return os.path.isfile(os.path.join(folder, "state.json")) and not os.path.isfile(
        os.path.join(folder, "dataset_dict.json")
    )


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
