"""The run file: what is trained, on which tasks, how."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from streamrl.config.algorithm import AlgorithmConfig, GRPOConfig
from streamrl.config.cluster import StrictModel
from streamrl.config.evaluation import EvaluationConfig
from streamrl.config.schedule import ScheduleConfig, StreamSchedule
from streamrl.config.tasks import Task, default_tasks


class ModelConfig(StrictModel):
    """The policy."""

    path: str = Field(
        "smollm2-135m",
        description="a name that `streamrl fetch-model` knows, a folder in HF format, or an HF hub id",
    )
    max_context: int = Field(1024, ge=16, description="prompt + completion tokens at most")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto",
        description="compute type of trainer and instances (master weights are always fp32); auto: bfloat16 where the "
        "device computes it well, float32 elsewhere",
    )
    system_prompt: str | None = Field(None, description="system message put before every prompt")


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
    price_tolerance: float = Field(
        0.0, ge=0, le=1, description="of several sites: share of the time that may be lost for a cheaper one"
    )


class WeightSyncConfig(StrictModel):
    """How new weights reach the instances."""

    backend: Literal["auto", "stream", "nccl"] = Field(
        "auto",
        description="stream: ZeroMQ to one relay per site; nccl: vLLM's NCCL engine; auto: nccl on cuda, "
        "unless the schedule is colocated",
    )
    encoding: Literal["auto", "raw", "delta"] = Field(
        "auto", description="what relays fetch: raw: all bytes; delta: lossless differences; auto: delta across sites"
    )
    anchor_every: int = Field(
        10, ge=1, description="published versions between complete ones that latecomers begin from (delta)"
    )
    chunk_mb: float = Field(4.0, gt=0, le=256, description="MiB per weight frame at most; less on slow links")
    generation_dtype: Literal["same", "fp8", "int8"] = Field(
        "same",
        description="of the linear weights that instances get; same: that of all other weights; fp8, int8: 8 bits, "
        "which halves what is sent and makes generation off-policy (see algorithm.off_policy)",
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.backend == "nccl" and self.generation_dtype != "same":
            raise ValueError(
                f"weights.backend nccl does not send weights.generation_dtype: {self.generation_dtype}; "
                "set backend: stream, or generation_dtype: same"
            )
        return self


class ElasticityConfig(StrictModel):
    """Keeps generation and training in balance: after a step one instance may be added to a pool, or taken from one."""

    enabled: bool = Field(False, description="within each pool's min_replicas and max_replicas in the cluster file")
    patience: int = Field(2, ge=1, description="steps in a row that must ask for the same change")
    settle: int = Field(1, ge=0, description="steps after a change that are not looked at")
    margin: float = Field(
        0.05, ge=0, lt=1, description="share of a stage's time by which the imbalance must exceed what a change saves"
    )
    min_saving: float = Field(0.05, ge=0, lt=1, description="share of generation's time that an instance must save")


class RecoveryConfig(StrictModel):
    """What becomes of processes that die."""

    restarts: int = Field(5, ge=0, description="of one process within `window_s`; then it stays dead")
    window_s: float = Field(600.0, gt=0)
    pause_s: float = Field(1.0, ge=0, description="before the first restart; twice as long before each further one")
    longest_pause_s: float = Field(60.0, ge=0)
    suspect_s: float = Field(3.0, gt=0, description="silence of an instance after which others go on with what it had")


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


class RunConfig(StrictModel):
    """A whole run file; every key has a default, so an empty file is a valid run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9_.-]{1,60}$", description="the run's folder under runs/")
    steps: int = Field(20, ge=1, description="optimizer steps in total")
    seed: int = Field(0, ge=0, lt=2**31)
    model: ModelConfig = Field(default_factory=ModelConfig)
    tasks: list[Task] = Field(default_factory=default_tasks, min_length=1)
    algorithm: AlgorithmConfig = Field(default_factory=GRPOConfig)
    schedule: ScheduleConfig = Field(default_factory=StreamSchedule)
    evaluation: EvaluationConfig | None = Field(None, description="held-out tasks, tried while training; none: no")
    batch: BatchConfig = Field(default_factory=BatchConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    ranker: RankerConfig = Field(default_factory=RankerConfig)
    dispatch: DispatchConfig = Field(default_factory=DispatchConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    weights: WeightSyncConfig = Field(default_factory=WeightSyncConfig)
    elasticity: ElasticityConfig = Field(default_factory=ElasticityConfig)
    recovery: RecoveryConfig = Field(default_factory=RecoveryConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    deadlines: DeadlineConfig = Field(default_factory=DeadlineConfig)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.sampling.max_tokens >= self.model.max_context:
            raise ValueError(
                f"sampling.max_tokens ({self.sampling.max_tokens}) leaves no room for a prompt in "
                f"model.max_context ({self.model.max_context})"
            )
        if self.schedule.name == "colocated" and self.weights.backend == "nccl":
            raise ValueError(
                "weights.backend nccl needs a GPU of its own for each member, and schedule colocated shares the "
                "trainer's with instances; set backend: auto or stream"
            )
        names = [task.key for task in self.tasks]
        if len(names) != len(set(names)):
            raise ValueError(f"tasks need different names (set label), got {names}")
        if self.algorithm.compares_siblings and self.batch.samples_per_prompt == 1:
            raise ValueError(
                f"algorithm.advantage {self.algorithm.advantage} compares the samples of a prompt, and "
                "batch.samples_per_prompt is 1: every advantage would be 0; 2 or more, or `name: reinforce_pp`"
            )
        proximal = self.algorithm.off_policy.ratio_to == "proximal"
        if self.algorithm.max_importance_ratio is not None and proximal and self.schedule.sync_every == 1:
            raise ValueError(
                "algorithm.max_importance_ratio with ratio_to: proximal and schedule.sync_every: 1 is never reached, "
                "because the proximal policy is the current one; ratio_to: generator, or sync_every: 2 or more"
            )
        if self.evaluation is not None:
            self.evaluation.held_out(self.tasks)
        return self
