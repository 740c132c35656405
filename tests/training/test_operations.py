"""Operations of training passes for the metrics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import CONFIG_MAPPING

from streamrl.rollouts.train_groups import TrainGroup, TrainSequence
from streamrl.training.operations import ModelOperations, TrainingOperations
from streamrl.training.packing import pack


def of_kind(kind: str, **config: int) -> Any:
    return SimpleNamespace(model=SimpleNamespace(config=CONFIG_MAPPING[kind](**config)), separate=True)


@pytest.mark.parametrize(
    ("kind", "known"),
    [("llama", True), ("mixtral", False), ("bamba", False), ("zamba2", False), ("gemma4_text", False)],
)
def test_operations_are_unknown_of_models_whose_weights_are_counted_wrong(kind: str, known: bool) -> None:
    assert TrainingOperations.of(of_kind(kind), reference=False, proximal=False, critic=None).known == known
    policy, critic = of_kind("llama"), of_kind(kind)
    assert TrainingOperations.of(policy, reference=False, proximal=False, critic=critic).known == known


def test_a_critic_of_another_size_has_operations_of_its_own() -> None:
    policy, small = of_kind("llama", hidden_size=64, head_dim=16), of_kind("llama", hidden_size=32, head_dim=16)
    sequence = TrainSequence(np.arange(5), np.zeros(5, np.float32), 1.0)
    batch = pack([TrainGroup("a", np.arange(3), [sequence])])

    def counted(critic: Any) -> float:
        operations = TrainingOperations.of(policy, reference=False, proximal=False, critic=critic)
        return operations.count(batch, reference_given=False)

    assert counted(policy) > counted(small) > counted(None) > 0
    critic = ModelOperations.of(small).forward(batch, 0)
    assert counted(small) - counted(None) == pytest.approx(3 * critic)
