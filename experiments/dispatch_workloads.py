"""Workloads of the studies of dispatch: made up, of the grid of `dispatch_policies.py`, and recorded.

A workload is a fleet and a way to draw the lengths of a step's requests, in groups of 4, with forecasts of some
quality. Recorded lengths are those of experiments/data: 4 samples of each of 32 prompts. What is known of them is

* small reasoner: the prompt's other 28 or more samples, about what its ranker knows;
* SmolLM2: the other samples of the prompt's task, the table that its ranker keeps.

Forecasts of recorded lengths have the spread that they have: honest ones are those, whatever spread is asked for.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from dispatch_policies import INSTANCES, LIMIT, MIXES, PER_INSTANCE, SHAPES
from dispatch_policies import SLOTS as GRID_SLOTS

from ranker.data import Rollouts, read_rollouts
from scheduler.cost.decode import PAPER_7B_H800, StepCurve
from scheduler.cost.length_forecast import MIDPOINTS, NORMAL_SCORES, TAIL_LEVELS, TAIL_SCORES, Forecast
from scheduler.dispatch.registry import make_policy
from scheduler.simulation.generation_simulator import SimulatedInstance, SimulatedRequest, simulate

DATA = Path(__file__).parent / "data"
REQUESTS, SIBLINGS, SLOTS = 128, 4, (16, 64)
MANY = 32
"""Samples of a prompt of which the others are a forecast."""
LEVELS = np.concatenate([MIDPOINTS, TAIL_LEVELS])
EVERY = 11
"""Step through the 288 workloads; it has no factor in common with the sizes of their axes."""
MADE_UP, GRID, RECORDED = "made up", "grid", "recorded"
Lengths = np.ndarray


class Draw(Protocol):
    """Draws what is known of a step's requests, and their lengths."""

    def __call__(self, rng: np.random.Generator, true: float, told: float) -> tuple[Lengths, Lengths]:
        """Return [n] lengths and [n, 16 or 21] forecasts at the levels of `LEVELS`.

        Args:
            rng: source of the draw.
            true: spread of log lengths around what is known of each.
            told: spread of log lengths that forecasts have.
        """


@dataclass(frozen=True)
class MadeUp:
    """Lengths are log-normal around a centre that is known; the centres have a shape."""

    shape: str
    count: int = REQUESTS

    def __call__(self, rng: np.random.Generator, true: float, told: float) -> tuple[Lengths, Lengths]:
        centres = np.clip(SHAPES[self.shape](rng, self.count), 20, LIMIT)
        return centres * np.exp(true * rng.standard_normal(self.count)), centres[:, None] * np.exp(told * NORMAL_SCORES)


@functools.cache
def rollouts(name: str) -> Rollouts:
    return read_rollouts([DATA / f"{name}.parquet"])


@dataclass(frozen=True)
class Recorded:
    """Lengths of a recorded run; forecasts are narrower than they should be by told / true."""

    name: str
    by_task: bool
    """Whether the task's samples are what is known of a prompt, and not its own others."""

    def __call__(self, rng: np.random.Generator, true: float, told: float) -> tuple[Lengths, Lengths]:
        every = rollouts(self.name)
        number, counts = np.unique(every.prompt, return_counts=True)
        chosen = rng.permutation(number if self.by_task else number[counts >= MANY])[: REQUESTS // SIBLINGS]
        lengths, rows = [], []
        for prompt in chosen.tolist():
            mine = every.prompt == prompt
            drawn = rng.permutation(every.output_length[mine])
            task = every.task[mine][0]
            others = every.output_length[(every.task == task) & ~mine] if self.by_task else drawn[SIBLINGS:]
            logs = np.log(np.quantile(others, LEVELS))
            lengths.append(drawn[:SIBLINGS])
            rows += [np.exp(logs.mean() + told / true * (logs - logs.mean()))] * SIBLINGS
        return np.concatenate(lengths).astype(float), np.asarray(rows)


@dataclass(frozen=True)
class Workload:
    """A fleet, and how the lengths of its steps are drawn."""

    family: str
    name: str
    draw: Draw
    limit: int
    curves: tuple[StepCurve, ...]
    slots: int

    @property
    def fleet(self) -> list[SimulatedInstance]:
        return [SimulatedInstance(f"i{n}", curve, self.slots) for n, curve in enumerate(self.curves)]


def made_up() -> list[Workload]:
    """Each shape of lengths with few and with enough slots, on 4 instances of a 7B model on an H800."""
    return [
        Workload(MADE_UP, f"{shape}, {slots} slots", MadeUp(shape), LIMIT, (PAPER_7B_H800,) * 4, slots)
        for shape, slots in itertools.product(SHAPES, SLOTS)
    ]


def of_grid() -> list[Workload]:
    """Every eleventh of the 288 workloads of `dispatch_policies.py`."""
    axes = list(itertools.product(SHAPES, MIXES, INSTANCES, PER_INSTANCE, GRID_SLOTS))[::EVERY]
    return [
        Workload(
            GRID,
            f"{shape}, {instances} x {mix}, {instances * each} requests, {slots} slots",
            MadeUp(shape, instances * each),
            LIMIT,
            tuple(MIXES[mix](instances)),
            slots,
        )
        for shape, mix, instances, each, slots in axes
    ]


def recorded() -> list[Workload]:
    """Both recorded sets with few and with enough slots, on 4 instances of a 7B model on an H800."""
    sets = (("small_reasoner", False, 960), ("smollm2", True, 512))
    return [
        Workload(RECORDED, f"{name}, {slots} slots", Recorded(name, by_task), limit, (PAPER_7B_H800,) * 4, slots)
        for (name, by_task, limit), slots in itertools.product(sets, SLOTS)
    ]


Quality = Callable[[Draw, np.random.Generator, int], tuple[Lengths, Lengths]]


def noisy(true: float, told: float) -> Quality:
    """Lengths have the spread `true` around what is known of each; the forecast has spread `told`."""
    return lambda draw, rng, limit: draw(rng, true, told)


def useless(draw: Draw, rng: np.random.Generator, limit: int) -> tuple[Lengths, Lengths]:
    """The forecasts are those of other requests."""
    lengths, told = draw(rng, 0.35, 0.35)
    return lengths, told[rng.permutation(len(told))]


def adversarial(draw: Draw, rng: np.random.Generator, limit: int) -> tuple[Lengths, Lengths]:
    """The longest requests have the forecasts of the shortest, and the other way round."""
    lengths, told = draw(rng, 0.35, 0.35)
    order = np.argsort(told[:, : len(MIDPOINTS)].mean(axis=1))
    swapped = np.empty_like(told)
    swapped[order] = told[order[::-1]]
    return lengths, swapped


def runaways(draw: Draw, rng: np.random.Generator, limit: int) -> tuple[Lengths, Lengths]:
    """One request in twenty runs to the limit, which no forecast has foreseen."""
    lengths, told = draw(rng, 0.35, 0.35)
    return np.where(rng.random(len(lengths)) < 0.05, limit, lengths), told


def foreseen(draw: Draw, rng: np.random.Generator, limit: int) -> tuple[Lengths, Lengths]:
    """One request in a hundred runs to the limit, and forecasts say so."""
    lengths, told = draw(rng, 0.35, 0.35)
    slope = np.log(told[:, 15] / told[:, 14]) / (NORMAL_SCORES[15] - NORMAL_SCORES[14])
    tails = told[:, 15:16] * np.exp(slope[:, None] * (TAIL_SCORES - NORMAL_SCORES[15]))
    tails[:, np.asarray(TAIL_LEVELS) >= 0.99] = limit
    told = np.concatenate([told[:, : len(MIDPOINTS)], tails], axis=1)
    return np.where(rng.random(len(lengths)) < 0.01, limit, lengths), told


QUALITIES: dict[str, Quality] = {
    "honest, .2": noisy(0.2, 0.2),
    "honest, .35": noisy(0.35, 0.35),
    "overconfident, .7 told as .2": noisy(0.7, 0.2),
    "useless": useless,
    "5 % unforeseen runaways": runaways,
    "adversarial": adversarial,
}


def step(quality: Quality, workload: Workload, rng: np.random.Generator) -> list[SimulatedRequest]:
    """Requests of one step."""
    lengths, told = quality(workload.draw, rng, workload.limit)
    rows = np.clip(told, 1, workload.limit).tolist()
    true = np.clip(lengths, 1, workload.limit).round().tolist()
    cut = len(MIDPOINTS)
    return [
        SimulatedRequest(f"{n}", length, f"{n // SIBLINGS}", 0, 0.0, Forecast(tuple(row[:cut]), tuple(row[cut:])))
        for n, (length, row) in enumerate(zip(true, rows, strict=True))
    ]


@functools.cache
def balanced_rate(workload: Workload) -> float:
    """Tokens per second of a trainer that needs as long for a mean batch as least-loaded generation."""
    rng, tokens, spent = np.random.default_rng(0), 0.0, 0.0
    for _ in range(6):
        requests = step(QUALITIES["honest, .35"], workload, rng)
        tokens += sum(request.length for request in requests)
        spent += simulate(make_policy("least-loaded"), requests, workload.fleet).makespan
    return tokens / spent
