"""The run file: what is trained, on which tasks, how."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from streamrl.config.cluster import StrictModel


class ModelConfig(StrictModel):
    """The policy."""

    path: str = Field(
        "smollm2-135m",
        description="a name that `streamrl fetch-model` knows, a folder in HF format, or an HF hub id",
    )
    max_context: int = Field(1024, ge=16, description="prompt + completion tokens at most")
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="compute type of trainer and instances (master weights are always fp32)"
    )
    system_prompt: str | None = Field(None, description="system message put before every prompt")


class ReasoningGymTask(StrictModel):
    """A procedural task of the reasoning-gym package, scored by its own verifier."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    name: str = Field(description="reasoning-gym data set name, e.g. chain_sum")
    label: str = Field("", description="name shown in rollouts and reports (default: the data set's name)")
    weight: float = Field(1.0, gt=0, description="share of the mix, relative to the other tasks")
    config: dict[str, Any] = Field(default_factory=dict, description="settings of the data set; `size` makes it finite")
    answer: Literal["tag", "last_number", "last_line", "full"] = Field(
        "tag",
        description="where the answer is: <answer>...</answer>, the last number, the last line, all of it",
    )
    suffix: str = Field("", description="text put after every question (e.g. how to format the answer)")

    @property
    def key(self) -> str:
        """Unique name of the task in a run."""
        return self.label or self.name


class FileTask(StrictModel):
    """Prompts from a JSONL or Parquet file, or from a Hugging Face data set."""

    kind: Literal["file", "hf_dataset"]
    name: str = Field(description="name shown in rollouts and reports")
    path: str = Field(description="file (.jsonl, .parquet), or HF data set: folder, id, or id:subset")
    split: str = Field("train", description="split (hf_dataset only)")
    weight: float = Field(1.0, gt=0)
    prompt_column: str = "prompt"
    answer_column: str | None = Field("answer", description="column with the reference answer, handed to the reward")
    reward: str = Field("math_verify", description="'math_verify', 'exact_match', or 'module:function' of your own")
    suffix: str = ""

    @property
    def key(self) -> str:
        """Unique name of the task in a run."""
        return self.name


Task = Annotated[ReasoningGymTask | FileTask, Field(discriminator="kind")]


class GRPOConfig(StrictModel):
    """Group-relative policy optimisation with a token-level clipped loss (GRPO, arXiv 2402.03300; clip-higher
    and token-level normalisation as in DAPO, arXiv 2503.14476)."""

    name: Literal["grpo"] = "grpo"
    clip_low: float = Field(0.2, gt=0, lt=1, description="ratio is clipped below 1 - clip_low")
    clip_high: float = Field(0.28, gt=0, description="ratio is clipped above 1 + clip_high")
    normalize_by_std: bool = Field(True, description="divide a group's centred rewards by their deviation")
    kl_coef: float = Field(0.0, ge=0, description="weight of the k3 KL estimate to the initial model (0: none)")


class SyncSchedule(StrictModel):
    """Barrier: training starts when the whole batch is finished."""

    name: Literal["sync"] = "sync"


class StreamSchedule(StrictModel):
    """Dynamic batch: the trainer works on groups as they complete; one optimizer step per batch."""

    name: Literal["stream"] = "stream"


class BatchConfig(StrictModel):
    """Shape of one optimizer step."""

    prompts_per_step: int = Field(8, ge=1, description="prompts (groups) per optimizer step")
    samples_per_prompt: int = Field(8, ge=1, description="completions per prompt (group size)")
    micro_batch_tokens: int = Field(
        2048, ge=64, description="most tokens in one forward/backward of a rank (a larger group runs alone)"
    )


class SamplingConfig(StrictModel):
    """How completions are drawn."""

    temperature: float = Field(1.0, gt=0, le=5)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0: all tokens")
    max_tokens: int = Field(128, ge=1, description="most tokens in one completion")
    stop: list[str] = Field(default_factory=list, description="strings that end a completion")


class OptimizerConfig(StrictModel):
    """AdamW with fp32 master weights."""

    lr: float = Field(5e-6, gt=0)
    warmup_steps: int = Field(0, ge=0)
    decay: Literal["constant", "cosine"] = "constant"
    min_lr_fraction: float = Field(0.1, ge=0, le=1, description="cosine ends at lr times this")
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    gradient_checkpointing: bool = Field(False, description="recompute activations: less memory, slower")


class RankerConfig(StrictModel):
    """Predicts output lengths from prompts; learns from the run's own rollouts as they come."""

    path: str | None = Field(
        None, description="a file of `streamrl train-ranker` to begin with; none: nothing is known at the start"
    )
    refit_every: int = Field(1, ge=0, description="optimizer steps between refits on the newest rollouts (0: never)")
    window: int = Field(20_000, ge=100, description="newest samples that a refit learns from")


class DispatchConfig(StrictModel):
    """Which request goes to which instance."""

    policy: Literal[
        "random",
        "round-robin",
        "least-loaded",
        "longest-first",
        "algorithm2",
        "algorithm2-max",
        "group-probe",
        "skew-aware-static",
        "skew-aware",
    ] = Field(
        "skew-aware",
        description="policies of `streamrl simulate`; skew-aware is least-loaded as long as no ranking is trusted",
    )


class WeightSyncConfig(StrictModel):
    """How new weights reach the instances."""

    backend: Literal["auto", "stream", "nccl"] = Field(
        "auto",
        description="stream: ZeroMQ to one relay per site; nccl: vLLM's NCCL engine; auto: nccl on cuda",
    )
    keep_kv: bool = Field(False, description="keep the KV and prefix cache over an update (else cleared)")
    chunk_mb: float = Field(4.0, gt=0, le=256, description="MiB per weight frame")


class CheckpointConfig(StrictModel):
    """When state is saved."""

    every: int = Field(10, ge=1, description="optimizer steps between checkpoints (the last step always saves)")
    keep: int = Field(2, ge=1, description="checkpoints kept, oldest deleted first")


class DeadlineConfig(StrictModel):
    """Longest waits in seconds; on expiry the run ends and says who was waited for."""

    startup_s: float = Field(300, gt=0, description="for a process to say hello")
    generation_s: float = Field(900, gt=0, description="without any finished sample while some are running")
    training_s: float = Field(900, gt=0, description="for one micro-batch or optimizer step")
    weights_s: float = Field(300, gt=0, description="for a new version to reach every instance")
    reward_s: float = Field(20, gt=0, description="for one reward; then the sample gets 0 and an error")
    heartbeat_s: float = Field(60, gt=0, description="without a sign of life of a process")


def default_tasks() -> list[Task]:
    """Three easy reasoning-gym tasks that a 135M model sometimes solves."""
    return [
        ReasoningGymTask(
            name="chain_sum",
            config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            answer="last_number",
        ),
        ReasoningGymTask(name="letter_counting", config={"min_words": 1, "max_words": 2}, answer="last_number"),
        ReasoningGymTask(name="count_bits", config={"max_n": 15}, answer="last_number"),
    ]


class RunConfig(StrictModel):
    """A whole run file; every key has a default, so an empty file is a valid run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9_.-]{1,60}$", description="the run's folder under runs/")
    steps: int = Field(20, ge=1, description="optimizer steps in total")
    seed: int = Field(0, ge=0, lt=2**31)
    model: ModelConfig = Field(default_factory=ModelConfig)
    tasks: list[Task] = Field(default_factory=default_tasks, min_length=1)
    algorithm: GRPOConfig = Field(default_factory=GRPOConfig)
    schedule: Annotated[SyncSchedule | StreamSchedule, Field(discriminator="name")] = Field(
        default_factory=StreamSchedule
    )
    batch: BatchConfig = Field(default_factory=BatchConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    ranker: RankerConfig = Field(default_factory=RankerConfig)
    dispatch: DispatchConfig = Field(default_factory=DispatchConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    weights: WeightSyncConfig = Field(default_factory=WeightSyncConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    deadlines: DeadlineConfig = Field(default_factory=DeadlineConfig)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.sampling.max_tokens >= self.model.max_context:
            raise ValueError(
                f"sampling.max_tokens ({self.sampling.max_tokens}) leaves no room for a prompt in "
                f"model.max_context ({self.model.max_context})"
            )
        names = [task.key for task in self.tasks]
        if len(names) != len(set(names)):
            raise ValueError(f"tasks need different names (set label), got {names}")
        return self
