"""Operations of training passes for the metrics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from streamrl.training.operations import TrainingOperations


@pytest.mark.parametrize(
    ("kind", "known"),
    [("llama", True), ("mixtral", False), ("bamba", False), ("zamba2", False), ("gemma4_text", False)],
)
def test_operations_are_unknown_of_models_whose_weights_are_counted_wrong(kind: str, known: bool) -> None:
    policy: Any = SimpleNamespace(model=SimpleNamespace(config=CONFIG_MAPPING[kind]()), separate=True)
    operations = TrainingOperations.of(policy, reference=False, proximal=False, critic=False)
    assert (operations.shape is not None) == known
