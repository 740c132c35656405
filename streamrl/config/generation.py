"""The `generation:` of a run file: what instances compute in."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from streamrl.config.algorithm import Algorithm
from streamrl.config.cluster import StrictModel
from streamrl.config.weight_sync import WeightSyncConfig

EightBits = Literal["int8", "fp8"]
"""Types of 8 bits in which an engine may multiply."""


class GenerationConfig(StrictModel):
    """The computation of instances; with 8 bits the samples are slightly off-policy, which has to be corrected."""

    compute: Literal["same", "auto", "int8", "fp8"] = Field(
        "same",
        description="what linear layers of instances multiply, except the output head; same: model.dtype; int8: "
        "weights and activations of 8 bits, on CPUs with AVX-512 VNNI; fp8: the same on GPUs, never run so far; auto: "
        "int8 where a probe of the CPU finds it faster, else same. All but same need algorithm.off_policy to correct "
        "the samples",
    )


def conflict(compute: str, algorithm: Algorithm, weights: WeightSyncConfig) -> str | None:
    """Return why a computation does not go with the rest of a run file; None: it does.

    Args:
        compute: `generation.compute`.
        algorithm: the algorithm.
        weights: the run file's `weights`.
    """
    if compute == "same":
        return None
    key = f"generation.compute: {compute}"
    if not weights.path.eight_bits:
        return (
            f"{key} needs weights that are quantized as they are loaded, which weights.backend {weights.backend} does "
            "not do; set backend: stream"
        )
    kind = "int8" if compute == "auto" else compute
    if (sent := weights.generation_dtype) not in ("same", kind):
        return (
            f"{key} would round weights twice, as weights.generation_dtype is {sent}; expected generation_dtype: same "
            f"or {kind}"
        )
    if algorithm.off_policy.correction == "none":
        return (
            f"{key} samples from a policy that is not quite the trainer's, and algorithm.off_policy does not correct "
            "for it; add off_policy: {ratio_to: proximal, correction: truncate, high: 2.0} to algorithm (truncated "
            "importance sampling), or another correction"
        )
    return None
