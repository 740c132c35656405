"""What a trainer computes in a step, and holds for it: the models that an algorithm trains and evaluates. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scheduler.cost.model_shapes import Transformer


@dataclass(frozen=True)
class TrainingWork:
    """Models that an algorithm trains and evaluates on the trainer's GPUs, all of one size but for `critic`."""

    trained: int = 1
    """Models with gradients: the actor, and PPO's critic."""
    forward_only: int = 0
    """Additional forward passes: log-probabilities of the reference and of the proximal copy, values of the critic."""
    frozen: int = 0
    """Models held without gradients: the reference, the proximal copy."""
    recompute: bool | Literal["selective"] = True
    """Activation checkpointing. True: one more forward pass of a trained model, much less memory; selective: without
    the products and attention, less memory (`optimizer.gradient_checkpointing`)."""
    epochs: int = 1
    """Passes over each batch."""
    mini_batches: int = 1
    """Parts of each batch, with an update of the weights for each part and pass."""
    compiled: bool = False
    """Whether norms and MLPs are compiled where they can be (`optimizer.compile`): not with `selective`, nor with
    tensor parallelism."""
    after_batch: float = 0.0
    """Share of the training that begins only once a step has all its groups (`simulation.stages.Stages`)."""
    critic: Transformer | None = None
    """Shape of a critic of another size than the policy's, one of the trained models; None: there is none of another
    size. Only `memory_per_gpu` asks."""

    @property
    def updates(self) -> int:
        """Updates of the weights per step."""
        return self.epochs * self.mini_batches

    @property
    def forwards(self) -> float:
        """Operations of a step, in forward passes."""
        return self.epochs * (self.trained * (4 if self.recompute is True else 3) + self.forward_only)


PPO = TrainingWork(trained=2, forward_only=2, frozen=1)
"""Actor and critic are trained; reference and critic are evaluated once (old log-probabilities are the generator's)."""
GRPO = TrainingWork()
