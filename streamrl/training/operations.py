"""Floating-point operations of a training pass, for the metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from scheduler.cost.model_shapes import Transformer, uncounted
from streamrl.training.critic import Critic
from streamrl.training.packing import PackedBatch
from streamrl.training.policy_model import Policy


@dataclass(frozen=True)
class ModelOperations:
    """What a batch costs with one model."""

    shape: Transformer | None
    """The model's shape; None: the cost model does not know its kind."""
    separate: bool
    """Whether each completion is a row of its own."""

    @classmethod
    def of(cls, model: Policy | Critic) -> Self:
        """Return those of a model."""
        values = model.model.config.to_dict()
        try:
            shape = None if uncounted(values) else Transformer.from_config("trained", values)
        except ValueError:
            shape = None
        return cls(shape, model.separate)

    def forward(self, batch: PackedBatch, predicting: float) -> float:
        """Return the operations of a forward pass whose output head is computed for so many tokens; 0: not known."""
        if self.shape is None:
            return 0.0
        squares = batch.squares(self.separate, self.shape.pairs)
        return self.shape.forward_flops(batch.row_tokens(self.separate), squares, predicting)


@dataclass(frozen=True)
class TrainingOperations:
    """What a batch costs with the models of a run."""

    policy: ModelOperations
    reference: bool
    """Whether there is a reference."""
    proximal: bool
    """Whether there is a proximal copy."""
    critic: ModelOperations | None
    """Those of the critic, which may be of another size than the policy; None: there is none."""

    @classmethod
    def of(cls, policy: Policy, reference: bool, proximal: bool, critic: Critic | None) -> Self:
        """Return those of a policy and the models beside it."""
        of_critic = None if critic is None else ModelOperations.of(critic)
        return cls(ModelOperations.of(policy), reference, proximal, of_critic)

    @property
    def known(self) -> bool:
        """Whether the cost model knows the kinds of the models that are trained."""
        return self.policy.shape is not None and (self.critic is None or self.critic.shape is not None)

    def count(self, batch: PackedBatch, reference_given: bool) -> float:
        """Return the operations of one micro-batch; 0 if the shape of a model is not known.

        A backward pass counts as two forward passes (PaLM, arXiv 2204.02311, appendix B).

        Args:
            batch: what one pass takes.
            reference_given: whether it brings the reference's log-probabilities.
        """
        if not self.known:
            return 0.0
        extra = (self.reference and not reference_given) + self.proximal
        policy = self.policy.forward(batch, batch.loss_tokens)
        critic = self.critic.forward(batch, 0) if self.critic else 0.0
        return (3 + extra) * policy + 3 * critic
