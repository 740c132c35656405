"""What the proof of an architecture found about the ways to compute a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

PackingKind = Literal["shared", "separate"]


@dataclass(frozen=True)
class PackingWay:
    """One way to compute a batch, against the model's definition."""

    kind: PackingKind
    attention: str
    """transformers' name of its attention."""
    logprob_error: float = math.inf
    """Largest difference of a log-probability, in nats."""
    gradient_error: float = math.inf
    """Largest relative difference of a parameter's gradient (L2 norms)."""
    differs: str = ""
    """What differs and where; '': nothing beyond rounding."""


@dataclass(frozen=True)
class PackingProof:
    """What was found for an architecture."""

    model_type: str
    """transformers' name of the architecture."""
    ways: tuple[PackingWay, ...]
    """All ways to compute a batch, the fastest first; a kind of packing may have several."""
    longest: int | None = None
    """Longest row for which it holds (`small_config.longest_exact`); None: any."""
    unproven: str = ""
    """Why there is no proof: its small model could not be built and run; '': there is one."""
    refuted: str = ""
    """Why no packing can be right: it is no causal language model; '': it is one."""
