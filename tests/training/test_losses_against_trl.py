"""Our objectives against those of TRL, a library of its own (optional: `pip install trl==1.16.0`), in float64.

TRL's loss is a method of its trainer; it is called on a stand-in that holds the options it reads.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from streamrl.rollouts.micro_batch import loss_normalizer
from streamrl.training.objective import policy_objective
from tests.training.test_objective import algorithm

LENGTHS = [5, 1, 3, 4]
MAX_TOKENS = 7


@pytest.fixture(scope="module")
def grpo_trainer() -> Any:
    from trl.trainer.grpo_trainer import GRPOTrainer

    return GRPOTrainer


def data() -> dict[str, torch.Tensor]:
    """[S, T] padded tensors; log-ratios large enough that clips and caps bite."""
    generator = torch.Generator().manual_seed(0)
    shape = (len(LENGTHS), max(LENGTHS))

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    new = noise(0.5) - 2.0
    return {
        "new": new,
        "old": new + noise(0.3),
        "ref": new + noise(0.4),
        "generator": new + noise(0.5),
        "advantages": torch.tensor([1.0, -0.5, -1.5, 0.7], dtype=torch.float64),
        "mask": (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long(),
    }


def trls_loss(trainer: Any, values: dict[str, torch.Tensor], weights: torch.Tensor | None, **options: Any) -> Any:
    """(loss, gradient by the log-probabilities) of TRL."""
    new = values["new"].clone().requires_grad_()
    me = MagicMock()
    defaults = {
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "use_vllm": weights is not None,
        "vllm_importance_sampling_correction": True,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": MAX_TOKENS,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "args": SimpleNamespace(
            delta=None,
            use_bias_correction_kl=False,
            steps_per_generation=1,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.25,
        ),
    }
    for key, value in (defaults | options).items():
        setattr(me, key, value)
    me.accelerator.num_processes = 1
    me.accelerator.gather.side_effect = lambda tensor: tensor
    me.model.training = True
    me._get_per_token_logps_and_entropies.return_value = (new, torch.zeros_like(new), None)
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 2, dtype=torch.int64),
        "prompt_mask": torch.ones(len(LENGTHS), 2, dtype=torch.int64),
        "completion_ids": torch.zeros_like(values["mask"]),
        "completion_mask": values["mask"],
        "advantages": values["advantages"],
        "old_per_token_logps": values["old"],
        "ref_per_token_logps": values["ref"],
        "num_items_in_batch": torch.tensor(float(sum(LENGTHS))),
    }
    if weights is not None:
        inputs["importance_sampling_ratio"] = weights
    loss = trainer._compute_loss(me, None, inputs)
    loss.backward()
    return loss.detach(), new.grad


def our_loss(values: dict[str, torch.Tensor], generator: str, proximal: str | None, keys: dict[str, Any]) -> Any:
    config = algorithm(**keys)
    mask = values["mask"].bool()
    new = values["new"].clone().requires_grad_()
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    objective = policy_objective(
        config,
        new[mask],
        values[generator][mask],
        values["advantages"][ids],
        ids,
        values[proximal][mask] if proximal else None,
        values["ref"][mask],
    )
    loss = objective.loss_sum / loss_normalizer(config.aggregation, sum(LENGTHS), len(LENGTHS), MAX_TOKENS)
    loss.backward()
    return loss.detach(), new.grad


GSPO_CLIP = {"clip_low": 0.02, "clip_high": 0.03}


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ({"name": "grpo", "clip_high": 0.28}, {"loss_type": "grpo"}),
        ({"name": "grpo", "clip_high": 0.28, "kl": {"coef": 0.3}}, {"loss_type": "grpo", "beta": 0.3}),
        ({"name": "dr_grpo", "clip_high": 0.28}, {"loss_type": "dr_grpo"}),
        ({"name": "dapo"}, {"loss_type": "dapo"}),
        (
            {"name": "gspo", **GSPO_CLIP},
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.02, "epsilon_high": 0.03},
        ),
        # TRL's epsilon_high of this loss is the largest ratio itself
        ({"name": "cispo", "clip_high": 0.2}, {"loss_type": "cispo", "epsilon_high": 1.2}),
        # TRL rounds its temperatures to float32
        ({"name": "sapo", "gate_negative": 1.25}, {"loss_type": "sapo"}),
    ],
    ids=lambda part: part.get("name", ""),
)
def test_losses_and_gradients_are_trls(grpo_trainer: Any, keys: dict[str, Any], options: dict[str, Any]) -> None:
    values = data()
    theirs, their_gradient = trls_loss(grpo_trainer, values, None, **options)
    ours, our_gradient = our_loss(values, "old", None, keys)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-12, atol=1e-15)


def test_truncated_weights_between_generator_and_proximal_policy_are_trls(grpo_trainer: Any) -> None:
    values = data()
    weights = torch.exp(values["old"] - values["generator"]).clamp(max=1.3)
    theirs, their_gradient = trls_loss(grpo_trainer, values, weights, loss_type="dapo", beta=0.1)
    off_policy = {"ratio_to": "proximal", "correction": "truncate", "high": 1.3}
    keys = {"name": "dapo", "kl": {"coef": 0.1}, "off_policy": off_policy}
    ours, our_gradient = our_loss(values, "generator", "old", keys)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-12, atol=1e-15)


def test_without_a_correction_the_ratio_to_the_proximal_policy_is_all(grpo_trainer: Any) -> None:
    values = data()
    theirs, their_gradient = trls_loss(grpo_trainer, values, None, loss_type="dapo")
    keys = {"name": "dapo", "off_policy": {"ratio_to": "proximal"}}
    ours, our_gradient = our_loss(values, "generator", "old", keys)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-12, atol=1e-15)
