"""Version 0 of the weights, made by a site from its own model files before it has received any.

A run begins with the model's own weights as version 0, and every site has that model. So a site that takes deltas lays
out its own files as version 0: if their hash is that of the trainer's, not a byte of it has to travel.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import safe_open

from streamrl.machine.model_files import transformers_config
from streamrl.weights.quantize import SCALE_SUFFIX, CodeKind, Described, is_quantized, quantize
from streamrl.weights.sharded import ShardedLayout
from streamrl.weights.version import (
    HASHING_THREADS,
    Manifest,
    WeightVersion,
    bytes_of,
    checksum,
    content_hash,
    places,
    type_name,
)

Expected = Mapping[str, Described]
"""Type and shape of every tensor of a version, in its order."""


def expected_tensors(model: str, dtype: str, generation_dtype: Literal["same"] | CodeKind) -> Expected:
    """Return the tensors that every version of a run holds; no weights are read.

    Args:
        model: folder of an HF model.
        dtype: compute type of the run (torch's name).
        generation_dtype: `weights.generation_dtype` of the run file.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        empty: Any = AutoModelForCausalLM.from_config(transformers_config(model))
    layout = ShardedLayout(empty, getattr(torch, dtype), generation_dtype)
    return {slot.name: (slot.dtype, slot.shape) for slot in layout.slots.values()}


def initial_version(
    model: str, expected: Expected, dtype: str, generation_dtype: Literal["same"] | CodeKind
) -> tuple[Manifest, np.ndarray] | None:
    """Lay out version 0 as the trainer does, from the model's safetensors files.

    Beside the version, one tensor at a time is in memory.

    Args:
        model, dtype, generation_dtype: as in `expected_tensors`.
        expected: tensors that the version must hold.

    Returns:
        Manifest and buffer (uint8 [nbytes]); None: the files do not hold exactly these tensors.
    """
    files: dict[str, Path] = {}
    for path in sorted(Path(model).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            files |= dict.fromkeys(file.keys(), path)

    entries, nbytes = places((name, kind, shape) for name, (kind, shape) in expected.items())
    slots = {entry.name: entry for entry in entries}
    buffer = np.zeros(nbytes, np.uint8)
    sums: dict[str, Future[str]] = {}
    with ThreadPoolExecutor(HASHING_THREADS) as pool:

        def write(name: str) -> bool:
            """Write a tensor, and its scales if it becomes codes; return whether they are those expected."""
            with safe_open(files[name], framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
            kind, shape = expected[name]
            if generation_dtype == "same" or not is_quantized(name, shape):
                found = {name: tensor.to(getattr(torch, kind))}
            else:
                codes, scales = quantize(tensor.to(getattr(torch, dtype)), generation_dtype)
                found = {name: codes, name + SCALE_SUFFIX: scales}
            for one, values in found.items():
                if (type_name(values.dtype), tuple(values.shape)) != expected.get(one):
                    return False
                slots[one].view(buffer).copy_(values)
                sums[one] = pool.submit(checksum, bytes_of(slots[one], buffer))
            return True

        # scales have no file: they are written together with their weights
        if not all(write(name) for name in expected if name in files) or sums.keys() != slots.keys():
            return None
    tensors = tuple(replace(entry, checksum=sums[entry.name].result()) for entry in entries)
    return Manifest(WeightVersion(0, None, content_hash(tensors)), nbytes, tensors), buffer
