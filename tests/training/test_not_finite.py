"""A step with NaN or inf anywhere is refused and changes nothing; without its cause it is as if that had not been."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.errors import RunFailed
from streamrl.protocol.controller_trainer import Refusal
from streamrl.rollouts.train_groups import TrainGroup
from streamrl.training.trainer import Trainer
from streamrl.training.update_bound import stays_finite
from tests.training.conftest import random_groups, run_config

CPU = torch.device("cpu")
PPO = {"name": "ppo", "critic": {"lr": 1e-3}}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def everything(trainer: Trainer) -> list[torch.Tensor]:
    """Weights, moments and step counts on this rank."""
    found = []
    for one in trainer.learners:
        found += [local(p.detach()).clone() for p in one.model.parameters()]
        found += [local(v.detach()).clone() for state in one.optimizer.state.values() for _, v in sorted(state.items())]
    return found


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    """Bit for bit."""
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def with_advantage(group: TrainGroup, value: float) -> TrainGroup:
    """The group, its second sequence with this advantage."""
    first, second, *rest = group.sequences
    return replace(group, sequences=[first, replace(second, advantage=value), *rest])


def trained(model: Path, algorithm: dict[str, Any]) -> Trainer:
    """A trainer that has done a step, so that AdamW has a state."""
    trainer = Trainer(run_config(model, algorithm=algorithm), str(model), CPU)
    trainer.accumulate(random_groups(2, seed=5), is_last=True)
    assert trainer.step(0, 10.0).refused is None
    return trainer


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("algorithm", [{"name": "grpo"}, PPO], ids=["grpo", "ppo"])
def test_a_loss_that_is_not_finite_refuses_the_step_and_the_retry_equals_a_step_without_the_group(
    tiny_model: Path, one_rank: None, algorithm: dict[str, Any], value: float
) -> None:
    trainer, other = trained(tiny_model, algorithm), trained(tiny_model, algorithm)
    groups = random_groups(4)
    bad = [groups[0], with_advantage(groups[1], value), *groups[2:]]
    before = everything(trainer)
    for number, group in enumerate(bad):
        trainer.accumulate([group], is_last=number == 3)
    result = trainer.step(1, 40.0)
    assert result.refused == Refusal("loss", "micro-batch 2") and result.skipped
    assert same(everything(trainer), before)
    assert trainer.examine(bad) == {"g1": Refusal("loss", "the group")}
    assert same(everything(trainer), before)
    assert all(p.grad is None for one in trainer.learners for p in one.model.parameters())
    rest = [group for group in groups if group.group_id != "g1"]
    for one in (trainer, other):
        one.accumulate(rest, is_last=True)
        assert one.step(1, 30.0).refused is None
    assert same(everything(trainer), everything(other))
    assert not same(everything(trainer), before)


def test_a_gradient_that_is_not_finite_is_traced_to_its_group(tiny_model: Path, one_rank: None) -> None:
    trainer = trained(tiny_model, {"name": "grpo"})
    groups = random_groups(3)
    marker = groups[2].sequences[0].completion_tokens.tolist()

    def poison(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        row = kwargs["input_ids"][0].tolist()
        if any(row[i : i + len(marker)] == marker for i in range(len(row))) and output.last_hidden_state.requires_grad:
            output.last_hidden_state.register_hook(lambda gradient: gradient * math.nan)

    hook = trainer.policy.model.base_model.register_forward_hook(poison, with_kwargs=True)
    before = everything(trainer)
    stats = trainer.accumulate(groups, is_last=True)
    assert math.isfinite(stats.loss_sum)
    refused = trainer.step(1, 30.0).refused
    assert refused is not None and refused.what == "gradient"
    assert refused.name in dict(trainer.policy.named_parameters())
    assert same(everything(trainer), before)
    assert {name: bad.what for name, bad in trainer.examine(groups).items()} == {"g2": "gradient"}
    hook.remove()
    assert trainer.examine(groups) == {}  # nothing is left of it


Damage = Callable[[Trainer], torch.Tensor]


def weight_of(trainer: Trainer) -> torch.Tensor:
    return list(trainer.policy.parameters())[3]


DAMAGES: list[tuple[str, Damage]] = [
    ("weight", weight_of),
    ("AdamW's exp_avg", lambda trainer: trainer.learner.optimizer.state[weight_of(trainer)]["exp_avg"]),
    ("AdamW's exp_avg_sq", lambda trainer: trainer.learner.optimizer.state[weight_of(trainer)]["exp_avg_sq"]),
]


@pytest.mark.parametrize(("what", "damaged"), DAMAGES, ids=[what for what, _ in DAMAGES])
def test_a_damaged_weight_or_moment_refuses_every_step_and_is_named(
    tiny_model: Path, one_rank: None, what: str, damaged: Damage
) -> None:
    trainer = trained(tiny_model, {"name": "grpo"})
    with torch.no_grad():
        damaged(trainer).view(-1)[7] = math.inf
    before = everything(trainer)
    trainer.accumulate(random_groups(2), is_last=True)
    name = [name for name, _ in trainer.policy.named_parameters()][3]
    assert trainer.step(1, 10.0).refused == Refusal(what, name)
    assert same(everything(trainer), before)


def critics_weight(trainer: Trainer) -> torch.Tensor:
    assert trainer.critic is not None
    return list(trainer.critic.model.parameters())[3]


def moment_of_critic(trainer: Trainer) -> torch.Tensor:
    assert trainer.critic is not None
    moment: torch.Tensor = trainer.critic.optimizer.state[critics_weight(trainer)]["exp_avg"]
    return moment


def gradient_of_critic(trainer: Trainer) -> torch.Tensor:
    gradient = critics_weight(trainer).grad
    assert gradient is not None
    return gradient


@pytest.mark.parametrize(
    ("what", "damaged", "value"),
    [
        ("weight", critics_weight, math.nan),
        ("AdamW's exp_avg", moment_of_critic, math.inf),
        ("gradient", gradient_of_critic, math.nan),
        ("update", moment_of_critic, 1e38),
    ],
)
def test_what_is_not_finite_of_the_critic_is_named_as_its_own(
    tiny_model: Path, one_rank: None, what: str, damaged: Damage, value: float
) -> None:
    trainer = trained(tiny_model, PPO)
    trainer.accumulate(random_groups(2), is_last=True)
    with torch.no_grad():
        damaged(trainer).view(-1)[7] = value
    assert trainer.critic is not None
    name = "critic." + [name for name, _ in trainer.critic.model.named_parameters()][3]
    assert trainer.step(1, 10.0).refused == Refusal(what, name)


def test_a_weight_that_is_not_finite_is_neither_published_nor_saved(
    tiny_model: Path, one_rank: None, tmp_path: Path
) -> None:
    trainer = trained(tiny_model, {"name": "grpo"})
    trainer.lay_out(1)
    with torch.no_grad():
        weight_of(trainer).view(-1)[7] = math.nan
    with pytest.raises(RunFailed, match=r"version 2 is not published: weight '.*' is not finite \(1 of"):
        trainer.lay_out(2)
    with pytest.raises(RunFailed, match="neither published nor saved"):
        trainer.save(tmp_path)


def test_a_weight_too_large_for_the_published_type_is_not_published(tiny_model: Path, one_rank: None) -> None:
    model = {"path": str(tiny_model), "max_context": 256, "dtype": "bfloat16"}
    trainer = Trainer(run_config(tiny_model, model=model), str(tiny_model), CPU)
    with torch.no_grad():
        weight = weight_of(trainer)
        local(weight).view(-1)[0] = torch.finfo(torch.float32).max  # rounds to inf in bf16
    with pytest.raises(RunFailed, match="is not finite"):
        trainer.lay_out(1)


def test_an_update_is_allowed_only_where_adamw_stays_finite() -> None:
    huge = torch.finfo(torch.float32).max
    for weight in (0.0, 1.0, huge / 8, huge / 2, math.nan):
        for gradient in (0.0, 1.0, 1e15, 1e25):
            for lr, eps, decay in ((1e-3, 1e-8, 0.0), (1e10, 1e-8, 0.1), (1.0, 1e-30, 0.0)):
                options = run_config(Path(".")).optimizer.model_copy(update={"eps": eps, "weight_decay": decay})
                allowed = stays_finite(weight, gradient, (0.0, 0.0), lr, options)
                parameter = torch.nn.Parameter(torch.tensor([weight, -weight, weight, 0.0]))
                settings = {"betas": options.betas, "eps": eps, "weight_decay": decay}
                adamw = torch.optim.AdamW([parameter], lr=lr, fused=True, **settings)  # type: ignore[arg-type]
                parameter.grad = torch.tensor([gradient, gradient, -gradient, gradient * 1e-3])
                adamw.step()
                state = [parameter.detach(), *(v for v in adamw.state[parameter].values())]
                assert not allowed or all(bool(torch.isfinite(one).all()) for one in state)
    usual = run_config(Path(".")).optimizer
    assert stays_finite(100.0, 1e9, (1e9, 1e18), 1.0, usual)
    assert not stays_finite(1.0, 1.0, (math.inf, 0.0), 1e-3, usual)
    assert not stays_finite(1.0, 1e20, (0.0, 0.0), 1e-3, usual)  # its square is above fp32
