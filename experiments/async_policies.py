"""Compare ways to dispatch under `async`, simulated: seconds per trained token against least-loaded.

    .venv/bin/python experiments/async_policies.py     # two minutes of a core; writes results/async_policies.{json,md}

Under `async` a slot that becomes free takes the next request of any batch, and what counts is how soon complete groups
come at the staleness bound (1). The workloads are log-normal (1.0) and R1-like lengths, and the recorded ones of
`dispatch_workloads.py`, with few and with enough slots; forecasts are honest. The trainer takes as long as least-loaded
generation (balanced), a quarter of that (fast), or twice that (slow). Tried are

* the policies that plan: skew-aware, longest-first, StreamRL's Algorithm 2, group-probe;
* fixed concurrency: least-loaded that refills up to a half or three quarters of the slots only;
* groups together: of what waits, the samples of the group that lacks fewest start first;
* repacking: when nothing waits, what runs on an instance that is less than an eighth full moves to the others;
* left-overs: no `async`, but `stream` with rounds that carry unfinished samples over: tail batching (25 % more groups
  than needed), and partial rollouts (rounds of the lengths' upper quartile, 25 % more groups).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import click
import numpy as np
from dispatch_workloads import QUALITIES, REQUESTS, SIBLINGS, Workload, made_up, recorded, step
from rich.progress import track
from running import RESULTS, Sheet, machine, results_folder, terminal, write_results

from scheduler.dispatch.baselines import LeastLoaded
from scheduler.dispatch.policy import Assignment, DispatchPolicy, Request, TokenProgress
from scheduler.dispatch.registry import make_policy
from scheduler.schedule.rounds import PartialRollouts, Rounds, TailBatching
from scheduler.schedule.schedules import make_schedule
from scheduler.simulation.generation_simulator import SimulatedRequest
from scheduler.simulation.pipeline import Pipeline, PipelineOutcome
from scheduler.simulation.stages import Stages

OUT = RESULTS / "async_policies.json"
SHAPES = ("log-normal 1.0", "R1-like", "small_reasoner", "smollm2")
BATCH = REQUESTS // SIBLINGS
TRAINERS = {"fast": 4.0, "balanced": 1.0, "slow": 0.5}
MORE = 1.25
"""Groups that rounds issue, as a multiple of those that they need."""
LITTLE = 0.125
"""Share of an instance's slots below which it is repacked."""
BASE = "least-loaded"


class GroupsTogether(LeastLoaded):
    """Starts the samples of the group that lacks fewest first."""

    def __init__(self) -> None:
        super().__init__(SIBLINGS)
        self._lacks: Counter[str] = Counter()

    def submit(self, requests: Iterable[Request]) -> None:
        """Add requests to be placed."""
        more = list(requests)
        self._lacks.update(request.group_id for request in more)
        super().submit(more)

    def finished(self, request_id: str, length: float | None = None) -> None:
        """Free a request's slot."""
        self._lacks[self.where[request_id].running[request_id].group_id] -= 1
        super().finished(request_id, length)

    def decide(self, produced: TokenProgress | None = None) -> list[Assignment]:
        """Place waiting requests while there are free slots."""
        self._waiting = type(self._waiting)(sorted(self._waiting, key=lambda one: self._lacks[one.group_id]))
        return super().decide(produced)


class Repacking(LeastLoaded):
    """Moves what runs on a nearly empty instance to the others when nothing waits."""

    def decide(self, produced: TokenProgress | None = None) -> list[Assignment]:
        """Place waiting requests, then move."""
        decisions = super().decide(produced)
        if self.waiting or decisions or len(self.instances) < 2:
            return decisions
        last = min((one for one in self.instances.values() if one.running), key=lambda one: one.load, default=None)
        if last is None or len(last.running) >= LITTLE * last.slots:
            return decisions
        for request in list(last.running.values()):
            others = [one for one in self.instances.values() if one is not last and one.running and one.free > 0]
            if others:
                decisions.append(self.start(request, min(others, key=lambda one: one.load)))
        return decisions


@dataclass(frozen=True)
class Way:
    """A way to dispatch."""

    policy: Callable[[Workload], DispatchPolicy]
    slots: float = 1.0
    """Share of the slots that it uses."""
    rounds: Callable[[list[list[SimulatedRequest]]], Rounds] | None = None
    """Rounds under `stream`; None: `async`."""


def named(name: str) -> Callable[[Workload], DispatchPolicy]:
    return lambda of: make_policy(name, of.limit, SIBLINGS)


def parked(groups: list[list[SimulatedRequest]]) -> Rounds:
    budget = np.quantile([request.length for group in groups for request in group], 0.75)
    return PartialRollouts(BATCH, int(budget), MORE)


WAYS = {
    BASE: Way(named(BASE)),
    **{name: Way(named(name)) for name in ("skew-aware", "longest-first", "algorithm2", "group-probe")},
    "3/4 of the slots": Way(named(BASE), 0.75),
    "1/2 of the slots": Way(named(BASE), 0.5),
    "groups together": Way(lambda of: GroupsTogether()),
    "repacking": Way(lambda of: Repacking(SIBLINGS)),
    "tail batching": Way(named(BASE), rounds=lambda groups: TailBatching(BATCH, MORE)),
    "partial rollouts": Way(named(BASE), rounds=parked),
}


def groups_of(workload: Workload, steps: int) -> list[list[SimulatedRequest]]:
    """Groups of so many steps."""
    rng, groups = np.random.default_rng(0), []
    for number in range(steps):
        made = step(QUALITIES["honest, .35"], workload, rng)
        for first in range(0, REQUESTS, SIBLINGS):
            names = f"{number}.{first}"
            group = made[first : first + SIBLINGS]
            groups.append([replace(one, request_id=f"{number}.{one.request_id}", group_id=names) for one in group])
    return groups


def played(way: Way, workload: Workload, stages: Stages, steps: int) -> PipelineOutcome:
    groups = groups_of(workload, steps + 3)
    fleet = [replace(one, slots=max(1, round(way.slots * one.slots))) for one in workload.fleet]
    rounds = way.rounds(groups) if way.rounds else None
    schedule = make_schedule("stream" if rounds else "async")
    return Pipeline(way.policy(workload), fleet, stages, schedule, BATCH, rounds).run(groups, steps)


def run(workload: Workload, steps: int) -> dict[str, dict[str, tuple[float, float]]]:
    """Ratio of the seconds per trained token to least-loaded's, and mean staleness, by trainer and way."""
    alone = played(WAYS[BASE], workload, Stages(1e9), steps)
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for trainer, faster in TRAINERS.items():
        stages = Stages(faster * alone.tokens / alone.total)
        outcomes = {name: played(way, workload, stages, steps) for name, way in WAYS.items()}
        # not per step: what rounds defer is longer than the rest, and some of it is left at the end
        each = {name: one.total / one.tokens for name, one in outcomes.items()}
        stale = {name: float(np.mean(one.staleness_by_step)) for name, one in outcomes.items()}
        found[trainer] = {name: (each[name] / each[BASE], stale[name]) for name in outcomes}
    return found


@click.command(help=__doc__)
@click.option("--steps", default=12, show_default=True, type=click.IntRange(2), help="steps of a run")
def main(steps: int) -> None:
    target = results_folder(None, "steps") / OUT.name
    console = terminal()
    workloads = [one for one in (*made_up(), *recorded()) if one.name.startswith(SHAPES)]
    with ProcessPoolExecutor() as pool:
        jobs = [pool.submit(run, workload, steps) for workload in workloads]
        found = {w.name: job.result() for w, job in track(list(zip(workloads, jobs, strict=True)), console=console)}
    rows, record = [], []
    for trainer, name in itertools.product(TRAINERS, WAYS):
        ratios = [one[trainer][name][0] for one in found.values()]
        stale = float(np.mean([one[trainer][name][1] for one in found.values()]))
        record.append({"trainer": trainer, "way": name, "ratios": ratios, "staleness": stale})
        shown = (f"{value:.3f}" for value in (np.mean(ratios), min(ratios), max(ratios), *ratios))
        rows.append((trainer, name, *shown, f"{stale:.2f}"))
    sheet = Sheet(
        f"{steps} steps: seconds per trained token against least-loaded under `async`",
        ("trainer", "way", "mean", "best", "worst", *found, "staleness"),
        rows,
        ["tail batching, partial rollouts: under `stream`, which is never stale but by what they carry over"],
    )
    sheet.show(console)
    values: dict[str, Any] = {"machine": machine(), "steps": steps, "workloads": list(found), "ways": record}
    write_results(target, values, "Dispatch under async", [sheet])
    console.print(f"written to {target} and .md beside", highlight=False)


if __name__ == "__main__":
    main()
