"""Messages between the controller and each rank of the trainer.

    controller -> rank   precompute, estimate, train, step, examine, publish, canary, checkpoint, resources,
                         weight_answer
    rank -> controller   precompute_done, estimate_done, train_done, step_done, examine_done, publish_done, canary_done,
                         checkpoint_done, resources_done, weight_call

Every rank gets the same commands in the same order, one at a time, except that a `train` may follow a `train` that is
not answered: the rank packs it meanwhile. A rank acknowledges a command once it has carried it out, then answers. If it
dies, its command stays open, and the run continues from its newest checkpoint.
"""

from __future__ import annotations

from typing import Any

import msgspec

from streamrl.protocol.controller_site import WeightAnswer, WeightCall
from streamrl.protocol.message import TypedMessage

# controller -> rank


class MicroBatch(TypedMessage, frozen=True, tag="micro_batch"):
    """Groups as made by `rollouts.micro_batch_wire.to_wire`; base of `Precompute`, `Estimate`, `Train`, `Examine`.

    Arrays: prompts int32, completions int32, logprobs float32, reference_logprobs float32 (of tokens with a loss),
    estimates float32 [tokens with a loss, 3] (advantage, return, value), masks uint8 (1: the token has a loss),
    experts uint8 [positions, row bytes] (of each group that has some: of its prompt, then of each completion's tokens
    but the last), each concatenated.
    """

    groups: list[tuple[str, int, list[int]]]
    """(group id, number of prompt tokens, number of tokens of each completion) of each group."""
    advantages: list[float]
    """Advantage of each sequence."""
    has_reference: list[bool]
    """Whether `reference_logprobs` includes the sequence, for each sequence."""
    has_estimates: list[bool]
    """Whether `estimates` includes the sequence, for each sequence."""
    has_mask: list[bool]
    """Whether `masks` includes the sequence, for each sequence; if not, all of its tokens have a loss."""
    trajectories: list[str]
    """Id of the episode whose rows have one ratio, by group; '' where each sequence has its own."""
    trajectory_tokens: list[int | None]
    """Tokens with a loss of the episode that a sequence is a row of, by sequence; None: it is its only row."""
    has_experts: list[bool]
    """Whether `experts` includes the group, for each group."""


class Precompute(MicroBatch, frozen=True, tag="precompute"):
    """Compute the frozen reference's log-probabilities of these groups. Answered by `precompute_done`."""


class Estimate(MicroBatch, frozen=True, tag="estimate"):
    """Compute the critic's values and GAE of these groups, before the step's first update.

    Answered by `estimate_done`.
    """

    reference_given: bool
    """Whether every sequence, on every rank, has its reference log-probabilities."""


class Train(MicroBatch, frozen=True, tag="train"):
    """Add the gradient of a micro-batch. Answered by `train_done`."""

    is_last: bool
    """Whether the optimizer step follows."""
    reference_given: bool
    """Whether every sequence, on every rank, has its reference log-probabilities."""


class Examine(MicroBatch, frozen=True, tag="examine"):
    """Find the groups of a refused step whose loss or gradient is not finite. Answered by `examine_done`.

    No gradient may be accumulated; none is left.
    """

    reference_given: bool
    """Whether every sequence, on every rank, has its reference log-probabilities."""


class OptimizerStep(TypedMessage, frozen=True, tag="step"):
    """Do an optimizer step with the accumulated gradient. Answered by `step_done`."""

    step: int
    """Index of the step, from 0."""
    update: int
    """Index of the update on the step's batch, from 0."""
    normalizer: float
    """Divisor of the gradient, from `rollouts.micro_batch.loss_normalizer`."""
    skip: bool
    """Whether to discard the gradient."""


class Publish(TypedMessage, frozen=True, tag="publish"):
    """Make the current weights available to all sites. Answered by `publish_done`."""

    behind: bool = False
    """Whether to push them, once more, to those instances only that do not hold the served weights."""


class MeasureCanary(TypedMessage, frozen=True, tag="canary"):
    """Compute the canary's log-probabilities with the version just published. Answered by `canary_done`."""


class SaveCheckpoint(TypedMessage, frozen=True, tag="checkpoint"):
    """Write a checkpoint. Answered by `checkpoint_done`."""

    step: int
    state: dict[str, Any]
    """State of the controller, stored as `state.json`."""
    pending: list[int]
    """Steps whose checkpoints are evaluated, or may still be, and must be kept."""


class MoveToCores(TypedMessage, frozen=True, tag="resources"):
    """Compute on these CPU cores from now on. Answered by `resources_done`."""

    cores: list[int]


# rank -> controller


class Answer(TypedMessage, frozen=True, tag="answer"):
    """The base of all answers; times are unix seconds."""

    rank: int
    started: float
    finished: float


class PrecomputeDone(Answer, frozen=True, tag="precompute_done"):
    """The reference's log-probabilities are computed.

    Arrays: reference_logprobs float32 [tokens with a loss of the rank's share].
    """


class EstimateDone(Answer, frozen=True, tag="estimate_done"):
    """Values and advantages are computed.

    Arrays: estimates float32 [tokens with a loss of the rank's share, 3]: advantage, return, value.
    """


class TrainDone(Answer, frozen=True, tag="train_done"):
    """The gradient of a micro-batch is added."""

    stats: dict[str, float]
    """Sums over the micro-batch's tokens (`training.objective.MicroStats`)."""


class Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was not finite in an optimizer step that the trainer has refused."""

    what: str
    """'weight', "AdamW's exp_avg", "AdamW's exp_avg_sq", 'loss', 'gradient', or 'update' (it would have overflowed)."""
    name: str
    """Name of the first tensor concerned, 'critic. ..' if it is the critic's; for a loss, the number of the
    micro-batch."""

    def __str__(self) -> str:
        if self.what == "loss":
            return f"loss of {self.name} is not finite"
        if self.what == "update":
            return f"update of weight {self.name} would not be finite"
        of = "weight" if self.what == "weight" else f"{self.what} of"
        return f"{of} {self.name} is not finite"


class StepDone(Answer, frozen=True, tag="step_done"):
    """An optimizer step is done or refused (`training.trainer.StepResult`)."""

    grad_norm: float
    learning_rate: float
    skipped: bool
    refused: Refusal | None = None
    """Reason for which nothing was changed; the step is not done then. None: it is done."""
    critic_grad_norm: float | None = None
    """None: there is no critic."""


class ExamineDone(Answer, frozen=True, tag="examine_done"):
    """The groups of the rank's share are examined."""

    not_finite: dict[str, Refusal]
    """What is not finite in each group concerned, by its id."""


class PublishDone(Answer, frozen=True, tag="publish_done"):
    """A version is available to all sites (`weights.backends.base.Published`)."""

    number: int
    content_hash: str
    """Hash of the weights; '': the trainer itself has pushed them to the instances."""
    bytes: int
    applied: dict[str, tuple[float, float]] = msgspec.field(default_factory=dict)
    """(start, end) in unix seconds of the loading, by instance that the trainer has pushed them to."""
    behind: bool = False
    """Whether they went only to those instances that did not hold the served weights."""


class CanaryDone(Answer, frozen=True, tag="canary_done"):
    """The canary is measured (`rollouts.canary`). Arrays: logprobs float32 [completion tokens]."""

    number: int
    dtype: str
    """Compute type of the trainer."""


class CheckpointDone(Answer, frozen=True, tag="checkpoint_done"):
    """A checkpoint is complete."""

    step: int


class ResourcesDone(Answer, frozen=True, tag="resources_done"):
    """The rank computes on its new cores."""


FROM_CONTROLLER = (
    Precompute,
    Estimate,
    Train,
    Examine,
    OptimizerStep,
    Publish,
    MeasureCanary,
    SaveCheckpoint,
    MoveToCores,
    WeightAnswer,
)
FROM_TRAINER = (
    PrecomputeDone,
    EstimateDone,
    TrainDone,
    StepDone,
    ExamineDone,
    PublishDone,
    CanaryDone,
    CheckpointDone,
    ResourcesDone,
    WeightCall,
)
