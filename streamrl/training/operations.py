"""Floating-point operations of a training pass, for the metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from scheduler.cost.model_shapes import Transformer, uncounted
from streamrl.training.packing import PackedBatch
from streamrl.training.policy_model import Policy


@dataclass(frozen=True)
class TrainingOperations:
    """What a batch costs with the models of a run."""

    shape: Transformer | None
    """The model's shape; None: the cost model does not know its kind."""
    separate: bool
    """Whether each completion is a row of its own."""
    reference: bool
    """Whether there is a reference."""
    proximal: bool
    """Whether there is a proximal copy."""
    critic: bool
    """Whether there is a critic."""

    @classmethod
    def of(cls, policy: Policy, reference: bool, proximal: bool, critic: bool) -> Self:
        """Return those of a policy and the models beside it."""
        values = policy.model.config.to_dict()
        try:
            shape = None if uncounted(values) else Transformer.from_config("policy", values)
        except ValueError:
            shape = None
        return cls(shape, policy.separate, reference, proximal, critic)

    def count(self, batch: PackedBatch, reference_given: bool) -> float:
        """Return the operations of one micro-batch; 0 if the shape is not known.

        A backward pass counts as two forward passes (PaLM, arXiv 2204.02311, appendix B).

        Args:
            batch: what one pass takes.
            reference_given: whether it brings the reference's log-probabilities.
        """
        if self.shape is None:
            return 0.0
        tokens, squares = batch.row_tokens(self.separate), batch.squares(self.separate)
        extra = (self.reference and not reference_given) + self.proximal
        policy = self.shape.forward_flops(tokens, squares, batch.loss_tokens)
        critic = self.shape.forward_flops(tokens, squares, 0) if self.critic else 0.0
        return (3 + extra) * policy + 3 * critic
