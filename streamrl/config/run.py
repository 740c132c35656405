"""The run file: what is trained, on which tasks, how."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from streamrl.config.algorithm import AlgorithmConfig, GRPOConfig, PPOConfig
from streamrl.config.cluster import StrictModel
from streamrl.config.evaluation import EvaluationConfig
from streamrl.config.generation import GenerationConfig, conflict
from streamrl.config.schedule import ScheduleConfig, StreamSchedule
from streamrl.config.speculation import SpeculationConfig
from streamrl.config.tasks import AgentTask, EnvironmentUse, FileTask, Task, default_tasks
from streamrl.config.trackers import TrackerConfig
from streamrl.errors import ErrorCode

Recomputation = bool | Literal["selective"]
"""What layers compute again in the backward pass: all (True), all but products and attention, nothing (False)."""

OF_THE_CALL = frozenset(
    [
        "conversation",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    ]
)
"""Arguments of transformers' `apply_chat_template` that are no variables of a template, or depend on the prompt."""


class ModelConfig(StrictModel):
    """The policy model."""

    path: str = Field(
        "smollm2-135m",
        description="a model known to `streamrl fetch-model`, a folder in HF format, or a Hugging Face hub id",
    )
    max_context: int = Field(1024, ge=16, description="most tokens of prompt and completion together")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto",
        description="compute type of trainer and instances (master weights are always fp32); auto: bfloat16 on devices "
        "where it is fast, float32 elsewhere",
    )
    system_prompt: str | None = Field(
        None, description="system message before every prompt that has none of its own; none: no message"
    )
    chat_template_kwargs: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="variables of the model's chat template, e.g. {enable_thinking: false}; each must occur in it",
    )

    @field_validator("chat_template_kwargs")
    @classmethod
    def _variables(cls, given: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if taken := sorted(set(given) & OF_THE_CALL):
            raise ValueError(
                f"{', '.join(taken)} is what streamrl itself gives the chat template: expected variables of the "
                "template, such as enable_thinking"
            )
        return given


class BatchConfig(StrictModel):
    """The batch of one optimizer step."""

    prompts_per_step: int = Field(8, ge=1, description="prompts (groups) per optimizer step")
    samples_per_prompt: int = Field(8, ge=1, description="completions per prompt (group size)")
    micro_batch_tokens: int = Field(
        2048, ge=64, description="most tokens in one forward/backward pass of a rank (a larger group runs alone)"
    )
    epochs: int = Field(
        1,
        ge=1,
        le=64,
        description="passes over each batch, each with mini_batches optimizer updates; old log-probabilities stay "
        "those of the samples",
    )
    mini_batches: int = Field(
        1,
        ge=1,
        description="equal parts of a batch, each with an optimizer update of its own; drawn anew in each pass",
    )
    packing: Literal["auto", "shared", "separate"] = Field(
        "auto",
        description="shared: a prompt is computed once for all its completions; separate: every completion with its "
        "prompt by the model's own attention, slower; auto: shared where it is proven for the model's architecture "
        "(see `streamrl verify`), else separate",
    )

    @property
    def updates(self) -> int:
        """Optimizer updates on each batch."""
        return self.epochs * self.mini_batches

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.prompts_per_step % self.mini_batches:
            raise ValueError(
                f"mini_batches ({self.mini_batches}) must divide prompts_per_step ({self.prompts_per_step}) into equal "
                "parts"
            )
        return self


class SamplingConfig(StrictModel):
    """Sampling of completions; the trainer's log-probabilities are of the same distribution."""

    refused: ClassVar[dict[str, str]] = dict.fromkeys(
        (
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "logit_bias",
            "bad_words",
            "allowed_token_ids",
            "min_tokens",
            "logits_processors",
            "structured_outputs",
        ),
        "the trainer could not recompute the log-probabilities of tokens that are drawn so",
    )
    """Options of vLLM that a run cannot have, each with the reason."""

    temperature: float = Field(
        1.0, ge=0.01, le=2, description="divisor of the logits; greedy samples have no ratio to learn from"
    )
    top_p: float = Field(
        1.0, gt=0, le=1, description="sample among the likeliest tokens that reach this probability together; 1: all"
    )
    top_k: int = Field(0, ge=0, description="sample among the k likeliest tokens; 0: all")
    min_p: float = Field(
        0.0, ge=0, le=1, description="sample among tokens of at least this share of the likeliest one's probability"
    )
    max_tokens: int = Field(128, ge=1, description="most tokens in one completion")
    stop: list[str] = Field(default_factory=list, description="strings that end a completion")

    @property
    def truncates(self) -> bool:
        """Whether some tokens cannot be sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class OptimizerConfig(StrictModel):
    """AdamW with fp32 master weights."""

    lr: float = Field(5e-6, gt=0, description="learning rate after warm-up")
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    decay: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "constant",
        description="learning rate after warm-up: linear, cosine: down to min_lr_fraction at the last step; wsd: "
        "constant, then linear over the last decay_steps",
    )
    decay_steps: int | None = Field(None, ge=1, description="steps of the decay of wsd (default: a tenth of `steps`)")
    min_lr_fraction: float = Field(
        0.1, ge=0, le=1, description="learning rate of the last step of a decay, as a share of lr"
    )
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    end_after_refused: int = Field(
        3,
        ge=1,
        description="refused optimizer steps that end the run; a step is refused where a loss, a gradient, a weight or "
        "the update is not finite, and is then tried again without the groups that caused it",
    )
    gradient_checkpointing: Recomputation = Field(
        False,
        description="what the backward pass computes again, to save memory; true: each layer from its input, which "
        "costs a third more operations; selective: norms and activation functions, from the kept results of products "
        "and attention; false: nothing",
    )

    def decay_length(self, total_steps: int) -> int:
        """Return the steps of the decay of wsd in a run of `total_steps`."""
        return self.decay_steps or max(1, round(total_steps / 10))

    @model_validator(mode="after")
    def _decays(self) -> Self:
        if self.decay_steps is not None and self.decay != "wsd":
            raise ValueError(
                f"decay_steps belongs to decay: wsd, got decay: {self.decay}, which ends with the run: leave "
                "it out, or choose wsd"
            )
        return self


class RankerConfig(StrictModel):
    """The ranker, which predicts output lengths from prompts and learns from the run's own rollouts."""

    path: str | None = Field(
        None, description="initial ranker, a file written by `streamrl train-ranker`; none: start without predictions"
    )
    refit_every: int = Field(1, ge=0, description="optimizer steps between refits on the newest rollouts (0: never)")
    window: int = Field(20_000, ge=100, description="number of newest samples that a refit learns from")


class DispatchConfig(StrictModel):
    """Dispatch of requests to instances."""

    policy: Literal[
        "auto",
        "random",
        "round-robin",
        "two-choices",
        "least-loaded",
        "longest-first",
        "algorithm2",
        "algorithm2-max",
        "group-probe",
        "skew-aware-static",
        "skew-aware",
    ] = Field(
        "auto",
        description="dispatch policy (compare them with `streamrl simulate`); auto: skew-aware under the schedules "
        "colocated, sync, stream and one_step_off, least-loaded under async and auto, where no policy is known to be "
        "faster; skew-aware acts as least-loaded until length predictions are trusted",
    )
    price_tolerance: float = Field(
        0.0, ge=0, le=1, description="with several sites: share of time that may be lost by choosing a cheaper site"
    )


class WeightSyncConfig(StrictModel):
    """Delivery of new weights to the instances."""

    backend: Literal["auto", "stream", "nccl"] = Field(
        "auto",
        description="stream: over ZeroMQ to one relay per site; nccl: vLLM's NCCL engine, which has not been run "
        "so far; auto: stream",
    )
    encoding: Literal["auto", "raw", "delta"] = Field(
        "auto",
        description="what relays fetch: raw: all bytes; delta: lossless differences; auto: raw on one machine, delta "
        "across sites and nodes, except that on the trainer's own node its file is copied",
    )
    anchor_every: int = Field(
        10, ge=1, description="delta: published versions between complete ones, from which late relays start"
    )
    chunk_mb: float = Field(4.0, gt=0, le=256, description="largest weight frame in MiB; smaller on slow links")
    generation_dtype: Literal["same", "fp8", "int8"] = Field(
        "same",
        description="type of the linear weights sent to instances; same: as all other weights; fp8, int8: 8 bits, "
        "which halves the bytes sent and makes generation slightly off-policy (see algorithm.off_policy)",
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.backend == "nccl" and self.generation_dtype != "same":
            raise ValueError(
                f"weights.backend nccl does not send weights.generation_dtype: {self.generation_dtype}; "
                "set backend: stream, or generation_dtype: same"
            )
        return self


class MismatchConfig(StrictModel):
    """Comparison of trainer and instances: both compute log-probabilities of a fixed text with each weight version."""

    on_mismatch: Literal["warn", "stop"] = Field(
        "warn",
        description="what follows a difference above the bound, of the fixed text or of a step's samples; warn: log, "
        "status and report say so; stop: the run ends, too; at a fixed text of an instance of another site it goes on "
        "without that site, if others can generate",
    )
    bound: float | None = Field(
        None,
        gt=0,
        description="largest mean |difference| of log-probabilities, nats; none: 0.001 if trainer and instance compute "
        "in float32, 0.1 if one of them does not, 0.5 with 8-bit weights",
    )


class ElasticityConfig(StrictModel):
    """Elasticity, which balances generation and training: after a step it may add or remove one instance of a pool."""

    enabled: bool = Field(
        False, description="adjust pools within their min_replicas and max_replicas of the cluster file"
    )
    patience: int = Field(2, ge=1, description="consecutive steps that must call for the same change")
    settle: int = Field(1, ge=0, description="steps ignored after a change")
    margin: float = Field(
        0.05, ge=0, lt=1, description="share of a stage's time by which the imbalance must exceed what a change saves"
    )
    min_saving: float = Field(
        0.05, ge=0, lt=1, description="share of the generation time that an added instance must save"
    )


class RecoveryConfig(StrictModel):
    """Restarts of processes that die."""

    restarts: int = Field(5, ge=0, description="restarts of one process within `window_s`; after that it stays dead")
    window_s: float = Field(600.0, gt=0, description="seconds over which restarts are counted")
    pause_s: float = Field(1.0, ge=0, description="seconds before the first restart; doubled before each further one")
    longest_pause_s: float = Field(60.0, ge=0, description="longest pause before a restart, seconds")
    suspect_s: float = Field(
        3.0, gt=0, description="seconds of silence after which other instances continue an instance's requests"
    )


class CheckpointConfig(StrictModel):
    """Frequency and number of checkpoints."""

    every: int = Field(10, ge=1, description="optimizer steps between checkpoints (the last step always writes one)")
    keep: int = Field(2, ge=1, description="newest checkpoints kept; older ones, except the best, are deleted")


class DeadlineConfig(StrictModel):
    """Longest waits in seconds; when one expires the run ends and names the process it waited for."""

    startup_s: float = Field(300, gt=0, description="until a process has started and connected")
    generation_s: float = Field(
        900, gt=0, description="without a new token of any sample while samples are being generated"
    )
    training_s: float = Field(900, gt=0, description="for one micro-batch or one optimizer step")
    weights_s: float = Field(300, gt=0, description="for a new version to reach every instance")
    reward_s: float = Field(20, gt=0, description="for one try of a reward; after that the try counts as a timeout")
    heartbeat_s: float = Field(60, gt=0, description="without a sign of life from a process")


class RewardsConfig(StrictModel):
    """Rewards that fail: how often they are tried, and when too many of them are void."""

    attempts: int = Field(
        2, ge=1, description="tries of a reward that times out, raises or dies; if the last one fails it is void"
    )
    retry_pause_s: float = Field(
        1.0, ge=0, description="seconds before the second try; doubled before each further one"
    )
    max_void_rate: float | None = Field(
        0.5,
        ge=0,
        lt=1,
        description="share of void rewards above which the run ends; it also ends if the first 32 rewards of a task "
        "are all void. null: never",
    )
    void_window: int = Field(
        2, ge=1, description="steps' worth of newest rewards, at least 32, over which max_void_rate is taken"
    )


class RunConfig(StrictModel):
    """The run file; every key has a default, so an empty file is a valid run."""

    name: str = Field(
        "run", pattern=r"^[A-Za-z0-9_.-]{1,60}$", description="name of the run and of its folder under --runs-dir"
    )
    steps: int = Field(20, ge=1, description="total optimizer steps")
    seed: int = Field(0, ge=0, lt=2**31)
    model: ModelConfig = Field(default_factory=ModelConfig)
    tasks: list[Task] = Field(default_factory=default_tasks, min_length=1)
    algorithm: AlgorithmConfig = Field(default_factory=GRPOConfig)
    schedule: ScheduleConfig = Field(default_factory=StreamSchedule)
    evaluation: EvaluationConfig | None = Field(
        None, description="evaluation on held-out tasks during training; none: no evaluation"
    )
    batch: BatchConfig = Field(default_factory=BatchConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    generation: GenerationConfig = Field(default_factory=GenerationConfig)
    speculation: SpeculationConfig = Field(default_factory=SpeculationConfig)
    ranker: RankerConfig = Field(default_factory=RankerConfig)
    dispatch: DispatchConfig = Field(default_factory=DispatchConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    weights: WeightSyncConfig = Field(default_factory=WeightSyncConfig)
    mismatch: MismatchConfig = Field(default_factory=MismatchConfig)
    elasticity: ElasticityConfig = Field(default_factory=ElasticityConfig)
    recovery: RecoveryConfig = Field(default_factory=RecoveryConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    deadlines: DeadlineConfig = Field(default_factory=DeadlineConfig)
    rewards: RewardsConfig = Field(default_factory=RewardsConfig)
    trackers: list[TrackerConfig] = Field(
        default_factory=list,
        description="where the run's figures and some of its samples are copied to, besides the run's folder; each "
        "tracker has a process of its own that never holds up the run",
    )

    @property
    def longest_reward_s(self) -> float:
        """Seconds that all tries of one reward take at most, with the pauses between them."""
        tries = self.rewards.attempts
        return tries * self.deadlines.reward_s + self.rewards.retry_pause_s * (2 ** (tries - 1) - 1)

    @property
    def updates_per_version(self) -> int:
        """Updates of the weights between two publications."""
        return self.schedule.sync_every * self.batch.updates

    @property
    def needs_estimates(self) -> bool:
        """Whether the critic's values and advantages are computed for a whole batch, before its first update.

        With one update and no whitening they come from the pass that trains a group.
        """
        algorithm = self.algorithm
        return isinstance(algorithm, PPOConfig) and (algorithm.whiten_advantages or self.batch.updates > 1)

    @property
    def agent_tasks(self) -> list[AgentTask]:
        """Tasks whose samples are episodes of agents, those of evaluations too."""
        held_out = self.evaluation.held_out(self.tasks) if self.evaluation else []
        return [task for task in (*self.tasks, *held_out) if isinstance(task, AgentTask)]

    @property
    def environments(self) -> list[EnvironmentUse]:
        """Environments whose processes each site with agents has; tasks with the same settings share theirs."""
        uses = {task.environment_key: task.environment for task in self.agent_tasks}
        return [use for use in uses.values() if use is not None]

    @property
    def longest_silence_s(self) -> float:
        """Seconds that may pass without a new token: of generation, and of an episode whose tools work."""
        return max([self.deadlines.generation_s, *(task.deadlines.episode_s for task in self.agent_tasks)])

    def _about_updates(self) -> str | None:
        parts, off_policy = self.batch.mini_batches, self.algorithm.off_policy
        if self.algorithm.surrogate == "reinforce" and off_policy.correction == "none":
            return (
                "batch.epochs and mini_batches above 1 train on samples of older weights, which surrogate: reinforce "
                "ignores: choose off_policy.correction: truncate, or surrogate: clip"
            )
        if parts > 1 and self.schedule.name in ("stream", "async", "auto"):
            return (
                f"batch.mini_batches ({parts}) are drawn from the whole batch, but schedule {self.schedule.name} "
                "trains on groups as they complete: choose schedule sync, colocated or one_step_off, or stream "
                f"with sync_every: {parts} and smaller batches"
            )
        return None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.sampling.max_tokens >= self.model.max_context:
            raise ValueError(
                ErrorCode.CONTEXT.refer(
                    f"sampling.max_tokens ({self.sampling.max_tokens}) leaves no room for a prompt in "
                    f"model.max_context ({self.model.max_context})"
                )
            )
        if self.speculation.method != "none" and self.sampling.min_p > 0:
            raise ValueError(
                f"sampling.min_p ({self.sampling.min_p:g}) does not go with speculation.method "
                f"{self.speculation.method}: vLLM would leave min_p out, and sample from another distribution than the "
                "trainer assumes; leave out one of the two, or cut by top_p or top_k, which are exact"
            )
        sent = self.weights.generation_dtype
        if reason := conflict(self.generation.compute, self.algorithm, self.weights.backend, sent):
            raise ValueError(reason)
        if self.schedule.name == "colocated" and self.weights.backend == "nccl":
            raise ValueError(
                "weights.backend nccl needs a GPU of its own for each member, and schedule colocated shares the "
                "trainer's with instances; set backend: auto or stream"
            )
        if (given := self.optimizer.decay_steps) is not None and given + self.optimizer.warmup_steps > self.steps:
            raise ValueError(
                f"optimizer.decay_steps ({given}) and warmup_steps ({self.optimizer.warmup_steps}) need at least as "
                f"many steps together, expected at most {self.steps} (steps)"
            )
        for task in self.tasks:
            if isinstance(task, FileTask) and task.sandbox and task.sandbox.seconds >= self.deadlines.reward_s:
                raise ValueError(
                    f"task {task.key!r}: sandbox.seconds ({task.sandbox.seconds:g}) must be less than "
                    f"deadlines.reward_s ({self.deadlines.reward_s:g}): otherwise a program that never ends would make "
                    "its reward void instead of 0"
                )
        services = [tracker.name for tracker in self.trackers]
        if len(services) != len(set(services)):
            raise ValueError(f"trackers need different names, got {services}")
        names = [task.key for task in self.tasks]
        if len(names) != len(set(names)):
            raise ValueError(f"tasks need different names (set label), got {names}")
        if self.algorithm.compares_siblings and self.batch.samples_per_prompt == 1:
            raise ValueError(
                f"algorithm.advantage {self.algorithm.advantage} compares the samples of a prompt, and "
                "batch.samples_per_prompt is 1: every advantage would be 0; 2 or more, or `name: reinforce_pp`"
            )
        proximal = self.algorithm.off_policy.ratio_to == "proximal"
        if self.algorithm.max_importance_ratio is not None and proximal and self.updates_per_version == 1:
            raise ValueError(
                "algorithm.max_importance_ratio with ratio_to: proximal and schedule.sync_every: 1 is never reached, "
                "because the proximal policy is the current one; ratio_to: generator, or sync_every: 2 or more"
            )
        if self.batch.updates == 1 and isinstance(self.algorithm, PPOConfig) and self.algorithm.critic.value_clip:
            raise ValueError(
                "algorithm.critic.value_clip never clips where a batch has one update, during which the old values are "
                "the current ones: leave it out, or batch.epochs or mini_batches: 2 or more"
            )
        if self.batch.updates > 1 and (reason := self._about_updates()):
            raise ValueError(reason)
        if self.evaluation is not None:
            self.evaluation.held_out(self.tasks)
        if self.schedule.rounds is not None and self.agent_tasks:
            raise ValueError(
                f"task {self.agent_tasks[0].key!r} is of kind agent, whose episodes schedule.rounds cannot interrupt: "
                "leave rounds out, or use schedule async, where nothing waits for the longest episode"
            )
        return self
