"""Compare dispatch policies in the simulator on a grid of workloads, and time dispatcher and simulator.

    .venv/bin/python experiments/dispatch_policies.py            # grid, two minutes; writes results/dispatch_policies/
    .venv/bin/python experiments/dispatch_policies.py --speed    # decision time; 1 M requests on 1,000 instances

The grid: shapes of length distributions x instances x requests per instance x slots x device mixes. Step times: the
published curve of a 7B model on an H800, rooflines of H20 and H800, and a CPU's steep curve. Every policy gets the true
lengths ("oracle"), and ours also gets forecasts of the quality that a ranker has. Ratios are makespans against
least-loaded (data-parallel balance) on the same workload; below 1 is faster.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from best_partition import best_partition
from rich.console import Console
from rich.progress import track
from rich.table import Table

from scheduler.cost.decode import PAPER_7B_H800, QWEN_7B, StepCurve, roofline
from scheduler.cost.expected_time import Worker
from scheduler.cost.hardware import device
from scheduler.cost.length_forecast import NORMAL_SCORES, Forecast
from scheduler.dispatch.baselines import LeastLoaded, LongestFirst, RoundRobin
from scheduler.dispatch.partition import plan
from scheduler.dispatch.planned import Algorithm2, SkewAware
from scheduler.dispatch.policy import DispatchPolicy
from scheduler.simulation.generation_simulator import SimulatedInstance, SimulatedRequest, simulate

OUT = Path(__file__).parent / "results" / "dispatch_policies"
LIMIT = 20_000
CPU = StepCurve((1, 4, 16, 32, 64), (30e-3, 30e-3, 51e-3, 90e-3, 160e-3))
"""SmolLM2-135M in vLLM on one core of a shared machine."""
RANKER_NOISE = 0.35
"""Spread of log length around a forecast: a recall of about 0.85 of the longest 20 % on the log-normal shapes."""


def r1_like(rng: np.random.Generator, count: int) -> np.ndarray:
    """Mode near 2K, a thin flat tail to 20K (the paper's description of DeepSeek-R1's answers)."""
    body = rng.lognormal(np.log(2200), 0.45, count)
    return np.where(rng.random(count) < 0.12, rng.uniform(4000, LIMIT, count), body)


SHAPES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "log-normal 0.5": lambda rng, n: rng.lognormal(7, 0.5, n),
    "log-normal 1.0": lambda rng, n: rng.lognormal(7, 1.0, n),
    "R1-like": r1_like,
    "Pareto 1.5": lambda rng, n: 500 * (1 + rng.pareto(1.5, n)),
    "two modes": lambda rng, n: np.where(rng.random(n) < 0.1, rng.normal(9000, 800, n), rng.normal(700, 150, n)),
    "uniform": lambda rng, n: rng.uniform(100, 4000, n),
}
MIXES: dict[str, Callable[[int], list[StepCurve]]] = {
    "H800 (published curve)": lambda n: [PAPER_7B_H800] * n,
    "half H20, half H800": lambda n: [roofline(QWEN_7B, device("H20" if k < n // 2 else "H800")) for k in range(n)],
    "CPU": lambda n: [CPU] * n,
}
INSTANCES = (2, 4, 8, 16)
PER_INSTANCE = (16, 64)
SLOTS = (32, 256)


@dataclass(frozen=True)
class Case:
    """One workload and what came out, as ratios to least-loaded."""

    shape: str
    mix: str
    instances: int
    requests: int
    slots: int
    ratios: dict[str, float]


def requests_of(lengths: np.ndarray, told: np.ndarray | None, exact: bool = False) -> list[SimulatedRequest]:
    """told: [n, v] what the policy is told of each length."""
    rows = lengths[:, None] if exact else told
    return [
        SimulatedRequest(str(n), float(length), str(n // 8), 0, 0.0, None if rows is None else Forecast(tuple(rows[n])))
        for n, length in enumerate(lengths)
    ]


def case(shape: str, mix: str, instances: int, per_instance: int, slots: int, seed: int) -> Case:
    """Simulate one workload under every policy."""
    rng = np.random.default_rng(seed)
    count = instances * per_instance
    told = np.clip(SHAPES[shape](rng, count), 20, LIMIT)[:, None] * np.exp(RANKER_NOISE * NORMAL_SCORES)
    told = np.clip(told, 1, LIMIT)
    # the truth is drawn from the forecast, so that the forecast is honest
    lengths = np.clip(
        told[:, 7] * np.exp(RANKER_NOISE * (rng.standard_normal(count) - NORMAL_SCORES[7])), 1, LIMIT
    ).round()
    fleet = [SimulatedInstance(f"i{n}", curve, slots) for n, curve in enumerate(MIXES[mix](instances))]
    oracle, forecast, blind = requests_of(lengths, None, True), requests_of(lengths, told), requests_of(lengths, None)
    runs: dict[str, tuple[DispatchPolicy, list[SimulatedRequest]]] = {
        "least-loaded": (LeastLoaded(), blind),
        "round-robin": (RoundRobin(), blind),
        "longest-first, oracle": (LongestFirst(), oracle),
        "Algorithm 2, oracle": (Algorithm2(), oracle),
        "Algorithm 2 with max, oracle": (Algorithm2("max"), oracle),
        "ours, oracle": (SkewAware(longest=LIMIT), oracle),
        "Algorithm 2, forecasts": (Algorithm2(), forecast),
        "ours, forecasts, no moves": (SkewAware(migrate=False, longest=LIMIT), forecast),
        "ours, forecasts": (SkewAware(longest=LIMIT), forecast),
    }
    spans = {name: simulate(policy, some, fleet).makespan for name, (policy, some) in runs.items()}
    best = best_partition(lengths, [Worker(i.curve, i.slots) for i in fleet])
    spans["best partition, oracle"] = best.makespan
    base = spans["least-loaded"]
    return Case(shape, mix, instances, count, slots, {name: span / base for name, span in spans.items()})


def grid(console: Console) -> None:
    """All workloads: table, plot, JSON."""
    axes = list(itertools.product(SHAPES, MIXES, INSTANCES, PER_INSTANCE, SLOTS))
    cases = [
        case(shape, mix, instances, per_instance, slots, seed)
        for seed, (shape, mix, instances, per_instance, slots) in enumerate(track(axes, "workloads", console=console))
    ]
    table = Table(
        "policy", "mean", "median", "best", "worst", "worse than least-loaded", title=f"{len(cases)} workloads"
    )
    figures = {}
    for name in cases[0].ratios:
        values = np.asarray([c.ratios[name] for c in cases])
        figures[name] = {
            "mean": values.mean(),
            "median": float(np.median(values)),
            "best": values.min(),
            "worst": values.max(),
            "share_worse": float((values > 1.0005).mean()),
        }
        row = figures[name]
        table.add_row(
            name, *(f"{row[k]:.3f}" for k in ("mean", "median", "best", "worst")), f"{row['share_worse']:.0%}"
        )
    console.print(table)
    gap = np.asarray([c.ratios["ours, oracle"] / c.ratios["best partition, oracle"] for c in cases])
    saved = np.asarray([[1 - c.ratios["ours, forecasts"], 1 - c.ratios["ours, oracle"]] for c in cases]).sum(axis=0)
    old = np.asarray([1 - c.ratios["Algorithm 2, forecasts"] for c in cases]).sum()
    summary = {
        "ours_oracle_against_best_partition": {
            "mean": gap.mean(),
            "worst": gap.max(),
            "within_3_percent": (gap <= 1.03).mean(),
        },
        "share_of_oracle_saving_with_forecasts": {"ours": saved[0] / saved[1], "algorithm 2": old / saved[1]},
    }
    console.print(
        f"ours with true lengths against the best partition: mean {gap.mean():.3f}, worst {gap.max():.3f}; with "
        f"forecasts ours keeps {saved[0] / saved[1]:.0%} of the saving that true lengths give, Algorithm 2 "
        f"{old / saved[1]:.0%}"
    )
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "grid.json").write_text(
        json.dumps({"policies": figures, **summary, "cases": [c.__dict__ for c in cases]}, indent=1, default=float)
        + "\n"
    )
    shown = [name for name in cases[0].ratios if name != "least-loaded"]
    figure, axis = plt.subplots(figsize=(9, 4.5), layout="constrained")
    axis.boxplot(
        [[c.ratios[name] for c in cases] for name in shown], orientation="horizontal", tick_labels=shown, whis=(0, 100)
    )
    axis.axvline(1.0, color="grey", linewidth=1)
    axis.set_xlabel("makespan against least-loaded (whiskers: all workloads)")
    figure.savefig(OUT / "grid.svg")
    console.print(f"written to {OUT}")


def speed(console: Console) -> None:
    """Decision time for 1,024 requests on 16 instances; 1 M requests on 1,000 instances."""
    rng = np.random.default_rng(0)
    lengths = np.sort(np.clip(r1_like(rng, 1024), 1, LIMIT))[::-1]
    workers = [Worker(PAPER_7B_H800, 256)] * 16
    figures = {}
    for name, values in (
        ("known", lengths[:, None]),
        ("forecasts", lengths[:, None] * np.exp(RANKER_NOISE * NORMAL_SCORES)),
    ):
        times = []
        for _ in range(20):
            begin = time.perf_counter()
            plan(values, workers, limit=LIMIT)
            times.append(time.perf_counter() - begin)
        figures[f"plan_ms_{name}"] = 1e3 * float(np.median(times))
        console.print(f"a plan for 1,024 requests on 16 instances ({name}): {figures[f'plan_ms_{name}']:.1f} ms")
    many = [
        SimulatedRequest(str(n), float(length), str(n // 8))
        for n, length in enumerate(np.clip(r1_like(rng, 1_000_000), 1, LIMIT).round())
    ]
    fleet = [SimulatedInstance(f"i{n}", PAPER_7B_H800, 256) for n in range(1000)]
    begin = time.perf_counter()
    simulate(LeastLoaded(), many, fleet)
    figures["simulate_million_s"] = time.perf_counter() - begin
    console.print(f"1 M requests on 1,000 instances, least-loaded: {figures['simulate_million_s']:.1f} s")
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "speed.json").write_text(json.dumps(figures, indent=1) + "\n")


@click.command(help=__doc__)
@click.option("--speed", "only_speed", is_flag=True, help="time dispatcher and simulator instead")
def main(only_speed: bool) -> None:
    (speed if only_speed else grid)(Console())


if __name__ == "__main__":
    main()
