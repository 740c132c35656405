"""Measurement of an instance's step time by batch size and context: the curve that dispatch and the simulator use."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import numpy as np

from streamrl.generation.instance.engine import Engine
from streamrl.generation.instance.step_trials import MOST_REPEATS, ONE_TOKEN, StepTrials, TimingTrial, fitting
from streamrl.machine.cpu_load import CpuSeconds, MachineLoad
from streamrl.machine.engine_settings import MOST_REPLAYED
from streamrl.rollouts.types import SampleRequest

TOKENS = 8, 40
"""Tokens of the two runs that are timed for `streamrl calibrate`: their difference is 32 steps, without the start-up
and prefill of both; fewer where `model.max_context` has no room for 41."""
QUICK_TOKENS = 2, 14
"""The same for a starting instance; the second number is reduced where steps are slow."""
BUDGET_S = 12.0
"""Seconds for all measurements of a starting instance.

The first sample should come within a minute of the start, and a plan with rough step times is better than a later one.
On a CPU that computes the model's type well, a few seconds are enough."""
REPEAT_S = 3.0
"""Seconds of them for repeats: what still differs then is said, and the instance's work shows it soon enough."""
QUICK_REPEATS = 5
"""Most times that one batch size of a starting instance is timed, where there is time for more."""
READY_TOKENS = 7, 16
"""Tokens of the runs before any is timed: steps until the recording of a batch size is replayed (`replay_vllm.py`), and
more, so that requests which arrive one by one meet in several steps."""
READY_S = 1.75
"""Seconds after which the second of them is left out: requests meet in the first steps where these are slow."""
PROMPT = 128
"""Most tokens of the prompt whose prefill is timed."""


def batch_sizes(largest: int) -> list[int]:
    """Return the powers of two up to the largest batch size, and that size itself."""
    return sorted({1 << power for power in range(largest.bit_length())} | {largest})


class Stopwatch:
    """Timer for requests of a warm, otherwise idle engine.

    Tokens are drawn as in a run: top-p may take longer than the model.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rng = np.random.default_rng(0)
        self._names = itertools.count()
        self._filled: list[np.ndarray] = []
        """Prompts in the prefix cache, of the newest `fill`."""

    async def ready(self, sizes: Iterable[int]) -> None:
        """Run batch sizes untimed: what is compiled or recorded at their first steps is not to be measured."""
        for size in sizes:
            for tokens in READY_TOKENS:
                if await self.trial(TimingTrial(size, ONE_TOKEN, tokens)) > READY_S:
                    break

    async def trial(self, trial: TimingTrial) -> float:
        """Return the seconds that a trial takes."""
        if trial.kind == "steps" and trial.prompt > ONE_TOKEN:
            prompts = self._filled
        else:  # different prompts, so that no cache serves them
            prompts = [
                self._rng.integers(0, self._engine.vocabulary, trial.prompt, dtype=np.int32) for _ in range(trial.batch)
            ]
        if trial.kind == "fill":
            self._filled = prompts
        requests = [
            SampleRequest(f"calibrate-{next(self._names)}", "", prompt, n, 0) for n, prompt in enumerate(prompts)
        ]
        return await self._engine.time(requests, trial.tokens)


async def measure(
    engine: Engine, largest: int, context: int, budget_s: float, progress: Callable[[str], None]
) -> tuple[StepTrials, MachineLoad]:
    """Measure all of `batch_sizes`, repeatedly.

    Args:
        engine: warm, otherwise idle engine.
        largest: largest batch size.
        context: most tokens of prompt and completion together.
        budget_s: seconds for all measurements; fewer if the repeats agree earlier.
        progress: called with a line about what is done.

    Returns:
        The times, and what else the machine did meanwhile.
    """
    limits = TOKENS, budget_s, budget_s, MOST_REPEATS
    return await _measure(engine, _trials(engine, batch_sizes(largest), context, *limits), progress)


async def measure_quickly(
    engine: Engine, largest: int, context: int, progress: Callable[[str], None]
) -> tuple[StepTrials, MachineLoad]:
    """Measure the batch sizes that matter most of a starting engine, the largest first; see `measure`."""
    sizes = (largest, 1, max(1, largest // 4))
    limits = QUICK_TOKENS, BUDGET_S, REPEAT_S, QUICK_REPEATS
    return await _measure(engine, _trials(engine, sizes, context, *limits), progress)


def _trials(
    engine: Engine,
    sizes: Iterable[int],
    context: int,
    tokens: tuple[int, int],
    budget_s: float,
    repeat_s: float,
    most_repeats: int,
) -> StepTrials:
    """Return the trials of an engine; a batch with context takes half of the KV cache, so that none is preempted."""
    prompt, room = max(2, min(PROMPT, context // 2)), engine.kv_tokens // 2
    tokens = fitting(tokens, context)
    return StepTrials(sizes, prompt, context - tokens[1], room, tokens, budget_s, repeat_s, most_repeats)


async def _measure(
    engine: Engine, trials: StepTrials, progress: Callable[[str], None]
) -> tuple[StepTrials, MachineLoad]:
    watch, said = Stopwatch(engine), ""
    await watch.ready(size for size in trials.sizes if size <= MOST_REPLAYED and not engine.cuda)
    before = CpuSeconds.read()
    while (trial := trials.next()) is not None:
        if trials.summary != said:
            progress(said := trials.summary)
        trials.took(await watch.trial(trial))
    return trials, MachineLoad.between(before, CpuSeconds.read())
