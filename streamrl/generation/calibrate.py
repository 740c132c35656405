"""Measures an instance's step time by batch size: the curve that dispatch and the simulator compute with."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

import numpy as np

from scheduler.cost import StepCurve
from streamrl.generation.engine import Engine
from streamrl.rollouts.types import SampleRequest

SHORT_TOKENS, LONG_TOKENS = 8, 40
"""A step's time is that of the 32 tokens between both: start-up and prompt are in both, and cancel."""
QUICK_TOKENS = 4, 16
"""The same for an instance that starts: a second or two in all."""
SHORT_PROMPT = 16
QUICK_PROMPT = 128


def batch_sizes(largest: int) -> list[int]:
    """1, 2, 4, ... and the largest."""
    return sorted({1 << power for power in range(largest.bit_length())} | {largest})


class Stopwatch:
    """Times requests of an engine that has nothing else to do."""

    def __init__(self, engine: Engine, repeats: int) -> None:
        """
        Args:
            engine: warm.
            repeats: medians are taken over so many measurements.
        """
        self._engine, self._repeats = engine, repeats
        self._rng = np.random.default_rng(0)
        self._names = itertools.count()

    async def step(self, batch: int, prompt: int, tokens: tuple[int, int] = (SHORT_TOKENS, LONG_TOKENS)) -> float:
        """Seconds of a decode step: of the tokens between two numbers of `tokens`."""
        short, long = tokens
        times = []
        for _ in range(self._repeats):
            begun = await self._engine.time(self._requests(batch, prompt), short)
            times.append((await self._engine.time(self._requests(batch, prompt), long) - begun) / (long - short))
        return max(statistics.median(times), 1e-6)

    async def prefill(self, prompt: int, step: float) -> float:
        """Seconds per token of a prompt that is read in; `step`: of a decode step at batch 1."""
        first = [await self._engine.time(self._requests(1, prompt), 1) for _ in range(self._repeats)]
        return max(0.0, (statistics.median(first) - step) / prompt)

    def _requests(self, batch: int, prompt: int) -> list[SampleRequest]:
        """Prompts differ, so that no cache serves them."""
        return [
            SampleRequest(
                f"calibrate-{next(self._names)}",
                "",
                self._rng.integers(0, self._engine.vocabulary, prompt, dtype=np.int32),
                n,
                0,
                0.0,
            )
            for n in range(batch)
        ]


async def measure(
    engine: Engine, largest: int, context: int, repeats: int, progress: Callable[[str], None]
) -> StepCurve:
    """Times a warm engine that has nothing else to do; takes a minute or two.

    Args:
        engine: warm.
        largest: batch size.
        context: tokens of prompt and completion that fit.
        repeats: medians are taken over so many measurements.
        progress: told what is done.
    """
    watch = Stopwatch(engine, repeats)
    points = {}
    for batch in batch_sizes(largest):
        points[batch] = await watch.step(batch, SHORT_PROMPT)
        progress(f"batch {batch}: {1e3 * points[batch]:.1f} ms a step")
    far = context - LONG_TOKENS
    some = max(1, largest // 4)
    per_context = per_prefill = 0.0
    if far > 2 * SHORT_PROMPT:
        beside = points.get(some) or await watch.step(some, SHORT_PROMPT)
        per_context = max(0.0, (await watch.step(some, far) - beside) / (some * (far - SHORT_PROMPT)))
        per_prefill = await watch.prefill(far, points[1])
        progress(f"context {1e6 * per_context:.3f} us a token and step, prefill {1e6 * per_prefill:.0f} us a token")
    return StepCurve.measured(points, per_context, per_prefill)


async def measure_quickly(engine: Engine, largest: int, context: int) -> StepCurve:
    """The same at a few batch sizes and once each, without the context's share: what an instance does as it starts."""
    watch = Stopwatch(engine, repeats=1)
    points = {b: await watch.step(b, SHORT_PROMPT, QUICK_TOKENS) for b in sorted({1, max(1, largest // 4), largest})}
    prompt = min(QUICK_PROMPT, context // 2)
    return StepCurve.measured(points, per_prefill_token=await watch.prefill(prompt, points[1]))
