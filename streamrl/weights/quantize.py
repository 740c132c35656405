"""Generation weights in 8 bits: linear weights as codes, with one scale per output row.

    scale_r = max_c |w_rc| / limit        code_rc = round(w_rc / scale_r)        w_rc ~ code_rc * scale_r

`limit` is the largest code: 448 for fp8 (float8_e4m3fn, Micikevicius et al., "FP8 Formats for Deep Learning", arXiv
2209.05433), 127 for int8. Rounding is to nearest, ties to even. vLLM and compressed-tensors call this symmetric
quantization of weights by `channel`.

A tensor's checkpoint name and shape alone decide whether it is quantized, so a site that has only the files' headers
knows what to expect: matrices named `<module>.weight`, except embeddings (including a tied output head; an untied one
is quantized), norms, and the routers of mixtures of experts, which are small and in which small errors decide much.

In a manifest, codes have the weight's name, and their scales (float32 [rows]) that name plus `.scale`. A trainer
publishes everything else in its compute type, so an 8-bit type means that a tensor is codes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
import torch

from streamrl.weights.version import CorruptWeights, Manifest, type_name

CodeKind = Literal["fp8", "int8"]

CODE_TYPES: dict[CodeKind, torch.dtype] = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
LIMITS: dict[CodeKind, float] = {"fp8": 448.0, "int8": 127.0}
"""Largest code of each kind."""
SCALE_SUFFIX = ".scale"
NOT_LINEAR = ("embed", "norm", "wte", "wpe")
"""Parts of module names that mean that the module is no linear layer."""
ROUTERS = {"gate", "router"}
"""Names of modules that choose experts; in some models their weights are those of a module inside."""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Smallest scale, also of rows of zeros: a subnormal scale would lose precision, and 0 cannot be divided by."""

Described = tuple[str, tuple[int, ...]]
"""Type (torch's name) and shape of a tensor."""


def is_quantized(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor with this checkpoint name and shape is sent as codes."""
    *modules, last = name.lower().split(".")
    if len(shape) != 2 or not modules or last != "weight":
        return False
    return ROUTERS.isdisjoint(modules) and not any(word in modules[-1] for word in NOT_LINEAR)


def quantized(tensors: Mapping[str, Described], kind: CodeKind) -> dict[str, Described]:
    """Return the tensors of a quantized version, in its order, from those of an unquantized one.

    Raises:
        ValueError: a tensor has the name that the scales of another would get.
    """
    result: dict[str, Described] = {}
    for name, (dtype, shape) in tensors.items():
        if not is_quantized(name, shape):
            result[name] = dtype, shape
            continue
        scale = name + SCALE_SUFFIX
        if scale in tensors:
            raise ValueError(f"the model has a tensor {scale!r}, so {name!r} cannot be quantized")
        result[name] = type_name(CODE_TYPES[kind]), shape
        result[scale] = "float32", shape[:1]
    return result


def quantize(tensor: torch.Tensor, kind: CodeKind) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a matrix [rows, columns] to 8 bits. Rows are independent, so some rows give their part of the result.

    Returns:
        (codes [rows, columns], scales float32 [rows]).

    Raises:
        ValueError: the tensor is not two-dimensional, or holds inf or nan.
    """
    if tensor.ndim != 2:
        raise ValueError(f"a tensor of shape {list(tensor.shape)} has no rows of weights")
    values = tensor.float()
    if tensor.numel() == 0:
        return values.to(CODE_TYPES[kind]), values.new_full((len(values),), SMALLEST_SCALE)
    scales = (values.abs().amax(dim=1) / LIMITS[kind]).clamp_(min=SMALLEST_SCALE)
    if not torch.isfinite(scales).all():  # the maximum of a row with nan is nan
        raise ValueError("weights that are inf or nan have no 8-bit codes")
    codes = (values / scales[:, None]).clamp_(-LIMITS[kind], LIMITS[kind])
    if kind == "int8":
        codes.round_()  # half to even; a conversion to int8 alone would truncate
    return codes.to(CODE_TYPES[kind]), scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Turn codes [rows, columns] and scales (float32 [rows]) back into weights, computed in fp32 and rounded once."""
    return (codes.float() * scales[:, None]).to(dtype)


def scales_of(manifest: Manifest) -> dict[str, str]:
    """Return the names of a version's codes, with the names of their scales.

    Raises:
        CorruptWeights: codes have no scales that fit them.
    """
    entries = {entry.name: entry for entry in manifest.tensors}
    types = {type_name(dtype) for dtype in CODE_TYPES.values()}
    pairs: dict[str, str] = {}
    for name, entry in entries.items():
        if entry.dtype not in types:
            continue
        scale = entries.get(name + SCALE_SUFFIX)
        if scale is None or (scale.dtype, scale.shape) != ("float32", entry.shape[:1]) or len(entry.shape) != 2:
            raise CorruptWeights(f"version {manifest.version.number}: codes {name!r} have no scales that fit them")
        pairs[name] = scale.name
    return pairs


def full_precision(manifest: Manifest, buffer: np.ndarray, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (checkpoint name, weights) of a version (uint8 [nbytes]): views, or codes dequantized to `dtype`.

    Each tensor's bytes are compared with its checksum before it is yielded.

    Raises:
        CorruptTensors: a tensor does not match its checksum; those before it have been yielded.
        CorruptWeights: codes have no scales that fit them, or the buffer has another size.
    """
    for name, tensor, scales in checked(manifest, buffer):
        yield name, tensor if scales is None else dequantize(tensor, scales, dtype)


def checked(manifest: Manifest, buffer: np.ndarray) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
    """Yield (checkpoint name, tensor, scales if it is codes) of a version; views, checked as in `full_precision`.

    Raises:
        CorruptTensors, CorruptWeights: as `full_precision`.
    """
    pairs = scales_of(manifest)
    scales = set(pairs.values())
    tensors = dict(manifest.tensors_of(buffer))
    with manifest.checking(buffer) as check:
        for name, tensor in tensors.items():
            if name in pairs:
                check(name)
                check(pairs[name])
                yield name, tensor, tensors[pairs[name]]
            elif name not in scales:
                check(name)
                yield name, tensor, None
