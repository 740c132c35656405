"""How large `streamrl demo` is: as much as this machine trains in the time, and holds in the memory, that there is.

A step's work is counted in operations and divided by what the CPU does (`machine/probe.py`), so that an old CPU gets
fewer and shorter answers instead of a longer wait. Generation and training share the cores, so their times add up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scheduler.cost.model_shapes import Transformer

STEPS = 5
"""Fewest optimizer steps that still show streaming, a checkpoint, and a ranking that comes to be trusted."""
PROMPT_TOKENS = 50
"""Mean length of a demo's prompt with its chat template."""
MEAN_SHARE = 0.6
"""Mean length of an answer as a share of the longest one allowed, for SmolLM2 on the demo's tasks."""
GENERATION_SHARE, TRAINING_SHARE = 0.45, 0.55
"""Shares of the GEMM rate of all cores that decoding and training reach beside each other, rounded down."""
FIXED_S = 90.0
"""Everything but the model's files and the steps, on a slow machine: starting, checkpoints, the report."""
SPARE = 0.9
"""Share of the time that a size may be predicted to need."""

PROCESSES_GIB = 5.5
"""Two instances and the other processes, without what grows with the model."""
MODEL_BYTES = 40.0
"""Bytes per parameter, over all processes: fp32 weights, gradients and AdamW's moments (16), three copies of a version
in fp32 (12), and the weights of two instances with their packed copies (12)."""
TOKEN_BYTES = 1.6e6
"""Activations that the backward pass needs, of one token of a micro-batch, for each layer of SmolLM2 / 30."""
MICRO_BATCHES = (2048, 1024, 512, 256)


@dataclass(frozen=True)
class DemoSize:
    """The keys of the run file that are chosen."""

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
        """Predicted time of an optimizer step: 2 P operations for a generated token, and three forward passes over
        what is trained (the backward pass is two).

        Args:
            model: its shape.
            gflops: rate of a GEMM on all cores that the run computes on, 10^9 operations per second.
        """
        length = self.max_tokens * MEAN_SHARE
        samples = self.prompts * self.samples
        generated = samples * length
        packed = generated + self.prompts * PROMPT_TOKENS
        forward = model.forward_flops(packed, samples * (PROMPT_TOKENS + length) ** 2, generated)
        work = 2.0 * model.computed * generated / GENERATION_SHARE + 3.0 * forward / TRAINING_SHARE
        return work / (gflops * 1e9)

    def seconds(self, model: Transformer, gflops: float) -> float:
        """Predicted time of the whole demo; arguments as `step_seconds`."""
        return FIXED_S + self.steps * self.step_seconds(model, gflops)


def sizes() -> Iterator[DemoSize]:
    """What may be chosen, the largest first."""
    yield DemoSize(STEPS + 1, 8, 8, 96)
    for prompts, samples, longest in ((8, 8, 96), (8, 8, 64), (8, 6, 64), (6, 6, 64), (6, 6, 48), (6, 4, 48)):
        yield DemoSize(STEPS, prompts, samples, longest)
    yield DemoSize(STEPS, 6, 4, 32)


def choose_size(model: Transformer, gflops: float, limit_s: float) -> DemoSize:
    """The largest size that is predicted to fit, or the smallest one; arguments as `DemoSize.step_seconds`.

    Args:
        model: its shape.
        gflops: of all cores.
        limit_s: seconds for everything after the installation.
    """
    every = list(sizes())
    return next((size for size in every if size.seconds(model, gflops) <= SPARE * limit_s), every[-1])


def peak_bytes(model: Transformer, micro_batch_tokens: int) -> float:
    """Predicted peak memory of all processes, of a demo that computes in fp32 (bf16 needs less)."""
    return PROCESSES_GIB * 2**30 + MODEL_BYTES * model.parameters + TOKEN_BYTES * micro_batch_tokens * model.layers / 30


def choose_micro_batch(model: Transformer, limit_bytes: float) -> int | None:
    """The largest micro-batch (tokens) whose run fits into memory; None: not even the smallest one does."""
    fitting = (tokens for tokens in MICRO_BATCHES if peak_bytes(model, tokens) <= limit_bytes)
    return next(fitting, None)
