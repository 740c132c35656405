"""The `schedule:` section of a run file: when to issue, when to train, and how instances update their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, Union

from pydantic import Field, create_model, model_validator

from scheduler.schedule.schedules import KINDS, ScheduleKind
from streamrl.config.cluster import StrictModel

OnUpdate = Literal["wait", "keep_kv", "recompute_kv", "abort_and_requeue"]


class _RoundsConfig(StrictModel):
    max_age: int | None = Field(
        None,
        description="most optimizer steps between the policy version at a group's issue and the version that trains "
        "on it; none: any",
    )

    @model_validator(mode="after")
    def _carries_over(self) -> Self:
        if self.max_age is not None and self.max_age < 1:
            raise ValueError(
                f"rounds with max_age {self.max_age} could not carry anything over: what a round does not finish goes "
                "on under newer weights; max_age: 1 or more, or no rounds, and answers cut by sampling.max_tokens"
            )
        return self


class TailBatchingConfig(_RoundsConfig):
    """Tail batching: rounds issue more groups than a batch needs and defer the unfinished ones.

    Deferred groups keep their tokens; as soon as a whole batch is deferred, a tail round finishes it.
    """

    kind: Literal["tail_batching"] = "tail_batching"
    over_issue: float = Field(1.25, ge=1, le=8, description="groups issued per round, as a multiple of those needed")


class PartialRolloutsConfig(_RoundsConfig):
    """Partial rollouts: a sample that has used up its tokens of a round is parked and continued in the next round."""

    kind: Literal["partial_rollouts"] = "partial_rollouts"
    round_tokens: int = Field(ge=1, description="most new tokens of a sample per round")
    over_issue: float = Field(
        1.0, ge=1, le=8, description="groups open at the start of a round, as a multiple of a batch"
    )


RoundsConfig = Annotated[TailBatchingConfig | PartialRolloutsConfig, Field(discriminator="kind")]


class BarrierSchedule(StrictModel):
    """Base of the on-policy schedules, which sample a batch by the newest published weights only."""

    name: str
    sync_every: int = Field(
        1,
        ge=1,
        description="optimizer steps between publications of weights; that many batches are generated together, and "
        "the later ones train on weights up to sync_every - 1 steps newer (mini-batches)",
    )

    @property
    def max_staleness(self) -> int:
        """Staleness of the last step before a publication, in optimizer steps."""
        return self.sync_every - 1

    on_update: ClassVar[OnUpdate] = "recompute_kv"
    """Update mode: only an evaluation's requests can be running; they continue with their KV cache recomputed."""
    rolling: ClassVar[bool] = False
    """Whether instances load one after the other; never, as no requests run meanwhile."""
    exclusive: ClassVar[bool] = False
    """Whether generation and training share their devices."""


class ExclusiveSchedule(BarrierSchedule):
    """Base of the schedules whose generation and training share devices."""

    exclusive: ClassVar[bool] = True
    rounds: ClassVar[TailBatchingConfig | PartialRolloutsConfig | None] = None
    """Every batch is generated to its end."""


class RoundsSchedule(BarrierSchedule):
    """Base of the schedules whose batches may be generated in rounds."""

    rounds: RoundsConfig | None = Field(
        None,
        description="defer long samples, with their tokens, to a later round instead of waiting for them; none: wait",
    )

    @model_validator(mode="after")
    def _one_batch_a_round(self) -> Self:
        if self.rounds is not None and self.sync_every > 1:
            raise ValueError(f"rounds go with sync_every: 1 (a round is one batch), got {self.sync_every}")
        return self


class OverlappingSchedule(StrictModel):
    """Base of the schedules that continue generation while weights are made and sent."""

    name: str
    on_update: OnUpdate = Field(
        "recompute_kv",
        description="running requests at a weight update: wait: let them end first; keep_kv: continue with the KV "
        "cache as it is; recompute_kv: continue with the KV cache recomputed; abort_and_requeue: preempt them with "
        "their tokens, and continue them wherever there is room",
    )
    rolling: bool = Field(
        False,
        description="load new weights into a site's instances one after the other, so that the others keep generating",
    )

    rounds: ClassVar[TailBatchingConfig | PartialRolloutsConfig | None] = None
    """Long samples hold up nothing."""
    exclusive: ClassVar[bool] = False
    """Whether generation and training share their devices; `auto` may also let them, on CPUs."""


class AheadSchedule(OverlappingSchedule):
    """Base of the schedules that generate one batch while the one before trains."""

    max_staleness: ClassVar[int] = 1
    """Most optimizer steps of staleness: a batch is generated while the previous one trains."""
    sync_every: ClassVar[int] = 1
    """Optimizer steps between publications of weights."""


class ContinuousSchedule(OverlappingSchedule):
    """Base of the schedules that never wait for a batch, only for a bound on staleness."""

    max_staleness: int = Field(
        1,
        description="most optimizer steps between the weights with which a sample began and those that train on it",
    )
    sync_every: int = Field(1, ge=1, description="optimizer steps between publications of weights")

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.max_staleness < 1:
            raise ValueError(
                f"{self.name} needs max_staleness of 1 or more, got {self.max_staleness}; with 0 it is `name: stream`"
            )
        if self.sync_every > self.max_staleness + 1:
            raise ValueError(
                f"weights that come every {self.sync_every} steps need max_staleness of {self.sync_every - 1} or more, "
                f"got {self.max_staleness}; or sync_every: {self.max_staleness + 1}"
            )
        return self


def _model_of(name: str, kind: ScheduleKind) -> type[ScheduleConfig]:
    """Make the model of a schedule from what it does."""
    base: type[BarrierSchedule | OverlappingSchedule] = ContinuousSchedule if kind.continuous else AheadSchedule
    if kind.barrier:
        base = ExclusiveSchedule if kind.exclusive else RoundsSchedule
    fields = {"name": (Literal[name], name)}
    title = "".join(part.title() for part in name.split("_")) + "Schedule"
    return create_model(title, __base__=base, __module__=__name__, __doc__=kind.summary, **fields)  # type: ignore[call-overload]


SCHEDULES: dict[str, type[ScheduleConfig]] = {name: _model_of(name, kind) for name, kind in KINDS.items()}
"""Models of the `schedule:` section by the schedule's name."""
globals().update({model.__name__: model for model in SCHEDULES.values()})  # where pickle looks for them


class AutoScheduleConfig(OverlappingSchedule):
    """Auto: profiles the first steps, predicts every schedule, runs the fastest, and switches when the run changes.

    On CPU it also chooses the split of pinned cores, and may let generation and training take turns on all of them.
    """

    name: Literal["auto"] = "auto"
    max_staleness: int = Field(1, ge=1, description="max_staleness of `async`, if that is chosen")
    profile_steps: int = Field(2, ge=1, description="steps measured under each split of the devices")
    sync_every: ClassVar[int] = 1
    """Optimizer steps between publications of weights."""


if TYPE_CHECKING:
    ScheduleConfig = ExclusiveSchedule | RoundsSchedule | AheadSchedule | ContinuousSchedule | AutoScheduleConfig
else:
    ScheduleConfig = Annotated[Union[*SCHEDULES.values(), AutoScheduleConfig], Field(discriminator="name")]


def staleness_limit(schedule: ScheduleConfig) -> int | None:
    """Return the most optimizer steps between the weights that sampled a token and those that train on it.

    None: any number, as rounds without `max_age` carry a sample over for as long as it takes.
    """
    return schedule.max_staleness if schedule.rounds is None else schedule.rounds.max_age


def default_schedule() -> ScheduleConfig:
    """Return the schedule of a run file that names none."""
    return SCHEDULES["stream"](name="stream")
