"""An extension of vLLM that makes small fp32 batches fast on a CPU: a quantization method that quantizes nothing.

Its linear layers use `few_rows` for small batches, and vLLM's own products for others.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from streamrl.generation.instance.engine_variables import FEW_ROWS
from streamrl.generation.instance.few_rows import MOST_ROWS, Shelf, multiply, product


def _few(layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """Return a layer's product if `x` has few rows; None: vLLM must compute it."""
    weight, function = getattr(layer, "few_rows_weight", None), product()
    fits = x.dim() == 2 and 0 < x.shape[0] <= MOST_ROWS and x.dtype == torch.float32
    if weight is None or function is None or not fits:
        return None
    y = multiply(function, x, weight)
    return y if bias is None else y.add_(bias)


class _Linear(UnquantizedLinearMethod):
    def __init__(self, shelf: Shelf) -> None:
        super().__init__()
        self._shelf = shelf

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep a copy before vLLM packs the weights; called again whenever new ones were loaded."""
        weight = layer.weight
        usable = weight.dtype == torch.float32 and weight.dim() == 2 and not weight.is_meta
        if usable and product() is not None:
            copy = getattr(layer, "few_rows_weight", None)
            if copy is None:
                copy = self._shelf.take(weight.shape)
            if copy is not None:
                layer.few_rows_weight = copy.copy_(weight.detach())
        super().process_weights_after_loading(layer)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the layer: small batches with `few_rows`, others as vLLM does."""
        y = _few(layer, x, bias)
        return super().apply(layer, x, bias) if y is None else y


class _Head(UnquantizedEmbeddingMethod):
    def process_weights_after_loading(self, layer: Any) -> None:
        """Use the weights without a copy: vLLM keeps them for the embedding."""
        super().process_weights_after_loading(layer)
        weight = layer.weight.detach()
        fits = weight.dtype == torch.float32 and weight.dim() == 2 and weight.is_contiguous()
        layer.few_rows_weight = weight if fits else None

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the head: small batches with `few_rows`, others as vLLM does."""
        y = _few(layer, x, bias)
        return super().apply(layer, x, bias) if y is None else y


@register_quantization_config(FEW_ROWS)
class FewRows(QuantizationConfig):
    """Quantization method that quantizes nothing: it selects the layers that use `few_rows`."""

    def __init__(self) -> None:
        super().__init__()
        self._shelf = Shelf()

    def get_name(self) -> Any:
        return FEW_ROWS

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> FewRows:
        return cls()

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """Return the method for linear layers and the output head; None: vLLM's own."""
        if isinstance(layer, LinearBase):
            return _Linear(self._shelf)
        return _Head() if isinstance(layer, ParallelLMHead) else None
