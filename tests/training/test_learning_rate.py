"""Learning rates are those of transformers' schedules, and depend on nothing but the number of the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import optimization

from streamrl.config.optimizer import OptimizerConfig
from streamrl.rollouts.train_groups import TrainGroup, TrainSequence
from streamrl.training.learning_rate import learning_rate, warm_up
from streamrl.training.trainer import Trainer
from tests.training.conftest import random_groups, run_config

Schedule = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
WARM, TOTAL = 4, 31

REFERENCES: dict[str, Schedule] = {
    "constant": lambda o: optimization.get_constant_schedule_with_warmup(o, WARM),
    "linear": lambda o: optimization.get_linear_schedule_with_warmup(o, WARM, TOTAL - 1),
    "cosine": lambda o: optimization.get_cosine_schedule_with_warmup(o, WARM, TOTAL - 1),
    "wsd": lambda o: optimization.get_wsd_schedule(o, WARM, 6, TOTAL - 1, decay_type="linear"),
}


def reference(schedule: Schedule) -> list[float]:
    """The rates of a transformers' schedule at positions 0 to TOTAL, of lr 1."""
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = schedule(optimizer)
    rates = []
    for _ in range(TOTAL + 1):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("decay", REFERENCES)
def test_the_rates_are_those_of_transformers(decay: str) -> None:
    """Two shifts apart: its warm-up begins with a step of rate 0, and its decay ends one step behind the last one."""
    options = OptimizerConfig.model_validate(
        {"lr": 1.0, "warmup_steps": WARM, "decay": decay, "min_lr_fraction": 0.0}
        | ({"decay_steps": 6} if decay == "wsd" else {})
    )
    theirs = reference(REFERENCES[decay])
    rates = [learning_rate(step, TOTAL, options) for step in range(TOTAL)]
    assert rates[:WARM] == pytest.approx(theirs[1 : WARM + 1])
    assert rates[WARM:] == pytest.approx(theirs[WARM:TOTAL], abs=1e-12)


@pytest.mark.parametrize("decay", REFERENCES)
def test_several_updates_of_a_step_are_positions_of_their_own(decay: str) -> None:
    keys = {"lr": 1.0, "decay": decay, "min_lr_fraction": 0.2}
    options = OptimizerConfig.model_validate(
        keys | {"warmup_steps": 2} | ({"decay_steps": 4} if decay == "wsd" else {})
    )
    finer = options.model_copy(update={"warmup_steps": 6, "decay_steps": 12})
    rates = [learning_rate(step, 9, options, update, 3) for step in range(9) for update in range(3)]
    assert rates == [learning_rate(position, 27, finer) for position in range(27)]


def test_a_warm_up_ends_at_the_whole_rate_and_none_begins_with_it() -> None:
    assert [warm_up(step, 4) for step in (0, 2, 3, 4, 9)] == [0.25, 0.75, 1.0, 1.0, 1.0]
    assert warm_up(0, 0) == 1.0


def test_wsd_decays_over_the_last_tenth_unless_told_otherwise() -> None:
    options = OptimizerConfig(lr=1.0, decay="wsd", min_lr_fraction=0.5)
    rates = [learning_rate(step, 40, options) for step in range(40)]
    assert rates[:36] == [1.0] * 36
    assert rates[36:] == pytest.approx([0.875, 0.75, 0.625, 0.5])


def test_a_decay_ends_at_its_share_of_the_rate_and_stays_there() -> None:
    options = OptimizerConfig(lr=2.0, warmup_steps=1, decay="linear", min_lr_fraction=0.1)
    assert learning_rate(4, 5, options) == learning_rate(9, 5, options) == pytest.approx(0.2)


def test_a_decay_over_one_step_or_none_divides_by_no_zero() -> None:
    options = OptimizerConfig(lr=2.0, warmup_steps=0, decay="linear", min_lr_fraction=0.1)
    assert learning_rate(0, 1, options) == 2.0
    assert [learning_rate(step, 2, options) for step in range(2)] == pytest.approx([2.0, 0.2])


@pytest.mark.parametrize("decay", ["linear", "cosine", "wsd"])
def test_a_decay_for_which_the_warm_up_leaves_the_last_update_alone_reaches_its_end(decay: str) -> None:
    keys = {"lr": 2.0, "warmup_steps": 3, "decay": decay, "min_lr_fraction": 0.1}
    options = OptimizerConfig.model_validate(keys | ({"decay_steps": 1} if decay == "wsd" else {}))
    assert [learning_rate(step, 4, options) for step in range(2, 5)] == pytest.approx([2.0, 0.2, 0.2])
    assert learning_rate(2, 3, options) == 2.0  # it never begins, which the checks before a launch say


def test_a_resumed_trainer_and_a_step_tried_again_have_the_rate_of_their_step(
    tiny_model: Path, one_rank: None, tmp_path: Path
) -> None:
    keys = {"lr": 1e-3, "decay": "linear", "warmup_steps": 2, "min_lr_fraction": 0.0}
    config = run_config(tiny_model, optimizer=keys, steps=6)
    bad = TrainGroup("bad", np.array([1], np.int32), [TrainSequence(np.array([2]), np.array([-1.0]), float("nan"))])

    def steps(trainer: Trainer, numbers: range, refused: int | None = None) -> list[float]:
        rates = []
        for step in numbers:
            if step == refused:
                trainer.accumulate([bad], is_last=True)
                assert trainer.step(step, 1.0).refused is not None
            trainer.accumulate(random_groups(1, seed=step), is_last=True)
            rates.append(trainer.step(step, 10.0).learning_rate)
        return rates

    whole = Trainer(config, str(tiny_model), torch.device("cpu"))
    expected = [learning_rate(step, 6, config.optimizer) for step in range(6)]
    assert steps(whole, range(3), refused=1) == expected[:3]
    whole.save(tmp_path)
    resumed = Trainer(config, str(tiny_model), torch.device("cpu"))
    resumed.load(tmp_path)
    assert steps(whole, range(3, 6)) == steps(resumed, range(3, 6)) == expected[3:]
    for ours, theirs in zip(whole.policy.parameters(), resumed.policy.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_critics_warm_up_goes_on_from_update_to_update(tiny_model: Path, one_rank: None) -> None:
    algorithm = {"name": "ppo", "critic": {"lr": 1e-3, "warmup_steps": 2}}
    batch = {"epochs": 2, "prompts_per_step": 2}
    config = run_config(tiny_model, algorithm=algorithm, optimizer={"lr": 1e-3, "warmup_steps": 2}, batch=batch)
    trainer = Trainer(config, str(tiny_model), torch.device("cpu"))
    assert trainer.critic is not None
    (group,) = random_groups(1)
    estimated = [replace(row, estimates=np.ones((row.loss_tokens, 3), np.float32)) for row in group.sequences]
    rates = []
    for step in range(3):
        for update in range(2):
            trainer.accumulate([replace(group, sequences=estimated)], is_last=True)
            policy = trainer.step(step, 10.0, update=update).learning_rate
            rates.append((policy, trainer.critic.optimizer.param_groups[0]["lr"]))
    assert rates == [(rate, rate) for rate in (0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3)]
