"""Compare dispatch by forecasts of any quality with least-loaded dispatch, under each schedule's objective, simulated.

    .venv/bin/python experiments/dispatch_quality.py     # a quarter of an hour of a core; results/dispatch_quality.*
    .venv/bin/python experiments/dispatch_quality.py --family recorded     # these again, the rest is kept

The workloads are those of `dispatch_workloads.py`: 12 made up, 9 of the 288 of `dispatch_policies.py`, 4 of recorded
lengths. A run is a number of steps of one workload with forecasts of one quality. As in a live run, forecasts are
corrected by what those of the steps before were worth (`scheduler/cost/recalibration.py`), and each step is dispatched
by them only if the replays of the steps before say so (`scheduler/dispatch/outcome_trust.py`); the first step is never,
and is not counted. Ratios are seconds until what the schedule waits for, divided by those of least-loaded dispatch:

* sync: the makespan;
* one_step_off: the makespan or the training of the batch before, whichever is longer;
* stream: the end of training's last group.

The trainer needs as long for a mean batch as least-loaded generation (balanced). "Ours" is dispatched by trust;
"corrected" are forecasts that are believed whatever replays say, "blindly" those that are not corrected either. The
other policies believe what they are told: longest-first, and StreamRL's Algorithm 2 as printed and with the later of
both pools. `async` goes by load, so it has no row; `async_policies.py` compares policies there.

What is wanted of each cell: a mean of at most 1.00 (the upper end of its 95 % interval at most 1.01), and at most 1.05
for 95 % of the steps. The cell of a single workload has few steps; its interval is that of their mean.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import click
import numpy as np
from dispatch_workloads import (
    GRID,
    MADE_UP,
    QUALITIES,
    RECORDED,
    SIBLINGS,
    Workload,
    balanced_rate,
    made_up,
    of_grid,
    recorded,
    step,
)
from rich.progress import track
from running import RESULTS, Sheet, machine, results_folder, terminal, write_results

from scheduler.cost.recalibration import Recalibration
from scheduler.dispatch.dispatch_objective import DispatchObjective, Streamed
from scheduler.dispatch.outcome_trust import OutcomeTrust
from scheduler.dispatch.registry import make_policy
from scheduler.simulation.generation_simulator import Outcome, SimulatedRequest, simulate
from scheduler.simulation.saving import RESAMPLES, resampled

OUT = RESULTS / "dispatch_quality.json"
SCHEDULES = ("sync", "one_step_off", "stream")
OTHERS = ("longest-first", "algorithm2", "algorithm2-max")
OURS, CORRECTED, BLINDLY = "ours", "corrected", "blindly"
WAYS = (OURS, CORRECTED, BLINDLY, *OTHERS)
FAMILIES = {MADE_UP: made_up, GRID: lambda: of_grid()[::3], RECORDED: recorded}
MEAN, UPPER, P95 = 1.0, 1.01, 1.05
"""What is wanted of a cell, at most."""
ROUNDING = 0.0005
Figures = dict[str, float]


def seconds(outcome: Outcome, requests: list[SimulatedRequest], rate: float) -> dict[str, float]:
    """What each schedule waits for."""
    ends = np.asarray([[outcome.finished[request.request_id] for request in requests]])
    tokens = np.asarray([[request.length for request in requests]])
    trained = float(Streamed(rate).seconds(ends, [request.group_id for request in requests], tokens)[0])
    one_step_off = max(outcome.makespan, float(tokens.sum()) / rate)
    return {"sync": outcome.makespan, "one_step_off": one_step_off, "stream": trained}


def corrected(batch: list[SimulatedRequest], by: Recalibration, limit: int) -> list[SimulatedRequest]:
    return [replace(one, forecast=by.corrected(one.forecast, limit)) for one in batch if one.forecast is not None]


def played_on(
    batch: list[SimulatedRequest], workload: Workload, rate: float, others: Sequence[str] = ()
) -> dict[str, dict[str, float]]:
    """Ratio by way and schedule: of the policy with the schedule's objective ("ours"), and of others."""

    def play(policy: str, objective: DispatchObjective = None) -> dict[str, float]:
        made = make_policy(policy, workload.limit, SIBLINGS, objective)
        return seconds(simulate(made, batch, workload.fleet), batch, rate)

    base, makespan, streamed = play("least-loaded"), play("skew-aware"), play("skew-aware", Streamed(rate))
    times = {OURS: makespan | {"stream": streamed["stream"]}, **{name: play(name) for name in others}}
    return {way: {name: of[name] / base[name] for name in SCHEDULES} for way, of in times.items()}


def run(quality: str, workload: Workload, steps: int, seed: list[int]) -> dict[str, list[list[float]]]:
    """One run by schedule: [steps, ways] ratios."""
    rng, rate = np.random.default_rng(seed), balanced_rate(workload)
    trust, recalibration = {name: OutcomeTrust() for name in SCHEDULES}, Recalibration()
    found: dict[str, list[list[float]]] = {name: [] for name in SCHEDULES}
    for number in range(steps + 1):
        told = step(QUALITIES[quality], workload, rng)
        requests = corrected(told, recalibration, workload.limit)
        batches = [requests, *(resampled(requests, seed) for seed in range(RESAMPLES))]
        played = [played_on(batch, workload, rate)[OURS] for batch in batches]
        blind = played_on(told, workload, rate, OTHERS) if number else {}
        for name in SCHEDULES:
            if number:
                ours = played[0][name]
                rest = [blind[way][name] for way in (OURS, *OTHERS)]
                found[name].append([ours if trust[name].trusted else 1.0, ours, *rest])
            trust[name].record([ratios[name] for ratios in played])
        recalibration.record(
            [one.forecast for one in told if one.forecast],
            [one.length for one in told],
            [one.group_id for one in told],
            [one.length < workload.limit for one in told],
        )
    return found


def figures(runs: list[list[list[float]]], column: int) -> Figures:
    """Mean, its 95 % interval (bootstrap over runs; of a single one, over steps), 95th percentile, worst, share slower,
    mean of the worst workload."""
    values = np.asarray(runs)[:, :, column]
    units = values.mean(axis=1) if len(values) > 1 else values[0]
    drawn = np.random.default_rng(0).integers(len(units), size=(2000, len(units)))
    low, high = np.quantile(units[drawn].mean(axis=1), (0.025, 0.975))
    return {
        "mean": float(values.mean()),
        "low": float(low),
        "high": float(high),
        "p95": float(np.quantile(values, 0.95)),
        "worst": float(values.max()),
        "slower": float((values > 1 + ROUNDING).mean()),
        "worst_workload": float(values.mean(axis=1).max()),
    }


def holds(cell: Figures) -> bool:
    return cell["mean"] <= MEAN + ROUNDING and cell["high"] <= UPPER + ROUNDING and cell["p95"] <= P95 + ROUNDING


def shown(cell: Figures) -> tuple[str, ...]:
    interval = f"{cell['low']:.3f}-{cell['high']:.3f}"
    return f"{cell['mean']:.3f}", interval, f"{cell['p95']:.3f}", f"{cell['worst']:.3f}", f"{cell['slower']:.0%}"


def sheets(cells: dict[str, dict[str, Figures]], single: dict[str, dict[str, Figures]], steps: int) -> list[Sheet]:
    """Return the tables.

    Args:
        cells: figures by "family, schedule, quality" and way.
        single: ours, by the same and the workload's name.
        steps: counted steps of a run.
    """
    rows: list[tuple[str, ...]] = []
    ways: list[tuple[str, ...]] = []
    misses: list[tuple[str, ...]] = []
    for family, schedule, quality in itertools.product(FAMILIES, SCHEDULES, QUALITIES):
        case = f"{family}, {schedule}, {quality}"
        if (cell := cells.get(case)) is None:
            continue  # measured family by family
        others = [name for name in OTHERS if name in cell]
        best = min(others, key=lambda name: cell[name]["mean"], default="-")
        against = tuple(f"{cell[best][what]:.3f}" if others else "-" for what in ("mean", "p95", "worst"))
        rows.append(
            (family, schedule, quality, *shown(cell[OURS]), best, *against, "yes" if holds(cell[OURS]) else "NO")
        )
        ways.extend((family, schedule, quality, way, *shown(cell[way])) for way in (CORRECTED, BLINDLY))
        every = single.get(case, {}).items()
        misses.extend((schedule, quality, name, *shown(of)) for name, of in every if not holds(of))
    numbers = ("mean", "95 %", "p95", "worst", "slower")
    count = sum(map(len, single.values()))
    return [
        Sheet(
            f"Time against least-loaded, {steps} steps of each workload",
            ("workloads", "schedule", "forecasts", *numbers, "best other", "mean", "p95", "worst", "holds"),
            rows,
            [f"holds: mean at most {MEAN:.2f}, upper end of its interval {UPPER}, 95th percentile {P95}"],
        ),
        Sheet(
            f"Single workloads that do not hold: {len(misses)} of {count}",
            ("schedule", "forecasts", "workload", *numbers),
            misses,
        ),
        Sheet("Without trust", ("workloads", "schedule", "forecasts", "believed", *numbers), ways),
    ]


@click.command(help=__doc__)
@click.option("--steps", default=8, show_default=True, type=click.IntRange(2), help="counted steps of a run")
@click.option("--family", "chosen", multiple=True, type=click.Choice(FAMILIES), help="measure only these again")
def main(steps: int, chosen: tuple[str, ...]) -> None:
    target = results_folder(None, "steps") / OUT.name
    console = terminal()
    kept: dict[str, Any] = json.loads(OUT.read_text()) if chosen else {}
    cells: dict[str, dict[str, Figures]] = kept.get("cells", {})
    single: dict[str, dict[str, Figures]] = kept.get("single", {})
    counts: dict[str, int] = kept.get("workloads", {})
    runs: dict[tuple[str, str, str], dict[str, list[list[float]]]] = {}
    for family in chosen or FAMILIES:
        workloads = FAMILIES[family]()
        counts[family] = len(workloads)
        axes = list(itertools.product(QUALITIES, workloads))
        first = 1 + list(FAMILIES).index(family)
        with ProcessPoolExecutor() as pool:
            jobs = [pool.submit(run, quality, of, steps, [first, number]) for number, (quality, of) in enumerate(axes)]
            for (quality, workload), job in track(list(zip(axes, jobs, strict=True)), family, console=console):
                for schedule, ratios in job.result().items():
                    runs.setdefault((family, schedule, quality), {})[workload.name] = ratios
    for (family, schedule, quality), some in runs.items():
        case = f"{family}, {schedule}, {quality}"
        cells[case] = {way: figures(list(some.values()), n) for n, way in enumerate(WAYS)}
        single[case] = {name: figures([ratios], 0) for name, ratios in some.items()}
    made = sheets(cells, single, steps)
    for sheet in made:
        sheet.show(console)
    record = {"machine": machine(), "steps": steps, "workloads": counts, "cells": cells, "single": single}
    write_results(target, record, "Dispatch by forecasts of any quality", made)
    console.print(f"written to {target} and .md beside", highlight=False)


if __name__ == "__main__":
    main()
