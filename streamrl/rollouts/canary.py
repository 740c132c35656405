"""The canary: a fixed text whose log-probabilities show whether an instance computes with the trainer's weights.

Checksums prove that the right bytes arrived. The canary proves what they are there for: that the engine computes the
same policy from them, whatever lies between (conversion, fused and packed copies, a cache of the old weights). Trainer
and instances tokenize the same text by the model's own tokenizer, so both have the same tokens without being sent any.

How far two right sides may differ depends on what they compute in, `mismatch_bound`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from streamrl.rollouts.types import FloatArray, IntArray

TEXT = "On Tuesday the old ferry took 19 goats, two pianos and a judge; x = [i ** 2 for i in range(7)] gave no 42."
"""Text with words, numbers and code. Much of it is hard to guess, so that the values depend on all weights."""
PROMPT_TOKENS = 8
MOST_TOKENS = 40
"""Most tokens of prompt and completion together: a prefill of this size costs less than a step with a full batch."""

EXACT, ROUNDED, EIGHT_BITS = 1e-3, 0.1, 0.5
"""Bounds on the mean |difference| of log-probabilities, nats: both sides in fp32, and the weights between them; any of
these in bf16; 8-bit weights."""
FAR = {EXACT: 0.1, ROUNDED: 1.0, EIGHT_BITS: 2.5}
"""Mean |difference| that no rounding explains, nats, by its bound: at least 2.5 times the largest that a family showed,
small and random (docs/explanation/weights.md). That of fp32 leaves room for a GPU that multiplies in TF32."""


@dataclass(frozen=True)
class Canary:
    """The tokens of the canary."""

    prompt_tokens: IntArray
    """Shape [P], at least one."""
    completion_tokens: IntArray
    """Tokens whose log-probabilities are compared, shape [C], at least one."""


def canary(encode: Callable[[str], Sequence[int]], max_context: int) -> Canary:
    """Return the canary of a model.

    Args:
        encode: converts text to token ids, without special tokens.
        max_context: most tokens that an instance takes; one of them is left for the token it must sample.

    Raises:
        ValueError: the tokenizer makes fewer than two tokens of the text.
    """
    tokens = np.asarray(encode(TEXT)[: min(MOST_TOKENS, max_context - 1)], dtype=np.int32)
    if len(tokens) < 2:
        raise ValueError(f"the model's tokenizer makes {len(tokens)} tokens of {TEXT!r}")
    prompt = min(PROMPT_TOKENS, len(tokens) // 2)
    return Canary(tokens[:prompt], tokens[prompt:])


def mean_mismatch(ours: FloatArray, theirs: FloatArray) -> float:
    """Return the mean |difference| of log-probabilities, nats; inf if the shapes differ or a value is not finite."""
    if ours.shape != theirs.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):
        found = float(np.abs(ours - theirs).mean())
    return found if np.isfinite(found) else float("inf")


def mismatch_bound(trainer: str, generator: str, generation_dtype: str = "same", sent: str = "float32") -> float:
    """Return how far log-probabilities of trainer and generator may differ in the mean, nats.

    Args:
        trainer: compute type of the trainer.
        generator: compute type of the instance.
        generation_dtype: type of 8 bits that linear weights are sent in, or that the instance multiplies in; same:
            neither.
        sent: type in which weights are sent: in bf16 they are not exactly the trainer's.
    """
    if generation_dtype != "same":
        return EIGHT_BITS
    return EXACT if trainer == generator == sent == "float32" else ROUNDED


def mismatch_warning(mismatch: float | None, staleness: float | None, bound: float | None) -> str | None:
    """Return a warning if a step's samples show that trainer and generator compute different policies.

    Only a step whose samples all come from the weights that it trains on can be judged, by its first update: otherwise
    the policies differ because one is older, and the canary alone compares equal weights.

    Args:
        mismatch: mean |difference| of log-probabilities over the tokens of the first update, nats; None: no tokens.
        staleness: most versions between the sampling of a token and the step.
        bound: largest difference expected; None: the compute types are not known yet.
    """
    if mismatch is None or bound is None or staleness or mismatch <= bound:
        return None
    return (
        f"log-probabilities of trainer and generator differ by {mismatch:.2g} nats in the mean (bound {bound:.2g}), "
        "with samples of the weights that are trained"
    )
