"""A figure of `streamrl verify --hardware`, and how much is computed for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler.cost.hardware import peak_tflops

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Measurement:
    """One figure, or why there is none."""

    what: str
    value: float | None
    """None: it could not be measured here; `note` says why."""
    unit: str
    note: str = ""

    def __str__(self) -> str:
        return "--" if self.value is None else f"{self.value:.4g} {self.unit}".rstrip()


@dataclass(frozen=True)
class Size:
    """How much the stages compute on a kind of device."""

    side: int
    """Side of the square matrices whose product is timed."""
    megabytes: int
    """Read and copied at once."""
    attention: tuple[int, tuple[int, ...]]
    """Tokens of a prompt and of its completions."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    contexts: tuple[int, ...]
    """Tokens of the sequences that the trainer computes."""


def sheet_peak(device: torch.device) -> float | None:
    """Return the dense bf16 peak of a GPU by its data sheet, TFLOP/s; None: it is unknown, or a CPU."""
    import torch

    return peak_tflops(torch.cuda.get_device_name(device), 1) if device.type == "cuda" else None
