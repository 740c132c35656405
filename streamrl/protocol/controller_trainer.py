"""Messages between the controller and each rank of the trainer.

    controller -> rank   prepare, train, step, publish, checkpoint, resources, weight_answer
    rank -> controller   prepare_done, train_done, step_done, publish_done, checkpoint_done, resources_done, weight_call

Every rank gets the same commands in the same order, one at a time, and acknowledges a command when it has done it; then
it answers. A rank that dies leaves its command open, and the run continues from its newest checkpoint.
"""

from __future__ import annotations

from typing import Any

from streamrl.protocol.controller_site import WeightAnswer, WeightCall
from streamrl.protocol.message import TypedMessage

# controller -> rank


class MicroBatch(TypedMessage, frozen=True, tag="micro_batch"):
    """Groups in the form of `rollouts.micro_batch.to_wire`; the base of `Prepare` and `Train`.

    Arrays: prompts int32, completions int32, logprobs float32, reference_logprobs float32, each one after the other.
    """

    groups: list[tuple[str, int, list[int]]]
    """(group id, tokens of the prompt, tokens of each completion)."""
    advantages: list[float]
    """Of each sequence."""
    has_reference: list[bool]
    """Whether `reference_logprobs` has those of a sequence."""


class Prepare(MicroBatch, frozen=True, tag="prepare"):
    """Work out the frozen reference's log-probabilities of these groups."""


class Train(MicroBatch, frozen=True, tag="train"):
    """Add the gradient of a micro-batch."""

    is_last: bool
    """Whether the optimizer step follows."""
    reference_given: bool
    """Whether every sequence, on every rank, has its reference log-probabilities."""


class OptimizerStep(TypedMessage, frozen=True, tag="step"):
    """Do an optimizer step with the gradient that was added up."""

    step: int
    """0-based."""
    normalizer: float
    """Divides the gradient: the batch's tokens or sequences, as the run file says."""
    skip: bool
    """Throw the gradient away."""


class Publish(TypedMessage, frozen=True, tag="publish"):
    """Make the current weights available to all sites."""


class SaveCheckpoint(TypedMessage, frozen=True, tag="checkpoint"):
    """Write a checkpoint."""

    step: int
    state: dict[str, Any]
    """The controller's own, kept as `state.json`."""
    pending: list[int]
    """Steps whose checkpoints are being evaluated, and stay."""


class MoveToCores(TypedMessage, frozen=True, tag="resources"):
    """Compute on these CPU cores from now on."""

    cores: list[int]


# rank -> controller


class Answer(TypedMessage, frozen=True, tag="answer"):
    """The base of all answers; times are unix seconds."""

    rank: int
    started: float
    finished: float


class PrepareDone(Answer, frozen=True, tag="prepare_done"):
    """Arrays: reference_logprobs float32 [completion tokens of the share]."""


class TrainDone(Answer, frozen=True, tag="train_done"):
    """A micro-batch is added."""

    stats: dict[str, float]
    """Sums over its tokens (`training.objective.MicroStats`)."""


class StepDone(Answer, frozen=True, tag="step_done"):
    """An optimizer step is done (`training.trainer.StepResult`)."""

    grad_norm: float
    learning_rate: float
    skipped: bool


class PublishDone(Answer, frozen=True, tag="publish_done"):
    """A version is there to be fetched (`weights.backends.base.Published`)."""

    number: int
    content_hash: str
    """'': the trainer itself has brought it to all instances (NCCL)."""
    bytes: int


class CheckpointDone(Answer, frozen=True, tag="checkpoint_done"):
    """A checkpoint is complete."""

    step: int


class ResourcesDone(Answer, frozen=True, tag="resources_done"):
    """The rank computes on its new cores."""


FROM_CONTROLLER = (Prepare, Train, OptimizerStep, Publish, SaveCheckpoint, MoveToCores, WeightAnswer)
FROM_TRAINER = (PrepareDone, TrainDone, StepDone, PublishDone, CheckpointDone, ResourcesDone, WeightCall)
