"""The description of a transfer as one array: the manifest and the parts of the largest models exceed an envelope.

A mixture of experts with 400 billion parameters has some 100,000 tensors, each with a name and a checksum in the
manifest, and another checksum in every delta. The array is msgpack, and is read in a thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgpack
import numpy as np

from streamrl.weights.version import CorruptWeights, Manifest, Part

MAX_DESCRIPTION_BYTES = 1 << 28
"""Largest description; a receiver unpacks no larger one."""
DESCRIPTION = "description"
"""Name of the array."""


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


def read_description(array: np.ndarray | None) -> tuple[Manifest, list[dict[str, Any]]]:
    """Return the manifest and the parts, not checked yet, of a description that was received.

    Raises:
        CorruptWeights: it is missing, too large, or no description.
    """
    if array is None or array.dtype != np.uint8 or array.ndim != 1 or array.nbytes > MAX_DESCRIPTION_BYTES:
        raise CorruptWeights(f"no description of at most {MAX_DESCRIPTION_BYTES} bytes came with the manifest")
    try:
        values = msgpack.unpackb(array.data, raw=False, strict_map_key=True, timestamp=0)
        manifest, parts = values["manifest"], values["parts"]
    except Exception as error:  # msgpack raises many types on bad input
        raise CorruptWeights(f"description is malformed: {type(error).__name__}") from error
    if not isinstance(manifest, dict) or not isinstance(parts, list) or not all(isinstance(p, dict) for p in parts):
        raise CorruptWeights("description is malformed")
    return Manifest.from_dict(manifest), parts
