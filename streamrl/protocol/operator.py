"""Messages between an operator's commands on a running run, such as `streamrl scale`, and the controller."""

from __future__ import annotations

from streamrl.protocol.message import TypedMessage


class ScalePool(TypedMessage, frozen=True, tag="scale"):
    """Set a pool's target number of instances. Answered by `scaled` or `refused_scaling`."""

    pool: str
    site: str
    """Site of the pool; '': the only site that has such a pool."""
    replicas: int


class CheckpointNow(TypedMessage, frozen=True, tag="checkpoint"):
    """Write a checkpoint after the current optimizer step. Answered by `checkpoint_planned`."""


class PoolScaled(TypedMessage, frozen=True, tag="scaled"):
    """The pool has a new target."""

    pool: str
    """Pool in the form site/pool."""
    before: int
    after: int


class ScalingRefused(TypedMessage, frozen=True, tag="refused_scaling"):
    """The pool's target is unchanged, for the given reason."""

    error: str


class CheckpointPlanned(TypedMessage, frozen=True, tag="checkpoint_planned"):
    """A checkpoint will be written."""

    step: int
    """Optimizer steps that it will contain."""


FROM_OPERATOR = (ScalePool, CheckpointNow)
FROM_CONTROLLER = (PoolScaled, ScalingRefused, CheckpointPlanned)
