"""Messages between the controller and a person's commands, which come and go."""

from __future__ import annotations

from streamrl.protocol.message import TypedMessage


class ScalePool(TypedMessage, frozen=True, tag="scale"):
    """Give a pool another number of instances. Answered by `scaled` or `refused_scaling`."""

    pool: str
    site: str
    """'': the only site with such a pool."""
    replicas: int


class PoolScaled(TypedMessage, frozen=True, tag="scaled"):
    """The pool has another target."""

    pool: str
    """site/pool."""
    before: int
    after: int


class ScalingRefused(TypedMessage, frozen=True, tag="refused_scaling"):
    """The pool stays as it is."""

    error: str


FROM_OPERATOR = (ScalePool,)
FROM_CONTROLLER = (PoolScaled, ScalingRefused)
