"""Weights as an engine loads them that multiplies in 8 bits: codes with a scale per output row, under vLLM's names.

vLLM computes such layers as compressed-tensors' W8A8: weights as in `streamrl/weights/quantize.py`, activations
quantized by token as they come. The output head, embeddings and norms remain in the model's type. A version that was
sent as such codes is loaded as it is; any other is quantized here, on its way into the engine. Both ways, and an engine
that starts from the model's files, give the same codes for the same weights in the model's type.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from streamrl.weights.quantize import CODE_TYPES, CodeKind, checked, dequantize, is_quantized, quantize
from streamrl.weights.version import Manifest

ENGINE_SCALE = "_scale"
"""What follows a weight's name in the name of its scales, [rows, 1], in vLLM."""
HEADS = {"lm_head", "score"}
"""Names of modules that turn hidden states into logits or scores: they decide tokens, so they keep their precision."""


def is_multiplied_in_codes(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether an engine that multiplies in 8 bits does so with this tensor of a checkpoint."""
    return is_quantized(name, shape) and name.split(".")[-2] not in HEADS


def as_codes(
    tensors: Iterable[tuple[str, torch.Tensor]], kind: CodeKind, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors of a checkpoint as an engine loads them, weights of linear layers as codes and scales.

    Args:
        tensors: (checkpoint name, weights).
        kind: kind of codes.
        dtype: the model's type, to which weights are rounded first.
    """
    for name, tensor in tensors:
        if not is_multiplied_in_codes(name, tuple(tensor.shape)):
            yield name, tensor
            continue
        codes, scales = quantize(tensor.to(dtype), kind)
        yield name, codes
        yield name + ENGINE_SCALE, scales[:, None]


def version_as_codes(
    manifest: Manifest, buffer: np.ndarray, kind: CodeKind, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a version (uint8 [nbytes]) as an engine loads them; codes of this kind unchanged.

    Raises:
        CorruptTensors, CorruptWeights: as `full_precision`.
    """
    for name, tensor, scales in checked(manifest, buffer):
        if scales is None:
            yield from as_codes([(name, tensor)], kind, dtype)
        elif tensor.dtype == CODE_TYPES[kind] and is_multiplied_in_codes(name, tuple(tensor.shape)):
            yield name, tensor
            yield name + ENGINE_SCALE, scales[:, None]
        else:
            yield from as_codes([(name, dequantize(tensor, scales, dtype))], kind, dtype)


class CodeCount:
    """The number of codes that were handed to an engine, compared with what its layers hold.

    Codes that vLLM put into a layer that multiplies in another type would be taken for weights.
    """

    def __init__(self, kind: CodeKind) -> None:
        self.kind = kind
        self._given = 0

    def counted(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors, counting codes."""
        for name, tensor in tensors:
            if tensor.dtype == CODE_TYPES[self.kind]:
                self._given += tensor.numel()
            yield name, tensor

    def held_by(self, model: torch.nn.Module) -> int:
        """Return the number of codes that vLLM's model, whole on this device, takes; before they are packed."""
        return sum(one.numel() for one in model.parameters() if one.dtype == CODE_TYPES[self.kind])

    def problem(self, held: int) -> str:
        """Return what is wrong between the codes that layers take and those given; '': nothing."""
        if held == self._given and held:
            return ""
        return f"vLLM's layers take {held:,} codes of 8 bits, and the weights have {self._given:,}"
