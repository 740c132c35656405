"""Compare dispatch policies under `stream` and `async` on two real vLLM instances, and the simulator's order of them.

    .venv/bin/python experiments/live_schedules.py       # 50 minutes on 2 cores; wants a quiet machine

As `live_dispatch.py`, but whole steps, by the schedules' own rules: groups are issued as they may be, and a modelled
trainer takes each complete group for its tokens divided by a rate, with which a batch takes it as long as generation
under round-robin. What counts is the end of the last step. Lengths and step times of the live turns are then given to
the simulator of whole iterations. Writes experiments/results/live_schedules.{json,md}.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
from dataclasses import asdict, dataclass

import click
from live_bench import WORKLOADS, Bench, LiveWorkload, Played
from live_dispatch import CLOSE
from rich.console import Console
from running import HERE, RESULTS, Sheet, machine, results_folder, terminal, write_results

from ranker.data import read_rollouts
from ranker.model import LengthModel
from ranker.train import train_and_hold_out
from scheduler.dispatch.policy import DispatchPolicy
from scheduler.dispatch.registry import objective_of
from scheduler.schedule.schedules import make_schedule
from streamrl.cli.main import error_lines
from streamrl.runtime.process_plan import PASSIVE_WAITING

OUT = RESULTS / "live_schedules.json"
CHOSEN = ("small reasoner, 48 x 4", "small reasoner, 64 x 8", "SmolLM2, 24 x 4, caps 16")
STEPS = {"stream": 2, "async": 4}
POLICIES = ("round-robin", "least-loaded", "longest-first", "algorithm2", "skew-aware")


@dataclass(frozen=True)
class Turn:
    """A workload under a schedule and a policy, seconds."""

    workload: str
    schedule: str
    policy: str
    measured: list[float]
    """One value for each repeat."""
    simulated: float
    """Median over the repeats."""


async def compare(workload: LiveWorkload, model: LengthModel, repeats: int, console: Console) -> list[Turn]:
    """Play a workload under every schedule and policy, in turn."""
    bench = Bench(workload, max(STEPS.values()))
    every = list(bench.batches)
    try:
        await bench.calibrate()
        told = bench.ranked(model)
        first = await bench.play(bench.policy("round-robin"), {})  # warms up, and makes the trainer's rate
        tokens = sum(len(group.prompt_tokens) * group.size for group in every[0]) + sum(first.lengths.values())
        rate = tokens / first.seconds
        found = []
        for name, steps in STEPS.items():
            schedule, objective = make_schedule(name), objective_of(name, rate)
            bench.batches = every[:steps]
            played: dict[str, list[tuple[Played, float]]] = {policy: [] for policy in POLICIES}
            for _, policy in itertools.product(range(repeats), POLICIES):
                live: DispatchPolicy = bench.policy(policy, objective)
                turn = await bench.play_steps(schedule, live, told, rate)
                again = bench.simulate_steps(schedule, bench.fresh(policy, objective), turn.lengths, told, rate)
                played[policy].append((turn, again))
                console.print(
                    f"  {workload.name}, {name}, {policy}: {turn.seconds:.2f} s, {again:.2f}", highlight=False
                )
            for policy, turns in played.items():
                measured = [turn.seconds for turn, _ in turns]
                simulated = statistics.median(again for _, again in turns)
                found.append(Turn(workload.name, name, policy, measured, simulated))
        return found
    finally:
        bench.close()


def agreement(turns: list[Turn]) -> tuple[int, int]:
    """Return how many pairs of policies that measured apart in every repeat are simulated in that order, and all."""
    same = count = 0
    for _, some in itertools.groupby(turns, key=lambda turn: (turn.workload, turn.schedule)):
        for a, b in itertools.combinations(list(some), 2):
            quick, slow = sorted((a, b), key=lambda turn: statistics.median(turn.measured))
            if max(quick.measured) * (1 + CLOSE) < min(slow.measured):
                count += 1
                same += quick.simulated < slow.simulated
    return same, count


@click.command(help=__doc__)
@click.option("--repeats", default=2, show_default=True, type=click.IntRange(1))
@click.option("--only", multiple=True, help="Part of a workload's name; several.")
def main(repeats: int, only: tuple[str, ...]) -> None:
    target = results_folder(None, "repeats", "only") / OUT.name
    os.environ.update(PASSIVE_WAITING | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    console, turns = terminal(), []
    for workload in (one for one in WORKLOADS if one.name in CHOSEN):
        if not only or any(part in workload.name for part in only):
            model = train_and_hold_out(read_rollouts([HERE / "data" / f"{workload.data}.parquet"])).model
            turns += asyncio.run(compare(workload, model, repeats, console))
    base = {(one.workload, one.schedule): one for one in turns if one.policy == "least-loaded"}
    rows = []
    for one in turns:
        least, own = base[one.workload, one.schedule], statistics.median(one.measured)
        ratios = own / statistics.median(least.measured), one.simulated / least.simulated
        shown = f"{own:.2f}", f"{one.simulated:.2f}", *(f"{ratio:.3f}" for ratio in ratios)
        rows.append((one.workload, one.schedule, one.policy, *shown))
    same, pairs = agreement(turns)
    note = f"{same} of {pairs} pairs that measured over {CLOSE:.0%} apart in every repeat are simulated in that order"
    columns = "workload", "schedule", "policy", "measured s", "simulated s", "against least-loaded", "simulated"
    sheet = Sheet("Whole steps on two real instances", columns, rows, [note])
    sheet.show(console)
    record = {"machine": machine(), "same_order": same, "pairs": pairs, "turns": [asdict(one) for one in turns]}
    write_results(target, record, "Dispatch under `stream` and `async` on real instances", [sheet])


if __name__ == "__main__":
    with error_lines():
        main()
