"""Gradients and weights of trainers under test, and groups with precomputed reference log-probabilities."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from streamrl.rollouts.train_groups import TrainGroup
from streamrl.rollouts.types import FloatArray
from streamrl.training.learner import Learner
from streamrl.training.trainer import Trainer

CPU = torch.device("cpu")


def accumulated_gradient(
    trainer: Trainer, micro_batches: list[list[TrainGroup]], reference_given: bool = False
) -> torch.Tensor:
    """The batch's summed gradient of policy and critic, flat."""
    for number, groups in enumerate(micro_batches):
        trainer.accumulate(groups, number == len(micro_batches) - 1, reference_given)
    learners = [trainer.learner, *([trainer.critic] if trainer.critic else [])]
    flat = torch.cat([full(p.grad).flatten() for learner in learners for p in learner.model.parameters()])
    for learner in learners:
        learner.optimizer.zero_grad(set_to_none=True)
    return flat.clone()


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def weights_of(learner: Learner[Any] | None) -> list[torch.Tensor]:
    return [full(p.detach()).clone() for p in learner.model.parameters()] if learner else []


PPO = {"name": "ppo", "critic": {"lr": 1e-3}, "kl": {"coef": 0.2, "placement": "reward", "estimator": "k1"}}


def precomputed(groups: list[TrainGroup], values: FloatArray) -> list[TrainGroup]:
    """The groups with these reference log-probabilities, which lie in the groups' order."""
    ends = np.cumsum([s.loss_tokens for group in groups for s in group.sequences])
    assert len(values) == ends[-1]
    pieces = iter(np.split(values, ends[:-1]))
    return [
        replace(group, sequences=[replace(s, reference_logprobs=next(pieces)) for s in group.sequences])
        for group in groups
    ]
