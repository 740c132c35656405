"""What a site knows of the weights from the model in its own files, before it has received any.

A run begins with the model's own weights as version 0, and every site has that model. So a site that takes deltas lays
out its own files as version 0: if they hash to what the trainer publishes, not a byte of it has to travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from streamrl.weights.version import Manifest, lay_out

Shapes = Mapping[str, tuple[int, ...]]


def parameter_shapes(model: str) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of a model (an HF folder) by name, tied ones once, in the model's order; no weights are
    read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        empty: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    return {name: tuple(parameter.shape) for name, parameter in empty.named_parameters()}


def initial_version(model: str, shapes: Shapes, dtype: str) -> tuple[Manifest, np.ndarray] | None:
    """Version 0 as a run's trainer lays it out, from the model's safetensors files, one tensor in memory at a time.

    Args:
        model: an HF folder.
        shapes: of its parameters, in order.
        dtype: compute type of the run (torch's name).

    Returns:
        None: the files do not hold exactly these tensors (another format, or names that transformers converts).
    """
    files: dict[str, Path] = {}
    for path in sorted(Path(model).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            files |= dict.fromkeys(file.keys(), path)
    if any(name not in files for name in shapes):
        return None

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in shapes.items():
            with safe_open(files[name], framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
            if tuple(tensor.shape) != tuple(shape):
                raise _OtherShape(name)
            yield name, tensor.to(getattr(torch, dtype))

    try:
        return lay_out(0, tensors())
    except _OtherShape:
        return None


class _OtherShape(Exception):
    """A file's tensor is not the model's parameter."""
