"""Switch off parts of dispatch one at a time, simulated: what does each of them save?

    .venv/bin/python experiments/dispatch_ablation.py     # some minutes; writes results/dispatch_ablation.{json,md}

Ratios are seconds until what the schedule waits for, divided by those of least-loaded dispatch on the same workload.
The sets of workloads:

* `true lengths`, `forecasts`: every eleventh of the 288 workloads of `dispatch_policies.py`, the makespan;
* `honest`, `overconfident`, `runaways`: the 12 workloads of `dispatch_quality.py`, 2 draws of each, believed blindly,
  the makespan; `stream`: those with honest forecasts, the end of a balanced training's last group;
* `prompts`: prompts of 1,000 tokens that 8 siblings share, on rooflines of H800 and of half H20, half H800;
* `siblings`: log-normal and R1-like lengths, 16 and 64 slots, forecasts off by 70 %, half of whose variance siblings
  share, and without forecasts;
* `stream, fast` and `stream, slow`: `stream` with a trainer of 4 times and half that rate;
* `mixed`: two or three kinds of instances, drawn from rooflines and measured curves, 16 to 256 slots;
* `slow`: one of 4 instances needs twice the time of its curve.

A part is idle if without it no set's mean rises by 0.2 % or more and no set's worst case rises. A dash: not tried.
`--part NAME` measures one again and keeps the rest of the file.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import numpy as np
from dispatch_policies import CPU, INSTANCES, LIMIT, MIXES, PER_INSTANCE, RANKER_NOISE, SHAPES, requests_of
from dispatch_policies import SLOTS as GRID_SLOTS
from dispatch_quality import SIBLINGS, balanced_rate, fleet_of, step
from dispatch_quality import SLOTS as QUALITY_SLOTS
from rich.progress import track
from running import Sheet, machine, terminal, write_results

from scheduler.cost import expected_time
from scheduler.cost.decode import PAPER_7B_H800, QWEN_7B, StepCurve, roofline
from scheduler.cost.hardware import device
from scheduler.cost.length_forecast import NORMAL_SCORES
from scheduler.dispatch import partition, partition_candidates, planned
from scheduler.dispatch.dispatch_objective import MAKESPAN, DispatchObjective, Streamed
from scheduler.dispatch.planned import SkewAware
from scheduler.dispatch.policy import DispatchPolicy
from scheduler.dispatch.registry import make_policy
from scheduler.simulation.generation_simulator import SimulatedInstance, SimulatedRequest
from scheduler.simulation.saving import waited

OUT = Path(__file__).parent / "results" / "dispatch_ablation.json"
EVERY = 11
"""Step through the 288 workloads; it has no factor in common with the sizes of their axes."""
IDLE = 0.002
"""Share by which a mean must rise for a part to count."""
Workload = tuple[list[SimulatedRequest], list[SimulatedInstance], DispatchObjective]
Patches = list[tuple[object, str, object]]
"""(object, attribute, what stands in for it)."""


def grid(known: bool) -> Iterator[Workload]:
    axes = itertools.product(SHAPES, MIXES, INSTANCES, PER_INSTANCE, GRID_SLOTS)
    for seed, (shape, mix, instances, each, slots) in list(enumerate(axes))[::EVERY]:
        rng, count = np.random.default_rng(seed), instances * each
        middle = np.clip(SHAPES[shape](rng, count), 20, LIMIT)
        told = np.clip(middle[:, None] * np.exp(RANKER_NOISE * NORMAL_SCORES), 1, LIMIT)
        lengths = np.clip(middle * np.exp(RANKER_NOISE * rng.standard_normal(count)), 1, LIMIT).round()
        fleet = [SimulatedInstance(f"i{n}", curve, slots) for n, curve in enumerate(MIXES[mix](instances))]
        yield requests_of(lengths, None if known else told, known), fleet, MAKESPAN


def quality(name: str, streamed: bool = False, faster: float = 1.0) -> Iterator[Workload]:
    for number, (shape, slots) in enumerate(itertools.product(SHAPES, QUALITY_SLOTS)):
        rng = np.random.default_rng([2, number])
        objective = Streamed(faster * balanced_rate(shape, slots)) if streamed else MAKESPAN
        for _ in range(2):
            yield step(name, shape, rng), fleet_of(slots), objective


def prompted() -> Iterator[Workload]:
    mixes = {"H800": lambda n: [roofline(QWEN_7B, device("H800"))] * n, "half": MIXES["half H20, half H800"]}
    for seed, (shape, mix, slots) in enumerate(itertools.product(SHAPES, mixes, (16, 64))):
        rng = np.random.default_rng([3, seed])
        middle = np.repeat(np.clip(SHAPES[shape](rng, 32), 20, LIMIT), 8)
        told = np.clip(middle[:, None] * np.exp(RANKER_NOISE * NORMAL_SCORES), 1, LIMIT)
        lengths = np.clip(middle * np.exp(RANKER_NOISE * rng.standard_normal(len(middle))), 1, LIMIT).round()
        made = [replace(one, prompt_tokens=1000) for one in requests_of(lengths, told)]
        yield made, [SimulatedInstance(f"i{n}", curve, slots) for n, curve in enumerate(mixes[mix](4))], MAKESPAN


def siblings() -> Iterator[Workload]:
    cases = itertools.product(("log-normal 1.0", "R1-like"), (16, 64), (True, False), range(2))
    for seed, (shape, slots, told, _) in enumerate(cases):
        rng = np.random.default_rng([4, seed])
        middle = np.repeat(np.clip(SHAPES[shape](rng, 32), 20, LIMIT), 8)
        shared, own = np.repeat(rng.standard_normal(32), 8), rng.standard_normal(256)
        lengths = np.clip(middle * np.exp(0.7 * np.sqrt(0.5) * (shared + own)), 1, LIMIT).round()
        rows = np.clip(middle[:, None] * np.exp(0.7 * NORMAL_SCORES), 1, LIMIT) if told else None
        yield requests_of(lengths, rows), fleet_of(slots), MAKESPAN


def slow() -> Iterator[Workload]:
    twice = PAPER_7B_H800.scaled(2.0)
    for requests, fleet, objective in quality("honest, .35"):
        yield requests, [replace(fleet[0], curve=twice), *fleet[1:]], objective


def mixed() -> Iterator[Workload]:
    curves = [roofline(QWEN_7B, device(name)) for name in ("H20", "H800", "L40S", "A100-80")]
    curves += [PAPER_7B_H800, PAPER_7B_H800.scaled(1.7), CPU]
    for seed in range(40):
        rng = np.random.default_rng(seed)
        kinds = rng.choice(len(curves), size=rng.integers(2, 4), replace=False)
        each = int(rng.integers(1, 4))
        fleet = [
            SimulatedInstance(f"{kind}.{n}", curves[kind], int(rng.choice([16, 64, 256])))
            for kind in kinds
            for n in range(each)
        ]
        count = len(fleet) * int(rng.choice([8, 32]))
        middle = np.clip(list(SHAPES.values())[seed % len(SHAPES)](rng, count), 20, LIMIT)
        told = np.clip(middle[:, None] * np.exp(RANKER_NOISE * NORMAL_SCORES), 1, LIMIT)
        lengths = np.clip(middle * np.exp(RANKER_NOISE * rng.standard_normal(count)), 1, LIMIT).round()
        yield requests_of(lengths, told, exact=seed % 2 == 0), fleet, MAKESPAN


SETS: dict[str, Callable[[], Iterator[Workload]]] = {
    "true lengths": lambda: grid(True),
    "forecasts": lambda: grid(False),
    "honest": lambda: quality("honest, .35"),
    "overconfident": lambda: quality("overconfident, .7 told as .2"),
    "runaways": lambda: quality("5 % unforeseen runaways"),
    "stream": lambda: quality("honest, .35", True),
    "stream, fast": lambda: quality("honest, .35", True, 4.0),
    "stream, slow": lambda: quality("honest, .35", True, 0.5),
    "prompts": prompted,
    "mixed": mixed,
    "siblings": siblings,
    "slow": slow,
}


class NotTold(SkewAware):
    """Believes that all instances are as fast as the healthy one."""

    def join(self, instance: str, slots: int, curve: StepCurve | None = None, pool: str = "regular") -> None:
        super().join(instance, slots, PAPER_7B_H800, pool)


@dataclass(frozen=True)
class Part:
    """A part of dispatch, and how to do without it."""

    what: str
    patches: Callable[[], Patches] = list
    policy: Callable[[DispatchObjective], DispatchPolicy] = lambda objective: SkewAware(
        longest=LIMIT, affinity=SIBLINGS, objective=objective
    )
    sets: tuple[str, ...] = ("true lengths", "forecasts", "honest", "overconfident", "runaways")


def without_kind(kind: str) -> Callable[[], Patches]:
    surely = partition._surely_cheaper
    return lambda: [(partition, "_surely_cheaper", lambda one, other: one.kind != kind and surely(one, other))]


def orders_without(number: int) -> Callable[[], Patches]:
    """Leave out one of the orders of start, counted among those for the objective."""
    every = partition._orders_of_start

    def fewer(means: Any, free: int, arrivals: Any, prompts: Any) -> list[Sequence[int]]:
        found = every(means, free, arrivals, prompts)
        return [one for place, one in enumerate(found) if place != number or len(found) == 1]

    return lambda: [(partition, "_orders_of_start", fewer)]


def own_queue_only(self: SkewAware) -> list[Any]:
    decisions = [start for name in self.queues for start in self._fill_from(name, [name])]
    return decisions + self.place_by_load(self._unplanned)


def means_only(values: Any, count: int, seed: int, limit: float = np.inf, tails: Any = None) -> Any:
    return np.repeat(values.mean(axis=1)[None], count, axis=0)


def certain_step_cost(every: Callable[..., Any]) -> Callable[..., Any]:
    """Return a cost of a step that takes every number of requests for certain."""
    return lambda alive, curve, slots, uncertain=None: every(alive, curve, slots)


UNCERTAIN = ("forecasts", "honest", "overconfident", "runaways")
STREAM, PROMPTS = ("stream", "stream, fast", "stream, slow"), ("prompts", "true lengths", "forecasts")
PARTS: dict[str, Part] = {
    "nothing": Part("all parts on", sets=tuple(SETS)),
    "moves": Part(
        "running requests move to an idle instance",
        lambda: [(SkewAware, "_take_running", lambda *_: [])],
        sets=(*UNCERTAIN, "stream, fast", "stream, slow", "prompts", "slow"),
    ),
    "take-over": Part(
        "an instance without a queue takes requests of the longest queue",
        lambda: [(SkewAware, "_take_waiting", lambda *_: [])],
    ),
    "corrections": Part("both", lambda: [(SkewAware, "correct", lambda *_: [])], sets=UNCERTAIN),
    "shared stretches": Part(
        "what waits for one instance of a stretch may start on any of it",
        lambda: [(SkewAware, "fill", own_queue_only)],
        sets=UNCERTAIN,
    ),
    "even": Part("candidates dealt out evenly", without_kind("even"), sets=UNCERTAIN),
    "greedy": Part("the candidate of LPT with marginal step times", without_kind("greedy")),
    "blocks": Part("candidates of stretches, by dynamic programming", without_kind("blocks")),
    "packed": Part("candidates by bisection, known lengths only", without_kind("packed"), sets=("true lengths",)),
    "together": Part(
        "siblings brought together where prompts cost time",
        lambda: [(partition._Timed, "both", lambda self, kind, q, s, means, order=None: [self(kind, q, s, order)])],
        sets=PROMPTS,
    ),
    "type orders": Part(
        "other orders of instance types than the quickest first",
        lambda: [
            (
                partition_candidates,
                "type_orders",
                lambda workers, every=partition_candidates.type_orders: every(workers)[:1],
            )
        ],
        sets=(*PROMPTS, "mixed"),
    ),
    "significance": Part(
        "a plan must be cheaper than placement by load by two standard errors",
        lambda: [(partition, "SURE", 0.0)],
        sets=UNCERTAIN,
    ),
    "scenarios": Part(
        "plans timed on joint draws instead of mean lengths",
        lambda: [(partition, "scenarios", means_only)],
        sets=UNCERTAIN,
    ),
    "tails of forecasts": Part(
        "levels above 15.5 / 16 as forecast instead of extrapolated",
        lambda: [(planned, "tails_of", lambda forecasts: np.full((len(forecasts), 5), np.nan))],
        sets=UNCERTAIN,
    ),
    "binomial step": Part(
        "expected step time of an uncertain number of requests",
        lambda: [(expected_time, "step_cost", certain_step_cost(expected_time.step_cost))],
        sets=UNCERTAIN,
    ),
    "binomial blocks": Part(
        "the same in the dynamic programming over stretches",
        lambda: [(partition_candidates, "step_cost", certain_step_cost(expected_time.step_cost))],
        sets=UNCERTAIN,
    ),
    **{
        f"order {number} of the makespan": Part(
            f"start order: {what}",
            orders_without(number),
            sets=UNCERTAIN,
        )
        for number, what in ((1, "arrival"), (2, "shortest first"))
    },
    **{
        f"order {number} of stream": Part(f"start order: {what}", orders_without(number), sets=STREAM)
        for number, what in (
            (1, "longest first"),
            (2, "shortest first"),
            (3, "groups, smallest first"),
            (4, "groups, largest first"),
        )
    },
    "objective of stream": Part(
        "plans for the end of training, not the makespan",
        policy=lambda objective: SkewAware(longest=LIMIT, affinity=SIBLINGS),
        sets=("stream",),
    ),
    "plans of stream": Part(
        "plans instead of least-loaded",
        policy=lambda objective: make_policy("least-loaded", affinity=SIBLINGS),
        sets=("stream",),
    ),
    "affinity": Part(
        "siblings placed by load stay together",
        policy=lambda objective: SkewAware(longest=LIMIT, objective=objective),
        sets=("siblings", "honest", "prompts", "stream"),
    ),
    "group probe (added)": Part(
        "the policy that learns from siblings, in place of skew-aware",
        policy=lambda objective: make_policy("group-probe", LIMIT, SIBLINGS, objective),
        sets=("siblings", "honest", "stream", "runaways", "overconfident"),
    ),
    "step times of slow instances": Part(
        "the policy knows which instance is slow",
        policy=lambda objective: NotTold(longest=LIMIT, affinity=SIBLINGS, objective=objective),
        sets=("slow",),
    ),
}


def ratios(part: str, where: str) -> list[float]:
    """Return the ratio of each workload of a set, without a part."""
    found = []
    with ExitStack() as stack:
        for owner, name, instead in PARTS[part].patches():
            stack.enter_context(patch.object(owner, name, instead))
        for requests, fleet, objective in SETS[where]():
            least = waited(make_policy("least-loaded", LIMIT, SIBLINGS), requests, fleet, objective)
            found.append(waited(PARTS[part].policy(objective), requests, fleet, objective) / least)
    return found


def rise(cells: dict[str, list[float]], where: str, base: dict[str, list[float]]) -> tuple[float, float]:
    """Return by which share the mean rises without a part, and by how much the worst case."""
    return float(np.mean(cells[where]) / np.mean(base[where]) - 1), max(cells[where]) - max(base[where])


def sheets(measured: dict[str, dict[str, list[float]]]) -> list[Sheet]:
    base = measured["nothing"]
    rows = []
    for name, cells in measured.items():
        if name == "nothing":
            continue
        rises = {where: rise(cells, where, base) for where in SETS if where in cells}
        idle = all(mean < IDLE and worst < 1e-6 for mean, worst in rises.values())
        shown = [f"{100 * rises[w][0]:+.2f} / {rises[w][1]:+.3f}" if w in rises else "-" for w in SETS]
        rows.append((name, *shown, "yes" if idle else "no"))
    every = ((where, f"{len(v)}", f"{np.mean(v):.4f}", f"{max(v):.3f}") for where, v in base.items())
    whats = [f"{name}: {part.what}" for name, part in PARTS.items() if name in measured and name != "nothing"]
    title = "Without a part: rise of the mean in % / rise of the worst case"
    return [
        Sheet("All parts on: time against least-loaded", ("workloads", "number", "mean", "worst"), list(every)),
        Sheet(title, ("without", *SETS, "idle"), rows, whats),
    ]


@click.command(help=__doc__)
@click.option("--part", "chosen", multiple=True, type=click.Choice(list(PARTS)), help="measure only this part again")
def main(chosen: tuple[str, ...]) -> None:
    console = terminal()
    measured: dict[str, dict[str, list[float]]] = json.loads(OUT.read_text())["ratios"] if chosen else {}
    jobs = {}
    # a process for each cell: caches of costs must not outlive a patch
    start = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(mp_context=start, max_tasks_per_child=1) as pool:
        for part in chosen or PARTS:
            for where in PARTS[part].sets:
                jobs[part, where] = pool.submit(ratios, part, where)
        for (part, where), job in track(jobs.items(), "cells", console=console):
            measured.setdefault(part, {})[where] = job.result()
    made = sheets(measured)
    for sheet in made:
        sheet.show(console)
    write_results(OUT, {"machine": machine(), "ratios": measured}, "Parts of dispatch switched off", made)
    console.print(f"written to {OUT} and .md beside", highlight=False)


if __name__ == "__main__":
    main()
