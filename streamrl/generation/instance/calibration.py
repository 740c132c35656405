"""Measurement of an instance's step time by batch size: the curve that dispatch and the simulator use."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from scheduler.cost.decode import StepCurve
from streamrl.generation.instance.engine import Engine
from streamrl.rollouts.types import SampleRequest

SHORT_TOKENS, LONG_TOKENS = 8, 40
"""Tokens of the two runs that are timed: their difference is 32 steps, without the start-up and prefill of both."""
QUICK_TOKENS = 2, 14
"""The same for a starting instance; the second number is reduced where steps are slow."""
BUDGET_S = 20.0
"""Seconds for all measurements of a starting instance.

The first sample should come within a minute of the start, and a plan with rough step times is better than a later one.
On a CPU that computes the model's type well, a few seconds are enough."""
SHORT_PROMPT = 16
ONE_TOKEN = 1
"""Prompt tokens in trials of a starting instance: with more, the prefill of a large batch would outweigh its steps."""
QUICK_PROMPT = 128
LEAST_STEP_S = 1e-6


def batch_sizes(largest: int) -> list[int]:
    """Return the powers of two up to the largest batch size, and that size itself."""
    return sorted({1 << power for power in range(largest.bit_length())} | {largest})


@dataclass(frozen=True)
class TimingTrial:
    """Equal requests that are timed together."""

    batch: int
    prompt: int
    """Prompt tokens of each request."""
    tokens: int
    """Tokens that each request produces."""


class Stopwatch:
    """Timer for requests of an otherwise idle engine."""

    def __init__(self, engine: Engine, repeats: int) -> None:
        """Time a warm engine; each median is over `repeats` measurements."""
        self._engine, self._repeats = engine, repeats
        self._rng = np.random.default_rng(0)
        self._names = itertools.count()

    async def step(self, batch: int, prompt: int, tokens: tuple[int, int] = (SHORT_TOKENS, LONG_TOKENS)) -> float:
        """Return the seconds of a decode step, from two runs that produce the two numbers of `tokens`."""
        short, long = tokens
        times = []
        for _ in range(self._repeats):
            begun = await self._engine.time(self._requests(batch, prompt), short)
            times.append((await self._engine.time(self._requests(batch, prompt), long) - begun) / (long - short))
        return max(statistics.median(times), LEAST_STEP_S)

    async def trial(self, trial: TimingTrial) -> float:
        """Return the seconds that a trial takes."""
        return await self._engine.time(self._requests(trial.batch, trial.prompt), trial.tokens)

    async def prefill(self, prompt: int, step: float) -> float:
        """Return the prefill seconds per prompt token; `step`: seconds of a decode step at batch 1."""
        first = [await self._engine.time(self._requests(1, prompt), 1) for _ in range(self._repeats)]
        return max(0.0, (statistics.median(first) - step) / prompt)

    def _requests(self, batch: int, prompt: int) -> list[SampleRequest]:
        """Make requests with different prompts, so that no cache serves them."""
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
    """Measure the step curve of a warm, otherwise idle engine; takes a minute or two.

    Args:
        engine: warm engine.
        largest: largest batch size.
        context: most tokens of prompt and completion together.
        repeats: measurements over which each median is taken.
        progress: called with a line about each result.
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


class QuickPlan:
    """The choice of what a starting instance measures within a time budget; pure.

    In this order: the step time of its largest batch, that of one request, the cost of a prompt token, the step time of
    a quarter of the largest batch. `next` names a trial, `took` records its time.

    A batch is timed twice, with few tokens and with more: what both runs share cancels. Where the first trial leaves no
    time for the second, its mean time per token, start-up included, is taken as an upper bound of the step time. A
    trial that is expected to exceed the budget is left out: a step time between two measured batches is interpolated,
    and a prompt token that was not timed costs as much as one more request in a step.
    """

    def __init__(self, largest: int, prompt: int, budget_s: float = BUDGET_S) -> None:
        """Plan batches of up to `largest` and a prompt of `prompt` tokens, in `budget_s` seconds altogether."""
        self.largest, self.prompt, self.budget_s = largest, prompt, budget_s
        self.sizes = list(dict.fromkeys((largest, 1, max(1, largest // 4))))
        """Batch sizes in the order of their measurement."""
        self.points: dict[int, float] = {}
        self.per_prefill_token: float | None = None
        self.spent_s = 0.0
        self._todo = [TimingTrial(size, ONE_TOKEN, QUICK_TOKENS[0]) for size in self.sizes]
        self._todo.insert(2, TimingTrial(1, prompt, 1))
        self._first: float | None = None
        """Seconds of the current batch's first trial; None: not run yet."""

    def next(self) -> TimingTrial | None:
        """Return the next trial; None: all are done, or there is no time for more."""
        while self._todo and self.points and self._first is None and self._is_too_long(self._todo[0]):
            del self._todo[0]
        return self._todo[0] if self._todo else None

    def took(self, seconds: float) -> None:
        """Record the seconds of the trial that `next` returned."""
        trial = self._todo.pop(0)
        self.spent_s += seconds
        if trial.prompt == self.prompt and trial.tokens == 1:
            self.per_prefill_token = max(0.0, (seconds - self._step(1)) / self.prompt)
        elif self._first is None:
            # the second trial may take half of what is left; a step takes no longer than the mean one so far
            fits = int((self.budget_s - self.spent_s) / 2 / (seconds / trial.tokens)) - trial.tokens
            more = min(QUICK_TOKENS[1] - trial.tokens, fits)
            if more < 1:
                self.points[trial.batch] = seconds / trial.tokens
                return
            self._first = seconds
            self._todo.insert(0, TimingTrial(trial.batch, trial.prompt, trial.tokens + more))
        else:
            self.points[trial.batch] = max((seconds - self._first) / (trial.tokens - QUICK_TOKENS[0]), LEAST_STEP_S)
            self._first = None

    def _step(self, batch: int) -> float:
        return float(StepCurve.measured(self.points).base(batch))

    def _is_too_long(self, trial: TimingTrial) -> bool:
        """Return whether a trial is expected to exceed the budget.

        Below the smallest measured batch a step takes between its share of that batch's step and all of it;
        half of it is assumed.
        """
        smallest = min(self.points)
        known = self._step(trial.batch) if trial.batch >= smallest else 0.5 * self._step(smallest)
        reading = (trial.prompt - 1) * trial.batch * self._row_s
        return self.spent_s + known * trial.tokens + reading > self.budget_s

    @property
    def _row_s(self) -> float:
        """Seconds that one more request adds to a step; its share of the step if only one batch size was measured."""
        if len(self.points) < 2:
            return self._step(self.largest) / self.largest
        return (self._step(self.largest) - self._step(1)) / (self.largest - 1)

    @property
    def summary(self) -> str:
        """A line about the progress."""
        return f"measuring step times, {len(self.points)} of {len(self.sizes)} batch sizes done"

    @property
    def left_out(self) -> str:
        """A line about what there was no time for; '': everything was measured."""
        if len(self.points) == len(self.sizes) and self.per_prefill_token is not None:
            return ""
        prompt = " and of no prompt" if self.per_prefill_token is None else ""
        which = f"{len(self.points)} of {len(self.sizes)} batch sizes{prompt}"
        return f"step times of {which} measured in {self.spent_s:.0f} s; the rest follows as it runs"

    @property
    def curve(self) -> StepCurve:
        """The measured curve."""
        per_prefill = self._row_s if self.per_prefill_token is None else self.per_prefill_token
        return StepCurve.measured(self.points, per_prefill_token=per_prefill)


async def measure_quickly(engine: Engine, largest: int, context: int, progress: Callable[[str], None]) -> QuickPlan:
    """Measure a starting engine within a time budget; see `QuickPlan`. Arguments are those of `measure`."""
    watch, plan = Stopwatch(engine, repeats=1), QuickPlan(largest, max(2, min(QUICK_PROMPT, context // 2)))
    said = ""
    while (trial := plan.next()) is not None:
        if plan.summary != said:
            progress(said := plan.summary)
        plan.took(await watch.trial(trial))
    return plan
