"""An extension of vLLM that makes small batches fast on a CPU: a quantization method that quantizes nothing.

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
from streamrl.generation.instance.few_rows import ARRANGED, BIAS, OPERATION, SOURCES, Shelf, products


def _few(layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """Return a layer's product if `x` has few rows; None: vLLM must compute it."""
    weight: torch.Tensor | None = getattr(layer, ARRANGED, None)
    if weight is None or x.dim() != 2 or x.dtype != weight.dtype:
        return None
    found = products(x.dtype)
    if found is None or not 0 < x.shape[0] <= found.most_rows:
        return None
    if bias is not None and bias.dtype != x.dtype:
        bias = getattr(layer, BIAS, bias)
    result: torch.Tensor = OPERATION(x, weight, bias)
    return result


def _arrange(layer: Any, shelf: Shelf, is_kept: bool) -> None:
    """Arrange a layer's weights for `few_rows`, in the memory of those before.

    Args:
        is_kept: whether vLLM keeps the weights as they are, so that no copy is needed if they are read like that.
    """
    weight = layer.weight.detach()
    found = products(weight.dtype)
    if found is None or not found.fits(weight):
        return
    if is_kept and found.arrangement is None and weight.is_contiguous():
        setattr(layer, ARRANGED, weight)
        return
    copy: torch.Tensor | None = getattr(layer, ARRANGED, None)
    if copy is None:
        copy = shelf.take(weight.shape, weight.dtype)
    setattr(layer, ARRANGED, None if copy is None else found.arrange(weight, copy))


class _Linear(UnquantizedLinearMethod):
    def __init__(self, shelf: Shelf) -> None:
        super().__init__()
        self._shelf = shelf

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep a copy before vLLM packs the weights; called again whenever new ones were loaded."""
        _arrange(layer, self._shelf, is_kept=False)
        if (bias := getattr(layer, "bias", None)) is not None:  # some layers of vLLM turn theirs into fp32
            copy = getattr(layer, BIAS, None)
            given = bias.detach().to(layer.weight.dtype)
            setattr(layer, BIAS, given.clone() if copy is None else copy.copy_(given))
        super().process_weights_after_loading(layer)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the layer: small batches with `few_rows`, others as vLLM does."""
        y = _few(layer, x, bias)
        return super().apply(layer, x, bias) if y is None else y


class _Head(UnquantizedEmbeddingMethod):
    def __init__(self, shelf: Shelf) -> None:
        super().__init__()
        self._shelf = shelf

    def process_weights_after_loading(self, layer: Any) -> None:
        """Arrange the weights; vLLM keeps them for the embedding."""
        super().process_weights_after_loading(layer)
        _arrange(layer, self._shelf, is_kept=True)

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
        return list(SOURCES)

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
        return _Head(self._shelf) if isinstance(layer, ParallelLMHead) else None
