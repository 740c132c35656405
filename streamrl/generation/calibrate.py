"""Measures an instance's step time by batch size: the curve that dispatch and the simulator compute with."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np

from scheduler.cost import StepCurve
from streamrl.generation.engine import Engine
from streamrl.rollouts.types import SampleRequest

SHORT_TOKENS, LONG_TOKENS = 8, 40
"""A step's time is that of the 32 tokens between both: start-up and prompt are in both, and cancel."""
SHORT_PROMPT = 16


def batch_sizes(largest: int) -> list[int]:
    """1, 2, 4, ... and the largest."""
    return sorted({1 << power for power in range(largest.bit_length())} | {largest})


async def measure(
    engine: Engine, largest: int, context: int, vocabulary: int, repeats: int, progress: Callable[[str], None]
) -> StepCurve:
    """Times an engine that has nothing else to do.

    Args:
        engine: warm.
        largest: batch size.
        context: tokens of prompt and completion that fit.
        vocabulary: token ids to draw prompts from (prompts differ, so that no cache serves them).
        repeats: medians are taken over so many measurements.
        progress: told what is done.
    """
    rng = np.random.default_rng(0)
    count = 0

    def requests(batch: int, prompt: int) -> list[SampleRequest]:
        nonlocal count
        count += batch
        return [
            SampleRequest(f"calibrate-{count}-{n}", "", rng.integers(0, vocabulary, prompt, dtype=np.int32), n, 0, 0.0)
            for n in range(batch)
        ]

    async def step(batch: int, prompt: int) -> float:
        times = []
        for _ in range(repeats):
            short = await engine.time(requests(batch, prompt), SHORT_TOKENS)
            long = await engine.time(requests(batch, prompt), LONG_TOKENS)
            times.append((long - short) / (LONG_TOKENS - SHORT_TOKENS))
        return max(statistics.median(times), 1e-6)

    points = {}
    for batch in batch_sizes(largest):
        points[batch] = await step(batch, SHORT_PROMPT)
        progress(f"batch {batch}: {1e3 * points[batch]:.1f} ms a step")
    far = context - LONG_TOKENS
    some = max(1, largest // 4)
    per_context = per_prefill = 0.0
    if far > 2 * SHORT_PROMPT:
        beside = points.get(some) or await step(some, SHORT_PROMPT)
        per_context = max(0.0, (await step(some, far) - beside) / (some * (far - SHORT_PROMPT)))
        first = [await engine.time(requests(1, far), 1) for _ in range(repeats)]
        per_prefill = max(0.0, (statistics.median(first) - points[1]) / far)
        progress(f"context {1e6 * per_context:.3f} us a token and step, prefill {1e6 * per_prefill:.0f} us a token")
    return StepCurve.measured(points, per_context, per_prefill)
