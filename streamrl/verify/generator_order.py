"""What a check of a model in vLLM is asked, and the names of its stages."""

from __future__ import annotations

from dataclasses import dataclass

from streamrl.weights.quantize import CodeKind

AGAINST = "trainer against vLLM"
VERSION = "a weight version against a fresh engine"
BETWEEN_TOKENS = "new weights between tokens"
IN_INT8 = "layers in int8"
FRESH_IN_INT8 = "a fresh engine in int8"
BEFORE, DELIVERED, FRESH = "before", "delivered", "fresh"
"""Samples of both versions: of the running engine, and of a fresh one."""
LIMIT_S = 600.0
"""Seconds that the engines of one model may take."""

ALL_CODES: tuple[CodeKind, ...] = ("fp8", "int8")


@dataclass(frozen=True)
class Order:
    """One model to check."""

    models: tuple[str, str]
    """Two folders in HF format with the same architecture and different weights."""
    attention: str
    """transformers' name of the trainer's attention (`Packing.attention`)."""
    folder: str
    """Empty folder for versions and logs."""
    codes: tuple[CodeKind, ...] = ALL_CODES
    """Kinds of 8-bit weights that are sent as well."""
    in_int8: bool = True
    """Whether engines that multiply in int8 are checked as well, where the CPU can do it."""


def in_codes(kind: CodeKind) -> str:
    """Return the name of the check that sends weights in 8 bits."""
    return f"weights in {kind}"
