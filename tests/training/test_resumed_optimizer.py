"""A resumed trainer goes on with the optimizer of the one before, whichever weights have been trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from streamrl.training import trainer_models
from streamrl.training.policy_model import Policy, load_policy
from streamrl.training.trainer import Trainer
from tests.training.conftest import random_groups, run_config
from tests.training.trained import CPU, PPO, full, weights_of


@pytest.fixture
def with_idle_weight() -> Iterator[None]:
    """Let policies have a weight that their forward pass does not use, as a tower for images."""

    def load(*args: Any) -> Policy:
        policy = load_policy(*args)
        policy.model.idle = nn.Parameter(torch.ones(4, 3))
        return policy

    with patch.object(trainer_models, "load_policy", load):
        yield


def trained(model: Path, dtype: str, **changes: Any) -> Trainer:
    values = {"path": str(model), "max_context": 256, "dtype": dtype}
    options = {"lr": 1e-2, "weight_decay": 0.1} | changes
    return Trainer(run_config(model, model=values, algorithm=PPO, optimizer=options), str(model), CPU)


def take_step(trainer: Trainer, step: int, idle_gradient: float | None = None) -> None:
    trainer.accumulate(random_groups(2, seed=step), is_last=True)
    if idle_gradient is not None:
        idle = trainer.policy.model.idle
        idle.grad = torch.zeros_like(idle) + idle_gradient
    assert trainer.step(step, 10.0).refused is None


def everything(trainer: Trainer) -> list[torch.Tensor]:
    return [*weights_of(trainer.learner), *weights_of(trainer.critic)]


@pytest.mark.parametrize(("dtype", "before"), [("float32", 0), ("bfloat16", 2)], ids=["at the start", "after steps"])
def test_weights_without_a_gradient_do_not_prevent_resuming(
    tiny_model: Path, tmp_path: Path, one_rank: None, with_idle_weight: None, dtype: str, before: int
) -> None:
    first = trained(tiny_model, dtype)
    for step in range(before):
        take_step(first, step)
    first.save(tmp_path)
    resumed = trained(tiny_model, dtype)
    resumed.load(tmp_path)
    idle = resumed.learner.optimizer.state[resumed.policy.model.idle]
    assert float(idle["step"]) == 0.0 and not full(idle["exp_avg"]).any() and not full(idle["exp_avg_sq"]).any()
    for trainer in (first, resumed):
        take_step(trainer, before)
        take_step(trainer, before + 1, idle_gradient=0.5)  # from now on it is trained
    assert all(torch.equal(one, other) for one, other in zip(everything(first), everything(resumed), strict=True))
    assert not torch.equal(full(first.policy.model.idle.detach()), torch.ones(4, 3))


def test_saving_does_not_change_what_is_trained_afterwards(
    tiny_model: Path, tmp_path: Path, one_rank: None, with_idle_weight: None
) -> None:
    found = []
    for saves in (False, True):
        trainer = trained(tiny_model, "float32")
        for step in range(3):
            if saves:
                directory = tmp_path / str(step)
                directory.mkdir()
                trainer.save(directory)
            take_step(trainer, step, idle_gradient=0.5 if step == 2 else None)
        found.append(everything(trainer))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_options_that_were_changed_before_a_run_is_resumed_are_those_of_the_run_file(
    tiny_model: Path, tmp_path: Path, one_rank: None
) -> None:
    first = trained(tiny_model, "float32")
    take_step(first, 0)
    first.save(tmp_path)
    changes = {"betas": (0.5, 0.75), "eps": 1e-3, "weight_decay": 0.25}
    resumed = trained(tiny_model, "float32", **changes)
    resumed.load(tmp_path)
    for learner in resumed.learners:
        assert [{name: group[name] for name in changes} for group in learner.optimizer.param_groups] == [changes]
