"""Reference log-probabilities that were computed ahead give the gradient of those computed with the step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.rollouts.micro_batch import split_into_micro_batches
from streamrl.rollouts.micro_batch_wire import from_wire, to_wire
from streamrl.training.trainer import Trainer
from tests.training.conftest import random_groups, relative_error, run_config
from tests.training.trained import CPU, PPO, accumulated_gradient, precomputed

REFERENCED: list[dict[str, Any]] = [{"name": "grpo", "kl": {"coef": 0.5}}, PPO | {"aggregation": "sequence"}]


def moved_trainer(tiny_model: Path, algorithm: dict[str, Any]) -> Trainer:
    """A policy that is no longer its reference."""
    trainer = Trainer(run_config(tiny_model, algorithm=algorithm), str(tiny_model), CPU)
    trainer.accumulate(random_groups(3, seed=9), is_last=True)
    trainer.step(0, 10.0)
    return trainer


@pytest.mark.parametrize("algorithm", REFERENCED, ids=lambda keys: keys["name"])
def test_precomputed_reference_log_probabilities_give_the_same_gradient(
    tiny_model: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch, algorithm: dict[str, Any]
) -> None:
    trainer, groups = moved_trainer(tiny_model, algorithm), random_groups(4)
    whole = accumulated_gradient(trainer, [groups])
    together = precomputed(groups, trainer.precompute_reference(groups))
    alone = [precomputed([group], trainer.precompute_reference([group]))[0] for group in groups]
    travelled = from_wire(*to_wire(together))
    wrong = precomputed(groups, trainer.precompute_reference(groups) - 1.0)
    assert trainer.reference is not None
    monkeypatch.setattr(trainer.reference, "forward", None)  # nothing is computed again
    assert torch.equal(accumulated_gradient(trainer, [together], reference_given=True), whole)
    assert torch.equal(accumulated_gradient(trainer, [travelled], reference_given=True), whole)
    assert relative_error(accumulated_gradient(trainer, [alone], reference_given=True), whole) < 1e-5
    cut = split_into_micro_batches(alone[::-1], max_tokens=30)  # precomputed with other neighbours than trained
    assert len(cut) > 4
    assert relative_error(accumulated_gradient(trainer, [*cut, []], reference_given=True), whole) < 1e-5
    assert relative_error(accumulated_gradient(trainer, [wrong], reference_given=True), whole) > 1e-3  # they matter


def test_where_some_sequences_are_precomputed_all_are_computed(tiny_model: Path, one_rank: None) -> None:
    trainer, groups = moved_trainer(tiny_model, REFERENCED[0]), random_groups(3)
    whole = accumulated_gradient(trainer, [groups])
    wrong = trainer.precompute_reference(groups[:2]) - 1.0  # would be noticed if they were used
    first, second = precomputed(groups[:2], wrong)
    part = replace(second, sequences=[*groups[1].sequences[:2], *second.sequences[2:]])
    mixed = from_wire(*to_wire([first, part, groups[2]]))
    assert [group.has_reference for group in mixed] == [True, False, False]
    assert torch.equal(accumulated_gradient(trainer, [mixed]), whole)
    with pytest.raises(ValueError, match="some sequence has none"):
        trainer.accumulate(mixed, is_last=True, reference_given=True)


def test_only_an_algorithm_with_a_reference_precomputes(tiny_model: Path, one_rank: None) -> None:
    trainer = Trainer(run_config(tiny_model), str(tiny_model), CPU)
    with pytest.raises(ValueError, match="no reference"):
        trainer.precompute_reference(random_groups(1))
