"""The loader by which vLLM starts a model's own files in 8 bits; there is no quantized checkpoint.

Later versions come through the weight-transfer engine (`weights/backends/vllm_store.py`), as the same codes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from streamrl.weights.backends.base import LOAD_FORMATS
from streamrl.weights.engine_codes import CodeCount, as_codes


class EightBitLoader(DefaultModelLoader):
    """A loader of a model's files that quantizes the weights of linear layers on their way."""

    def __init__(self, load_config: Any) -> None:
        self._kind = LOAD_FORMATS[load_config.load_format]
        plain = copy.copy(load_config)
        plain.load_format = "auto"
        super().__init__(plain)
        self._count = CodeCount(self._kind)

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:  # type: ignore[override]
        """Yield a model's tensors, those of linear layers as codes and scales."""
        tensors = super().get_all_weights(model_config, model)
        yield from self._count.counted(as_codes(tensors, self._kind, model_config.dtype))

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Load all weights.

        Raises:
            ValueError: vLLM's layers do not take exactly the codes of the model's files.
        """
        held = self._count.held_by(model)
        super().load_weights(model, model_config)
        if problem := self._count.problem(held):
            raise ValueError(f"this model cannot be computed in {self._kind}: {problem}")


for _name in LOAD_FORMATS:
    register_model_loader(_name)(EightBitLoader)
