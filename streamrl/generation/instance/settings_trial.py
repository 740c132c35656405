"""Trials of vLLM's settings on this CPU, each in a process of its own: `streamrl calibrate --engine`.

A trial is `python -m streamrl.generation.instance.settings_trial`. It reads a line of JSON that says what to start, and
prints its measurements as its last line.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from streamrl.config.cluster import GenerationPool
from streamrl.config.run import RunConfig
from streamrl.errors import UserError
from streamrl.machine.cpu import this_cpu
from streamrl.machine.engine_settings import (
    CANDIDATES,
    EngineSettings,
    EngineTrial,
    comparison,
    keep,
    settings_note,
    table,
)
from streamrl.machine.model_files import resolve_model
from streamrl.runtime.module_process import run_module
from streamrl.runtime.process_plan import KEPT_HEAP, ONE_BLAS_THREAD, PASSIVE_WAITING

SIZES = (1, 16, 64)
"""Batch sizes that are timed, up to the pool's largest: a last long answer, a small batch and a large one."""
TOKENS = 8, 20
"""Tokens of a pair of runs: 12 steps, without what both share."""
BUDGET_S = 60.0
"""Seconds of measuring each setting."""
TRIAL_LIMIT_S = 300.0
LOGGED = re.compile(r"^(\([^)]*\) )?([A-Z]+ ([-\d]+ [:\d]+ )?\[[^]]*\] ?)?")
"""What vLLM's processes and log put before a line."""
RAISED = re.compile(r"[\w.]+(Error|Exception)(: |$)")
"""How the last line of a traceback begins."""


def try_settings(pool: GenerationPool, run: RunConfig, site: str, say: Callable[[str], None]) -> None:
    """Try all candidate settings, print a table, and store it for this machine.

    Args:
        pool: pool whose instance is started.
        run: configuration of the run, its type resolved.
        site: site of the pool.
        say: called with each line of output.

    Raises:
        UserError: not even the default settings start, or the trials cannot be stored.
    """
    trials = []
    for settings in CANDIDATES:
        say(f"trying {settings}")
        trials.append(_try(settings, pool, run, site))
    for line in table(trials):
        say(line)
    if trials[0].error:
        raise UserError(f"vLLM does not start with its default settings: {trials[0].error}")
    said = comparison(trials, f"{this_cpu()}, {time.strftime('%Y-%m-%d')}")
    kind = Path(resolve_model(run.model.path)), run.model.dtype, pool.threads
    try:
        path = keep(said, trials, *kind)
    except OSError as error:
        raise UserError(f"cannot keep what was measured: {error}") from error
    say(settings_note(*kind))
    say(f"kept in {path}")


def _try(settings: EngineSettings, pool: GenerationPool, run: RunConfig, site: str) -> EngineTrial:
    order = {"settings": asdict(settings), "pool": pool.model_dump(mode="json"), "run": run.model_dump(mode="json")}
    # set before torch is loaded, as for an instance of a run
    env = PASSIVE_WAITING | KEPT_HEAP | ONE_BLAS_THREAD | {"OMP_NUM_THREADS": str(pool.threads)}
    if settings.bound:
        env |= {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
    given = json.dumps(order | {"site": site})
    said, done = run_module(__name__, limit_s=TRIAL_LIMIT_S, environment=env, given=given)
    if done is None:
        return EngineTrial(settings, error=f"no answer within {TRIAL_LIMIT_S:.0f} s")
    if done.returncode != 0:
        return EngineTrial(settings, error=error_of(done.stderr))
    result = json.loads(said.splitlines()[-1])
    return EngineTrial(settings, result["start_s"], tuple((size, seconds) for size, seconds in result["step_s"]))


def error_of(stderr: str) -> str:
    """Return the error of a failed trial: the first one that an engine process raised, else the last line."""
    lines = [LOGGED.sub("", line).strip() for line in stderr.splitlines()]
    errors = [line for line in lines if RAISED.match(line)]
    last = next((line for line in reversed(lines) if line), "it ended without any output")
    return (errors[0] if errors else last)[:200]


async def _measure(order: dict[str, object]) -> dict[str, object]:
    from streamrl.generation.instance.calibration import Stopwatch
    from streamrl.generation.instance.engine import Engine
    from streamrl.generation.instance.step_trials import StepTrials, fitting

    pool = GenerationPool.model_validate(order["pool"])
    run, settings = RunConfig.model_validate(order["run"]), EngineSettings(**order["settings"])  # type: ignore[arg-type]
    begun = time.monotonic()
    engine = Engine(pool, run, False, "trial", str(order["site"]), settings=settings)
    try:
        await engine.warm_up()
        start_s = time.monotonic() - begun
        watch = Stopwatch(engine)
        sizes = sorted({min(size, pool.max_batch) for size in SIZES})
        await watch.ready(sizes)
        trials = StepTrials(sizes, 2, 0, 0, fitting(TOKENS, run.model.max_context), BUDGET_S, BUDGET_S)
        while (trial := trials.next()) is not None:
            trials.took(await watch.trial(trial))
    finally:
        engine.close()
    return {"start_s": start_s, "step_s": sorted(trials.points.items())}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_measure(json.load(sys.stdin)))), flush=True)
    os._exit(0)
