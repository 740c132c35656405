"""Switch off parts of dispatch one at a time, simulated: what does each of them save?

    .venv/bin/python experiments/dispatch_ablation.py     # some minutes; writes results/dispatch_ablation.{json,md}

Ratios are seconds until what the schedule waits for, divided by those of least-loaded dispatch on the same workload.
The sets of workloads:

* `true lengths`, `forecasts`: every eleventh of the 288 workloads of `dispatch_policies.py`, the makespan;
* `honest`, `overconfident`, `runaways`: the 12 workloads of `dispatch_quality.py`, 2 draws of each, believed blindly,
  the makespan; `stream`: those with honest forecasts, the end of a balanced training's last group;
* `prompts`: prompts of 1,000 tokens that 8 siblings share, on rooflines of H800 and of half H20, half H800;
* `foreseen`: those 12 with 1 % runaways that forecasts foresee; `corrected`: with unforeseen runaways and forecasts
  that three steps have corrected (`recalibration.py`); `recorded`: lengths of the small reasoner and SmolLM2
  (`dispatch_workloads.py`), 16 and 64 slots, 6 draws of each;
* `siblings`: log-normal and R1-like lengths, 16 and 64 slots, forecasts off by 70 %, half of whose variance siblings
  share, and without forecasts;
* `stream, fast` and `stream, slow`: `stream` with a trainer of 4 times and half that rate;
* `mixed`: two or three kinds of instances, drawn from rooflines and measured curves, 16 to 256 slots;
* `slow`: one of 4 instances needs twice the time of its curve.

A part is idle if without it no set's mean rises by 0.2 % or more and no set's worst case rises ("so far": some of its
sets have not been measured). A dash: not tried.
Parts that were idle have been taken out; their rows stay as they were measured, against dispatch of that time.
`--part NAME` measures one again and keeps the rest of the file.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import click
import numpy as np
from dispatch_policies import CPU, LIMIT, MIXES, RANKER_NOISE, SHAPES, requests_of
from dispatch_quality import corrected
from dispatch_workloads import (
    EVERY,
    QUALITIES,
    SIBLINGS,
    Quality,
    balanced_rate,
    foreseen,
    made_up,
    of_grid,
    recorded,
    runaways,
    step,
)
from rich.progress import track
from running import RESULTS, Sheet, machine, terminal, write_results

from scheduler.cost import expected_time
from scheduler.cost.decode import PAPER_7B_H800, QWEN_7B, StepCurve, roofline
from scheduler.cost.hardware import device
from scheduler.cost.length_forecast import NORMAL_SCORES
from scheduler.cost.recalibration import Recalibration
from scheduler.dispatch import partition, partition_candidates, planned
from scheduler.dispatch.dispatch_objective import MAKESPAN, DispatchObjective, Streamed
from scheduler.dispatch.planned import SkewAware
from scheduler.dispatch.policy import DispatchPolicy
from scheduler.dispatch.registry import make_policy
from scheduler.simulation.generation_simulator import SimulatedInstance, SimulatedRequest
from scheduler.simulation.saving import waited

OUT = RESULTS / "dispatch_ablation.json"
IDLE = 0.002
"""Share by which a mean must rise for a part to count."""
Workload = tuple[list[SimulatedRequest], list[SimulatedInstance], DispatchObjective]
Patches = list[tuple[object, str, object]]
"""(object, attribute, what stands in for it)."""


def grid(known: bool) -> Iterator[Workload]:
    for number, of in enumerate(of_grid()):
        rng = np.random.default_rng(EVERY * number)
        lengths, told = (np.clip(some, 1, LIMIT) for some in of.draw(rng, RANKER_NOISE, RANKER_NOISE))
        lengths = lengths.round()
        yield requests_of(lengths, None if known else told, known), of.fleet, MAKESPAN


def quality(name: str, streamed: bool = False, faster: float = 1.0) -> Iterator[Workload]:
    for number, of in enumerate(made_up()):
        rng = np.random.default_rng([2, number])
        objective = Streamed(faster * balanced_rate(of)) if streamed else MAKESPAN
        for _ in range(2):
            yield step(QUALITIES[name], of, rng), of.fleet, objective


def drawn(of: Quality, seed: int, learned: int = 0) -> Iterator[Workload]:
    """Yield 2 draws of each of the 12 workloads, with forecasts that so many steps have corrected."""
    for number, workload in enumerate(made_up()):
        rng, by = np.random.default_rng([seed, number]), Recalibration()
        for _ in range(learned):
            told = step(of, workload, rng)
            forecasts, lengths = [one.forecast for one in told if one.forecast], [one.length for one in told]
            by.record(forecasts, lengths, [one.group_id for one in told], [length < LIMIT for length in lengths])
        for _ in range(2):
            yield corrected(step(of, workload, rng), by, LIMIT), workload.fleet, MAKESPAN


def from_runs() -> Iterator[Workload]:
    for number, of in enumerate(recorded()):
        rng = np.random.default_rng([7, number])
        for _ in range(6):
            yield step(QUALITIES["honest, .35"], of, rng), of.fleet, MAKESPAN


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
        yield requests_of(lengths, rows), [SimulatedInstance(f"i{n}", PAPER_7B_H800, slots) for n in range(4)], MAKESPAN


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
    "foreseen": lambda: drawn(foreseen, 6),
    "corrected": lambda: drawn(runaways, 5, 3),
    "recorded": from_runs,
}


LIKE_RUNS = ("foreseen", "corrected", "recorded")


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
    sets: tuple[str, ...] = ("true lengths", "forecasts", "honest", "overconfident", "runaways", *LIKE_RUNS)


def without_kind(kind: str) -> Callable[[], Patches]:
    surely = partition._surely_cheaper
    return lambda: [(partition, "_surely_cheaper", lambda one, other: one.kind != kind and surely(one, other))]


def longest_first(means: Any, *_: Any) -> list[Sequence[int]]:
    return [range(len(means))]


def own_queue_only(self: SkewAware) -> list[Any]:
    decisions = [start for name in self.queues for start in self._fill_from(name, [name])]
    return decisions + self.place_by_load(self._unplanned)


def means_only(values: Any, count: int, seed: int, limit: float = np.inf, tails: Any = None) -> Any:
    return np.repeat(values.mean(axis=1)[None], count, axis=0)


def certain_step_cost(every: Callable[..., Any]) -> Callable[..., Any]:
    """Return a cost of a step that takes every number of requests for certain."""
    return lambda alive, curve, slots, uncertain=None: every(alive, curve, slots)


UNCERTAIN = ("forecasts", "honest", "overconfident", "runaways", *LIKE_RUNS)
STREAM, PROMPTS = ("stream", "stream, fast", "stream, slow"), ("prompts", "true lengths", "forecasts")
EVERYWHERE = tuple(SETS)
PARTS: dict[str, Part] = {
    "nothing": Part("all parts on", sets=EVERYWHERE),
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
        sets=EVERYWHERE,
    ),
    "even": Part("candidates dealt out evenly", without_kind("even"), sets=EVERYWHERE),
    "greedy": Part("the candidate of LPT with marginal step times", without_kind("greedy")),
    "blocks": Part("candidates of stretches, by dynamic programming", without_kind("blocks")),
    "packed": Part("candidates by bisection, known lengths only", without_kind("packed"), sets=("true lengths",)),
    "together": Part(
        "siblings brought together where prompts cost time",
        lambda: [(partition._Timed, "both", lambda self, kind, q, s, means, order=None: [self(kind, q, s, order)])],
        sets=PROMPTS,
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
    "shortest first": Part(
        "where slots are few, dealt out evenly with the shortest first as well as the longest",
        lambda: [(partition, "_orders_of_start", longest_first)],
        sets=tuple(name for name in EVERYWHERE if name not in STREAM),
    ),
    "smallest group first": Part(
        "where slots are few and training streams, dealt out evenly with the smallest group first, not the longest",
        lambda: [(partition, "_orders_of_start", longest_first)],
        sets=STREAM,
    ),
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
GONE = {
    "type orders": "other orders of instance types than the quickest first",
    "order 1 of the makespan": "where slots are few, dealt out evenly in the order of arrival as well",
    "order 1 of stream": "the same where training streams, longest first as well",
    "order 2 of stream": "shortest first as well",
    "order 4 of stream": "groups one after the other, the largest first, as well",
}
"""Parts that were idle when they were taken out."""


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


def sheets(measured: dict[str, dict[str, list[float]]], gone: dict[str, dict[str, tuple[float, float]]]) -> list[Sheet]:
    """Return the tables.

    Args:
        measured: ratios by part and set.
        gone: `rise` by part that was taken out and set.
    """
    base = measured["nothing"]
    rows = []
    for name in (name for name in PARTS if name in measured and name != "nothing"):
        rises = {where: rise(measured[name], where, base) for where in SETS if where in measured[name]}
        idle = all(mean < IDLE and worst < 1e-6 for mean, worst in rises.values())
        tried = all(where in rises for where in PARTS[name].sets)
        rows.append((name, *shown(rises), ("yes" if tried else "so far") if idle else "no"))
    every = ((where, f"{len(v)}", f"{np.mean(v):.4f}", f"{max(v):.3f}") for where, v in base.items())
    whats = [f"{row[0]}: {PARTS[row[0]].what}" for row in rows]
    title = "rise of the mean in % / rise of the worst case"
    return [
        Sheet("All parts on: time against least-loaded", ("workloads", "number", "mean", "worst"), list(every)),
        Sheet(f"Without a part: {title}", ("without", *SETS, "idle"), rows, whats),
        Sheet(
            f"Idle parts that were taken out: {title}",
            ("without", *SETS),
            [(name, *shown(gone[name])) for name in GONE],
            [f"{name}: {what}" for name, what in GONE.items()],
        ),
    ]


def shown(rises: dict[str, tuple[float, float]]) -> list[str]:
    return [f"{100 * rises[w][0]:+.2f} / {rises[w][1]:+.3f}" if w in rises else "-" for w in SETS]


@click.command(help=__doc__)
@click.option("--part", "chosen", multiple=True, type=click.Choice(list(PARTS)), help="measure only this part again")
def main(chosen: tuple[str, ...]) -> None:
    console = terminal()
    kept = json.loads(OUT.read_text())
    measured: dict[str, dict[str, list[float]]] = kept["ratios"] if chosen else {}
    cells = [(part, where) for part in chosen or PARTS for where in PARTS[part].sets]
    # a process for each cell, forked before anything is computed: caches of costs must not outlive a patch
    with multiprocessing.get_context("fork").Pool(maxtasksperchild=1) as pool:
        jobs = [pool.apply_async(ratios, cell) for cell in cells]
        for (part, where), job in track(list(zip(cells, jobs, strict=True)), "cells", console=console):
            measured.setdefault(part, {})[where] = job.get()
    made = sheets(measured, kept["gone"])
    for sheet in made:
        sheet.show(console)
    record = {"machine": machine(), "ratios": measured, "gone": kept["gone"]}
    write_results(OUT, record, "Parts of dispatch switched off", made)
    console.print(f"written to {OUT} and .md beside", highlight=False)


if __name__ == "__main__":
    main()
