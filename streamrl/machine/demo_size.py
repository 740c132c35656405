"""The size of `streamrl demo`: as much as this machine can train in the available time and memory.

A step's work in operations is divided by the CPU's measured rate (`machine/probe.py`), so that an old CPU gets fewer
and shorter answers instead of a longer wait. Generation and training share the cores, so their times add up.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.cost.model_shapes import Transformer

STEPS = 5
"""Fewest optimizer steps that show streaming, a checkpoint, and a ranking that becomes trusted."""
PROMPT_TOKENS = 50
"""Mean length of a demo's prompt with its chat template."""
MEAN_SHARE = 0.6
"""Mean length of an answer as a share of the longest one allowed, for SmolLM2 on the demo's tasks."""
GENERATION_SHARE, TRAINING_SHARE = 0.38, 0.46
"""Shares of the GEMM rate of all cores that decoding and training reach when run side by side, rounded down."""
FIXED_S = 90.0
"""Seconds for everything but fetching the model and the steps, on a slow machine: start, checkpoints, report."""
SPARE = 0.9
"""Share of the available time that the predicted time may take."""

PROCESSES_GIB = 5.5
"""Memory of two instances and the other processes, without what grows with the model."""
MODEL_BYTES = {"float32": 40.0, "bfloat16": 30.0}
"""Bytes per parameter over all processes, by compute type: fp32 weights, gradients and AdamW's moments (16), three
copies of a version (12 in fp32), and the weights of two instances (with the copies for small batches 12 in fp32)."""
TOKEN_BYTES = 1.6e6
"""Bytes of activations per token of a micro-batch for a model of 30 layers (SmolLM2); scales with the layers."""
MICRO_BATCHES = (2048, 1024, 512, 256)


@dataclass(frozen=True)
class DemoSize:
    """The run file's keys that decide the size of the demo."""

    steps: int
    prompts: int
    samples: int
    max_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.steps} steps of {self.prompts} prompts x {self.samples} samples, "
            f"at most {self.max_tokens} tokens each"
        )

    @property
    def overrides(self) -> list[str]:
        """The size as `KEY=VALUE` overrides of the run file."""
        return [
            f"steps={self.steps}",
            f"batch.prompts_per_step={self.prompts}",
            f"batch.samples_per_prompt={self.samples}",
            f"sampling.max_tokens={self.max_tokens}",
        ]

    def step_seconds(self, model: Transformer, gflops: float) -> float:
        """Predict the seconds of an optimizer step.

        A generated token takes 2 P operations; training takes three forward passes (the backward pass counts as two).

        Args:
            model: shape of the model.
            gflops: GEMM rate on all cores that the run uses, 10^9 operations per second.
        """
        length = self.max_tokens * MEAN_SHARE
        samples = self.prompts * self.samples
        generated = samples * length
        packed = generated + self.prompts * PROMPT_TOKENS
        forward = model.forward_flops(packed, samples * model.pairs(PROMPT_TOKENS + length), generated)
        work = 2.0 * model.computed * generated / GENERATION_SHARE + 3.0 * forward / TRAINING_SHARE
        return work / (gflops * 1e9)

    def seconds(self, model: Transformer, gflops: float) -> float:
        """Predict the seconds of the whole demo; arguments as for `step_seconds`."""
        return FIXED_S + self.steps * self.step_seconds(model, gflops)


def sizes() -> list[DemoSize]:
    """Return the sizes to choose from, the largest first."""
    smaller = ((8, 8, 96), (8, 8, 64), (8, 6, 64), (6, 6, 64), (6, 6, 48), (6, 4, 48), (6, 4, 32))
    return [DemoSize(STEPS + 1, 8, 8, 96), *(DemoSize(STEPS, *size) for size in smaller)]


def choose_size(model: Transformer, gflops: float, limit_s: float) -> DemoSize:
    """Choose the largest size that is predicted to fit, or the smallest one.

    Args:
        model: shape of the model.
        gflops: GEMM rate on all cores that the run uses, 10^9 operations per second.
        limit_s: seconds for everything after the installation.
    """
    return next((size for size in sizes() if size.seconds(model, gflops) <= SPARE * limit_s), sizes()[-1])


def peak_bytes(model: Transformer, dtype: str, micro_batch_tokens: int) -> float:
    """Predict the peak memory of all processes, in bytes.

    Measured with SmolLM2: 10.5 GB in float32 with micro-batches of 256 tokens (11.7 predicted), 10.6 GB in bfloat16
    with 1024 (11.0 predicted).

    Args:
        model: shape of the model.
        dtype: compute type, a key of `MODEL_BYTES`.
        micro_batch_tokens: most tokens of a micro-batch.
    """
    activations = TOKEN_BYTES * micro_batch_tokens * model.layers / 30
    return PROCESSES_GIB * 2**30 + MODEL_BYTES[dtype] * model.parameters + activations


def choose_micro_batch(model: Transformer, dtype: str, limit_bytes: float) -> int | None:
    """Choose the largest micro-batch (tokens) that fits into memory; None: not even the smallest does."""
    fitting = (tokens for tokens in MICRO_BATCHES if peak_bytes(model, dtype, tokens) <= limit_bytes)
    return next(fitting, None)
