"""The description of a transfer as one array: the manifest and the parts of the largest models exceed an envelope.

A mixture of experts with 400 billion parameters has some 100,000 tensors, each with a name and a checksum in the
manifest, and another checksum in every delta. The array is msgpack, and is read in a thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgpack
import numpy as np

from streamrl.transport.unpacking import collector_off
from streamrl.weights.version import CorruptWeights, Manifest, Part

MAX_DESCRIPTION_BYTES = 1 << 28
"""Largest description; a receiver unpacks no larger one."""
DESCRIPTION = "description"
"""Name of the array."""
MOST_PARTS = 64
"""Parts in a description by another site's relay: its path starts from one of the last versions that it has served."""
TENSOR_BYTES, DIMENSION_BYTES, PAYLOAD_BYTES, OTHER_BYTES = 120, 9, 80, 400
"""Most bytes of a tensor's entry beside name, type and shape; of a dimension; of a payload; and of what else a manifest
or a part has. A checksum has 66 of them, and a number at most 9."""


def describe(manifest: Manifest, parts: Iterable[Part]) -> np.ndarray:
    """Return a manifest and the parts of a transfer as an array, uint8 [bytes].

    Raises:
        ValueError: they are too large for any receiver.
    """
    values = {"manifest": manifest.to_dict(), "parts": [part.to_dict() for part in parts]}
    packed: bytes = msgpack.packb(values)
    if len(packed) > MAX_DESCRIPTION_BYTES:
        raise ValueError(f"the description of version {manifest.version.number} has {len(packed)} bytes")
    return np.frombuffer(packed, np.uint8)


def largest_description(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> int:
    """Return the most bytes that a relay of another site needs to describe a transfer.

    msgpack becomes up to 100 times as many bytes of memory as it is read, so a model that is small is described by few.

    Args:
        tensors: type (torch's name) and shape of every tensor, by name.
    """
    manifest = sum(
        TENSOR_BYTES + len(name.encode()) + len(dtype) + DIMENSION_BYTES * len(shape)
        for name, (dtype, shape) in tensors.items()
    )
    parts = MOST_PARTS * (OTHER_BYTES + PAYLOAD_BYTES * len(tensors))
    return min(MAX_DESCRIPTION_BYTES, OTHER_BYTES + manifest + parts)


def read_description(array: np.ndarray | None, most_bytes: int | None = None) -> tuple[Manifest, list[dict[str, Any]]]:
    """Return the manifest and the parts, not checked yet, of a description that was received.

    Raises:
        CorruptWeights: it is missing, larger than `most_bytes` (None: than any), or no description.
    """
    most_bytes = MAX_DESCRIPTION_BYTES if most_bytes is None else most_bytes
    if array is None or array.dtype != np.uint8 or array.ndim != 1 or array.nbytes > most_bytes:
        raise CorruptWeights(f"no description of at most {most_bytes} bytes came with the manifest")
    try:
        with collector_off():
            values = msgpack.unpackb(array.data, raw=False, strict_map_key=True, timestamp=0)
        manifest, parts = values["manifest"], values["parts"]
    except Exception as error:  # msgpack raises many types on bad input
        raise CorruptWeights(f"description is malformed: {type(error).__name__}") from error
    if not isinstance(manifest, dict) or not isinstance(parts, list) or not all(isinstance(p, dict) for p in parts):
        raise CorruptWeights("description is malformed")
    return Manifest.from_dict(manifest), parts
