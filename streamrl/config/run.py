"""The run file: what is trained, on which tasks, how."""

from __future__ import annotations

import json
from typing import Self

from pydantic import Field, model_validator

from scheduler.schedule.schedules import KINDS
from streamrl.config.algorithm import AlgorithmConfig, GRPOConfig, PPOConfig
from streamrl.config.cluster import StrictModel
from streamrl.config.dispatching import DispatchConfig, ElasticityConfig, RankerConfig
from streamrl.config.evaluation import EvaluationConfig
from streamrl.config.generation import GenerationConfig, conflict
from streamrl.config.model_and_batch import BatchConfig, ModelConfig, SamplingConfig
from streamrl.config.optimizer import OptimizerConfig
from streamrl.config.recovery import (
    MOST_DOUBLINGS,
    CheckpointConfig,
    DeadlineConfig,
    RecoveryConfig,
    RewardsConfig,
    pause_after,
)
from streamrl.config.schedule import ScheduleConfig, default_schedule
from streamrl.config.speculation import SpeculationConfig
from streamrl.config.tasks import AgentTask, EnvironmentUse, FileTask, Task, default_tasks
from streamrl.config.trackers import TrackerConfig
from streamrl.config.weight_sync import MismatchConfig, WeightSyncConfig
from streamrl.errors import ErrorCode
from streamrl.surrogates import SURROGATES

MODEL_KEY, CRITIC_KEY = "model.path", "algorithm.critic.path"
"""Keys of the models that are trained, for errors."""


class RunConfig(StrictModel):
    """The run file; every key has a default, so an empty file is a valid run."""

    name: str = Field(
        "run",
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,59}$",
        description="name of the run and of its folder under --runs-dir",
    )
    steps: int = Field(20, ge=1, lt=2**31, description="total optimizer steps")
    seed: int = Field(0, ge=0, lt=2**31)
    model: ModelConfig = Field(default_factory=ModelConfig)
    tasks: list[Task] = Field(default_factory=default_tasks, min_length=1)
    algorithm: AlgorithmConfig = Field(default_factory=GRPOConfig)
    schedule: ScheduleConfig = Field(default_factory=default_schedule)
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
        rewards, pauses = self.rewards, self.rewards.attempts - 1
        doubling = min(pauses, MOST_DOUBLINGS)  # further ones are equal
        limits = rewards.retry_pause_s, rewards.longest_pause_s
        pauses_s = sum(pause_after(number, *limits) for number in range(1, doubling + 1))
        pauses_s += (pauses - doubling) * pause_after(pauses, *limits)
        return rewards.attempts * self.deadlines.reward_s + pauses_s

    @property
    def updates_per_version(self) -> int:
        """Updates of the weights between two publications."""
        return self.schedule.sync_every * self.batch.updates

    @property
    def critic_path(self) -> str | None:
        """Initial weights of a critic that does not begin as the policy does; None: it does, or there is none."""
        return self.algorithm.critic.path if isinstance(self.algorithm, PPOConfig) else None

    @property
    def drawn_with(self) -> str:
        """What a sample's tokens are drawn with besides prompt and weights, as JSON: another text, other samples."""
        keys = [self.sampling.model_dump(mode="json"), self.model.path, self.algorithm.router_replay]
        return json.dumps(keys, sort_keys=True)

    @property
    def trained_models(self) -> dict[str, str]:
        """Initial weights of the models that are trained, each by its key in the run file."""
        critic = {CRITIC_KEY: self.critic_path} if self.critic_path else {}
        return {MODEL_KEY: self.model.path, **critic}

    @property
    def needs_estimates(self) -> bool:
        """Whether the critic's values and advantages are computed for a whole batch, before its first update.

        With one update and no whitening they come from the pass that trains a group.
        """
        algorithm = self.algorithm
        return isinstance(algorithm, PPOConfig) and (algorithm.whiten_advantages or self.batch.updates > 1)

    @property
    def after_batch(self) -> float:
        """Share of a step's training that begins only once the step has all its groups, 0 to 1.

        It is all of it where mini-batches, advantages or estimates need the whole batch; else that of every pass but
        the first, which trains groups as they come.
        """
        of_batch = self.algorithm.advantage in ("batch", "batch_group_baseline")
        if of_batch or self.needs_estimates or self.batch.mini_batches > 1:
            return 1.0
        return 1 - 1 / self.batch.epochs

    @property
    def agent_tasks(self) -> list[AgentTask]:
        """Tasks whose samples are episodes of agents, those of evaluations too."""
        held_out = self.evaluation.held_out(self.tasks) if self.evaluation else []
        return [task for task in (*self.tasks, *held_out) if isinstance(task, AgentTask)]

    @property
    def items_by_users_code(self) -> bool:
        """Whether functions of the user make the items of a task; the controller calls them."""
        return any(task.items is not None for task in self.agent_tasks)

    @property
    def environments(self) -> list[EnvironmentUse]:
        """Environments whose processes each site with agents has; tasks with the same settings share theirs."""
        uses = {task.environment_key: task.environment for task in self.agent_tasks}
        return [use for use in uses.values() if use is not None]

    @property
    def longest_silence_s(self) -> float:
        """Seconds that may pass without a new token: of generation, and of an episode whose tools work."""
        return max([self.deadlines.generation_s, *(task.deadlines.episode_s for task in self.agent_tasks)])

    def _about_older_weights(self) -> str | None:
        algorithm, every, several = self.algorithm, self.schedule.sync_every, self.batch.updates > 1
        if SURROGATES[algorithm.surrogate].has_ratio or algorithm.off_policy.correction != "none":
            return None
        cause = "batch.epochs and mini_batches above 1 train" if several else f"schedule.sync_every ({every}) trains"
        return (
            f"{cause} on samples of older weights, which surrogate: {algorithm.surrogate} ignores: choose "
            f"off_policy.correction: truncate, or surrogate: clip{'' if several else ', or sync_every: 1'}"
        )

    @property
    def _never_overlaps(self) -> bool:
        """Whether generation and training never work at the same time."""
        kind = KINDS.get(self.schedule.name)
        return kind is not None and kind.whole_batches and not kind.overlaps

    def _about_updates(self) -> str | None:
        parts = self.batch.mini_batches
        if parts > 1 and not (self.schedule.name in KINDS and KINDS[self.schedule.name].whole_batches):
            return (
                f"batch.mini_batches ({parts}) are drawn from the whole batch, but schedule {self.schedule.name} "
                "trains on groups as they complete: choose schedule sync, colocated or one_step_off, or stream "
                f"with sync_every: {parts} and smaller batches"
            )
        return None

    def _about_router_replay(self) -> str | None:
        if self.speculation.method != "none":
            return (
                f"algorithm.router_replay records the experts of one token per step, and speculation.method "
                f"{self.speculation.method} verifies several; leave out one of the two"
            )
        if self.agent_tasks:
            return (
                f"algorithm.router_replay: the rows of task {self.agent_tasks[0].key!r}, of kind agent, have no "
                "experts, as turns are joined to rows from tokens alone; set router_replay: false, or leave it out"
            )
        return None

    # Validators run in their order, and the first mistake ends them.

    @model_validator(mode="after")
    def _generation_fits(self) -> Self:
        """Check sampling, and what an instance computes in, against the rest."""
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
        if self.algorithm.router_replay and (reason := self._about_router_replay()):
            raise ValueError(reason)
        if reason := conflict(self.generation.compute, self.algorithm, self.weights):
            raise ValueError(reason)
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        """Check the schedule against what moves weights and instances, and the learning rate's against the steps."""
        if (self.schedule.exclusive or self.schedule.name == "auto") and not self.weights.path.fetched:
            raise ValueError(
                f"weights.backend {self.weights.backend} needs devices of its own for each member of its group, and "
                f"schedule {self.schedule.name} shares the trainer's with instances; set backend: auto or stream"
            )
        if self.elasticity.enabled and self.schedule.name == "auto":
            raise ValueError(
                "elasticity.enabled does not go with schedule: auto, which divides the devices among the instances "
                "that the run begins with: leave out one of the two"
            )
        if self.elasticity.enabled and self._never_overlaps:
            raise ValueError(
                f"elasticity.enabled does not go with schedule: {self.schedule.name}, whose training never covers "
                "generation, so that one instance fewer always costs time: leave out one of the two, or choose "
                "schedule stream, one_step_off or async"
            )
        if (given := self.optimizer.decay_steps) is not None and given + self.optimizer.warmup_steps > self.steps:
            raise ValueError(
                f"optimizer.decay_steps ({given}) and warmup_steps ({self.optimizer.warmup_steps}) need at least as "
                f"many steps together, expected at most {self.steps} (steps)"
            )
        return self

    @model_validator(mode="after")
    def _tasks_fit(self) -> Self:
        """Check limits of programs that are rewards, and the names of tasks and trackers."""
        for task in (*self.tasks, *(self.evaluation.tasks if self.evaluation else ())):
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
        return self

    @model_validator(mode="after")
    def _algorithm_fits(self) -> Self:
        """Check the algorithm against the batch and its updates; evaluation and rounds against the tasks."""
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
        if self.updates_per_version > 1 and (reason := self._about_older_weights()):
            raise ValueError(reason)
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
