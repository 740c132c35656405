"""Compare dispatch by forecasts of any quality with least-loaded dispatch, under each schedule's objective, simulated.

    .venv/bin/python experiments/dispatch_quality.py     # some minutes on one core; writes results/dispatch_quality.*

A workload is a shape of lengths and a number of slots: 4 instances with the step times of a 7B model on an H800, 128
requests in groups of 4. A run is a number of steps of one workload with forecasts of one quality. As in a live run,
forecasts are corrected by what those of the steps before were worth (`scheduler/cost/recalibration.py`), and each step
is dispatched by them only if the replays of the steps before say so (`scheduler/dispatch/outcome_trust.py`); the first
step is never, and is not counted. Ratios are seconds until what the schedule waits for, divided by those of
least-loaded dispatch:

* sync: the makespan;
* one_step_off: the makespan or the training of the batch before, whichever is longer;
* stream: the end of training's last group.

The trainer needs as long for a mean batch as least-loaded generation (balanced). "Corrected" are forecasts that are
believed whatever replays say, "blindly" those that are not corrected either. `async` has no row: least-loaded is its
default. The last table shows what the policy for the makespan does there.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
from dispatch_policies import SHAPES
from rich.progress import track
from running import Sheet, machine, terminal, write_results

from scheduler.cost.decode import PAPER_7B_H800
from scheduler.cost.length_forecast import NORMAL_SCORES, Forecast
from scheduler.cost.recalibration import Recalibration
from scheduler.dispatch.dispatch_objective import DispatchObjective, Streamed
from scheduler.dispatch.outcome_trust import OutcomeTrust
from scheduler.dispatch.registry import make_policy
from scheduler.schedule.schedules import make_schedule
from scheduler.simulation.generation_simulator import Outcome, SimulatedInstance, SimulatedRequest, simulate
from scheduler.simulation.pipeline import Pipeline
from scheduler.simulation.saving import RESAMPLES, resampled
from scheduler.simulation.stages import Stages

OUT = Path(__file__).parent / "results" / "dispatch_quality.json"
LIMIT = 20_000
INSTANCES, REQUESTS, SIBLINGS = 4, 128, 4
SLOTS = (16, 64)
SCHEDULES = ("sync", "one_step_off", "stream")
Lengths = np.ndarray


def noisy(true: float, told: float) -> Callable[[np.random.Generator, str], tuple[Lengths, Lengths]]:
    """Lengths are log-normal around what is known of each, with spread `true`; the forecast has spread `told`."""

    def draw(rng: np.random.Generator, shape: str) -> tuple[Lengths, Lengths]:
        centres = np.clip(SHAPES[shape](rng, REQUESTS), 20, LIMIT)
        return centres * np.exp(true * rng.standard_normal(REQUESTS)), centres[:, None] * np.exp(told * NORMAL_SCORES)

    return draw


def useless(rng: np.random.Generator, shape: str) -> tuple[Lengths, Lengths]:
    """The forecasts are those of other requests."""
    lengths, told = noisy(0.35, 0.35)(rng, shape)
    return lengths, told[rng.permutation(REQUESTS)]


def adversarial(rng: np.random.Generator, shape: str) -> tuple[Lengths, Lengths]:
    """The longest requests have the forecasts of the shortest, and the other way round."""
    lengths, told = noisy(0.35, 0.35)(rng, shape)
    order = np.argsort(told.mean(axis=1))
    swapped = np.empty_like(told)
    swapped[order] = told[order[::-1]]
    return lengths, swapped


def runaways(rng: np.random.Generator, shape: str) -> tuple[Lengths, Lengths]:
    """One request in twenty runs to the limit, which no forecast has foreseen."""
    lengths, told = noisy(0.35, 0.35)(rng, shape)
    return np.where(rng.random(REQUESTS) < 0.05, LIMIT, lengths), told


QUALITIES = {
    "honest, .2": noisy(0.2, 0.2),
    "honest, .35": noisy(0.35, 0.35),
    "overconfident, .7 told as .2": noisy(0.7, 0.2),
    "useless": useless,
    "5 % unforeseen runaways": runaways,
    "adversarial": adversarial,
}


def step(quality: str, shape: str, rng: np.random.Generator) -> list[SimulatedRequest]:
    lengths, told = QUALITIES[quality](rng, shape)
    rows = np.clip(told, 1, LIMIT).tolist()
    true = np.clip(lengths, 1, LIMIT).round().tolist()
    return [
        SimulatedRequest(f"{n}", length, f"{n // SIBLINGS}", 0, 0.0, Forecast(tuple(row)))
        for n, (length, row) in enumerate(zip(true, rows, strict=True))
    ]


def seconds(outcome: Outcome, requests: list[SimulatedRequest], rate: float) -> dict[str, float]:
    """What each schedule waits for."""
    ends = np.asarray([[outcome.finished[request.request_id] for request in requests]])
    tokens = np.asarray([[request.length for request in requests]])
    trained = float(Streamed(rate).seconds(ends, [request.group_id for request in requests], tokens)[0])
    one_step_off = max(outcome.makespan, float(tokens.sum()) / rate)
    return {"sync": outcome.makespan, "one_step_off": one_step_off, "stream": trained}


@functools.cache
def balanced_rate(shape: str, slots: int) -> float:
    """Tokens per second of a trainer that needs as long for a mean batch as least-loaded generation."""
    rng, tokens, spent = np.random.default_rng(0), 0.0, 0.0
    for _ in range(6):
        requests = step("honest, .35", shape, rng)
        tokens += sum(request.length for request in requests)
        spent += simulate(make_policy("least-loaded"), requests, fleet_of(slots)).makespan
    return tokens / spent


def fleet_of(slots: int) -> list[SimulatedInstance]:
    return [SimulatedInstance(f"i{n}", PAPER_7B_H800, slots) for n in range(INSTANCES)]


def corrected(batch: list[SimulatedRequest], by: Recalibration) -> list[SimulatedRequest]:
    return [replace(one, forecast=by.corrected(one.forecast, LIMIT)) for one in batch if one.forecast is not None]


def played_on(batch: list[SimulatedRequest], slots: int, rate: float) -> dict[str, float]:
    """Ratio by schedule, of the policy with the schedule's objective."""

    def play(policy: str, objective: DispatchObjective = None) -> dict[str, float]:
        made = make_policy(policy, LIMIT, SIBLINGS, objective)
        return seconds(simulate(made, batch, fleet_of(slots)), batch, rate)

    base, makespan, streamed = play("least-loaded"), play("skew-aware"), play("skew-aware", Streamed(rate))
    ours = makespan | {"stream": streamed["stream"]}
    return {name: ours[name] / base[name] for name in SCHEDULES}


def run(quality: str, shape: str, slots: int, steps: int, seed: list[int]) -> dict[str, list[list[float]]]:
    """One run by schedule: [steps] ratios as dispatched, if corrected forecasts are believed, and if any are."""
    rng, rate = np.random.default_rng(seed), balanced_rate(shape, slots)
    trust, recalibration = {name: OutcomeTrust() for name in SCHEDULES}, Recalibration()
    found: dict[str, list[list[float]]] = {name: [] for name in SCHEDULES}
    for number in range(steps + 1):
        told = step(quality, shape, rng)
        requests = corrected(told, recalibration)
        batches = [requests, *(resampled(requests, seed) for seed in range(RESAMPLES))]
        played = [played_on(batch, slots, rate) for batch in batches]
        blind = played_on(told, slots, rate) if number else {}
        for name in SCHEDULES:
            if number:
                ours = played[0][name]
                found[name].append([ours if trust[name].trusted else 1.0, ours, blind[name]])
            trust[name].record([ratios[name] for ratios in played])
        recalibration.record(
            [one.forecast for one in told if one.forecast],
            [one.length for one in told],
            [one.group_id for one in told],
            [one.length < LIMIT for one in told],
        )
    return found


def figures(runs: list[list[list[float]]], column: int) -> dict[str, float]:
    """Mean, its 95 % interval (bootstrap over runs), 95th percentile, worst, share slower, mean of worst workload."""
    values = np.asarray(runs)[:, :, column]
    drawn = np.random.default_rng(0).integers(len(values), size=(2000, len(values)))
    low, high = np.quantile(values.mean(axis=1)[drawn].mean(axis=1), (0.025, 0.975))
    return {
        "mean": values.mean(),
        "low": low,
        "high": high,
        "p95": float(np.quantile(values, 0.95)),
        "worst": values.max(),
        "slower": float((values > 1.0005).mean()),
        "worst_workload": values.mean(axis=1).max(),
    }


def async_rows(iterations: int) -> list[dict[str, float | str]]:
    """Whole balanced `async` runs with forecasts of spread .35 under the makespan's policy."""
    rows: list[dict[str, float | str]] = []
    for shape, slots in itertools.product(("log-normal 1.0", "R1-like"), SLOTS):
        rng, groups = np.random.default_rng(0), []
        for number in range(iterations):
            made = step("honest, .35", shape, rng)
            for first in range(0, REQUESTS, SIBLINGS):
                group = made[first : first + SIBLINGS]
                groups.append(
                    [
                        replace(one, request_id=f"{number}.{one.request_id}", group_id=f"{number}.{one.group_id}")
                        for one in group
                    ]
                )
        # generation under `async` has no tail to wait for, so the balanced trainer is the one of its own throughput
        fast = Stages(1e9)
        schedule, batch = make_schedule("async"), REQUESTS // SIBLINGS
        alone = Pipeline(make_policy("least-loaded", LIMIT, SIBLINGS), fleet_of(slots), fast, schedule, batch)
        outcome = alone.run(groups, iterations)
        stages = Stages(outcome.tokens / outcome.total)
        total = {
            name: Pipeline(make_policy(name, LIMIT, SIBLINGS), fleet_of(slots), stages, schedule, batch)
            .run(groups, iterations)
            .total
            for name in ("least-loaded", "skew-aware", "longest-first")
        }
        ratios = {name: total[name] / total["least-loaded"] for name in ("skew-aware", "longest-first")}
        rows.append({"shape": shape, "slots": f"{slots}", **ratios})
    return rows


@click.command(help=__doc__)
@click.option("--steps", default=8, show_default=True, type=click.IntRange(2), help="counted steps of a run")
@click.option("--iterations", default=5, show_default=True, type=click.IntRange(2), help="steps of an async run")
def main(steps: int, iterations: int) -> None:
    console = terminal()
    runs: dict[tuple[str, str], list[list[list[float]]]] = {}
    axes = list(itertools.product(QUALITIES, SHAPES, SLOTS))
    with ProcessPoolExecutor() as pool:
        jobs = [pool.submit(run, *one, steps, [1, number]) for number, one in enumerate(axes)]
        for (quality, _, _), job in track(list(zip(axes, jobs, strict=True)), "runs", console=console):
            for schedule, ratios in job.result().items():
                runs.setdefault((schedule, quality), []).append(ratios)
    record: dict[str, object] = {"machine": machine(), "steps": steps, "workloads": len(SHAPES) * len(SLOTS)}
    cells, rows = {}, []
    for schedule, quality in itertools.product(SCHEDULES, QUALITIES):
        some = runs[schedule, quality]
        cell = {name: figures(some, column) for column, name in enumerate(("by outcome", "corrected", "blindly"))}
        cells[f"{schedule}, {quality}"] = cell
        for name, of in cell.items():
            interval = f"{of['low']:.3f}-{of['high']:.3f}"
            rest = (f"{of[k]:.3f}" for k in ("p95", "worst", "worst_workload"))
            rows.append((schedule, quality, name, f"{of['mean']:.3f}", interval, *rest, f"{of['slower']:.0%}"))
    columns = ("schedule", "forecasts", "trusted", "mean", "95 %", "p95", "worst", "worst workload", "slower")
    count = f"{len(SHAPES) * len(SLOTS)} workloads x {steps} steps"
    sheet = Sheet(f"{count}: time against least-loaded", columns, rows)
    sheet.show(console)
    asynchronous = async_rows(iterations)
    shown = [
        (str(row["shape"]), str(row["slots"]), *(f"{row[name]:.3f}" for name in ("skew-aware", "longest-first")))
        for row in asynchronous
    ]
    other = Sheet(
        f"async, {iterations} balanced steps: time against least-loaded",
        ("lengths", "slots", "skew-aware", "longest-first"),
        shown,
    )
    other.show(console)
    write_results(
        OUT,
        record | {"cells": cells, "async": asynchronous},
        "Dispatch by forecasts of any quality",
        [sheet, other],
    )
    console.print(f"written to {OUT} and .md beside", highlight=False)


if __name__ == "__main__":
    main()
