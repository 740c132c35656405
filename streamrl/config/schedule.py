"""The `schedule:` of a run file: when generation may issue, when training may start, how weights come in."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from streamrl.config.cluster import StrictModel

OnUpdate = Literal["wait", "keep_kv", "recompute_kv", "abort_and_requeue"]


class _RoundsConfig(StrictModel):
    max_age: int | None = Field(
        None,
        description="most optimizer steps between the weights that a group was issued under and those that train on "
        "it; none: any",
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
    """More groups are issued than a batch needs; what is unfinished when a batch is there is put off, with its tokens,
    to a tail round, as soon as a whole batch has been put off."""

    kind: Literal["tail_batching"] = "tail_batching"
    over_issue: float = Field(1.25, ge=1, le=8, description="groups that a round issues, by those that it needs")


class PartialRolloutsConfig(_RoundsConfig):
    """A sample produces so many tokens a round at most; then it is parked, and goes on in the next round."""

    kind: Literal["partial_rollouts"] = "partial_rollouts"
    round_tokens: int = Field(ge=1, description="new tokens of a sample in one round")
    over_issue: float = Field(1.0, ge=1, le=8, description="groups open when a round begins, by those of a batch")


RoundsConfig = Annotated[TailBatchingConfig | PartialRolloutsConfig, Field(discriminator="kind")]


class _Barrier(StrictModel):
    """On-policy schedules: a batch is sampled by the newest published weights only."""

    sync_every: int = Field(
        1,
        ge=1,
        description="optimizer steps between publications of weights; so many batches are generated together, and the "
        "later ones train with weights that are up to sync_every - 1 steps newer (mini-batches)",
    )

    @property
    def max_staleness(self) -> int:
        """Of the last step before a publication."""
        return self.sync_every - 1

    @property
    def on_update(self) -> OnUpdate:
        """Nothing runs when weights come; what an evaluation has running goes on with its KV computed anew."""
        return "recompute_kv"

    @property
    def rolling(self) -> bool:
        """All instances load at once: nothing else could be done meanwhile."""
        return False


class ColocatedSchedule(_Barrier):
    """Generation and training take turns on the same devices; a lock says whose turn it is."""

    name: Literal["colocated"] = "colocated"

    @property
    def rounds(self) -> TailBatchingConfig | PartialRolloutsConfig | None:
        """None: every batch is generated to its end."""
        return None


class _InRounds(_Barrier):
    """Schedules whose batches may be generated in rounds."""

    rounds: RoundsConfig | None = Field(
        None, description="put off what takes long, with its tokens, instead of waiting for it"
    )

    @model_validator(mode="after")
    def _one_batch_a_round(self) -> Self:
        if self.rounds is not None and self.sync_every > 1:
            raise ValueError(f"rounds go with sync_every: 1 (a round is one batch), got {self.sync_every}")
        return self


class SyncSchedule(_InRounds):
    """Barrier: training starts when the whole batch is finished."""

    name: Literal["sync"] = "sync"


class StreamSchedule(_InRounds):
    """Dynamic batch: the trainer works on groups as they complete; one optimizer step per batch."""

    name: Literal["stream"] = "stream"


class _Overlapping(StrictModel):
    """Generation goes on while weights are made and sent."""

    on_update: OnUpdate = Field(
        "recompute_kv",
        description="requests that run when new weights come: wait for their end; keep_kv: go on with the KV cache as "
        "it is; recompute_kv: go on, their KV computed anew; abort_and_requeue: taken off with their tokens, and go "
        "on wherever there is room",
    )
    rolling: bool = Field(
        False, description="instances of a site load new weights one after the other, so that the others generate on"
    )

    @property
    def rounds(self) -> TailBatchingConfig | PartialRolloutsConfig | None:
        """None: what takes long holds nobody up."""
        return None


class OneStepOffSchedule(_Overlapping):
    """Trains on the last batch while the next one is generated: always one step of staleness."""

    name: Literal["one_step_off"] = "one_step_off"

    @property
    def max_staleness(self) -> int:
        """A batch is generated while the one before trains."""
        return 1

    @property
    def sync_every(self) -> int:
        """Every step's weights are published."""
        return 1


class AsyncSchedule(_Overlapping):
    """Generation and training overlap fully; prompts wait while their samples would get too stale."""

    name: Literal["async"] = "async"
    max_staleness: int = Field(
        1,
        description="most optimizer steps between the weights that a sample was begun with and those that train on it",
    )
    sync_every: int = Field(1, ge=1, description="optimizer steps between publications of weights")

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.max_staleness < 1:
            raise ValueError(
                f"async needs max_staleness of 1 or more, got {self.max_staleness}; with 0 it is `name: stream`"
            )
        if self.sync_every > self.max_staleness + 1:
            raise ValueError(
                f"weights that come every {self.sync_every} steps need max_staleness of {self.sync_every - 1} or more, "
                f"got {self.max_staleness}; or sync_every: {self.max_staleness + 1}"
            )
        return self


class AutoScheduleConfig(_Overlapping):
    """Profiles the first steps, predicts every schedule, runs the fastest, and changes when the run does.

    On CPU it also chooses how pinned cores are split, and may have generation and training take turns on all of them.
    """

    name: Literal["auto"] = "auto"
    max_staleness: int = Field(1, ge=1, description="of `async`, if that is chosen")
    profile_steps: int = Field(2, ge=1, description="steps that are measured under each division of the devices")

    @property
    def sync_every(self) -> int:
        """Every step's weights are published."""
        return 1


ScheduleConfig = Annotated[
    ColocatedSchedule | SyncSchedule | StreamSchedule | OneStepOffSchedule | AsyncSchedule | AutoScheduleConfig,
    Field(discriminator="name"),
]
