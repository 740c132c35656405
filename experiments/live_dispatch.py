"""Compare dispatch policies on real vLLM instances of this machine, and the simulator's figures for the same work.

    .venv/bin/python experiments/live_dispatch.py            # some 20 minutes on 2 cores; wants a quiet machine

Every workload is a batch of prompts with seeded samples, so that each policy generates the same answers. It is played
under every policy in turn (twice, interleaved) on the same two instances, by the generation service's dispatcher.
Step times are measured first, on both instances at once. Then the simulator is given the lengths that came and these
step times. Forecasts are those of a ranker trained on experiments/data/<set>.parquet, whose prompts are others;
"known" is told the true lengths. Writes experiments/results/live_dispatch/.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from live_bench import WORKLOADS, Bench, LiveWorkload, Played
from rich.console import Console
from rich.table import Table
from running import HERE, OUT_HELP, RESULTS, results_folder

from ranker.data import read_rollouts
from ranker.model import LengthModel
from ranker.train import train_and_hold_out
from scheduler.cost.length_forecast import Forecast
from streamrl.cli.main import error_lines
from streamrl.runtime.process_plan import PASSIVE_WAITING

OUT = RESULTS / "live_dispatch"
CLOSE = 0.03
"""Policies whose measured times differ by less are not expected to be simulated in that order."""


POLICIES = {
    "round-robin": ("round-robin", "none"),
    "least-loaded": ("least-loaded", "none"),
    "Algorithm 2, ranker": ("algorithm2", "ranker"),
    "ours, ranker": ("skew-aware", "ranker"),
    "ours, known lengths": ("skew-aware", "known"),
}
"""Shown name -> (policy, what it is told)."""


@dataclass
class Result:
    """A workload under a policy: medians over the repeats, seconds."""

    workload: str
    policy: str
    measured: float
    simulated: float
    measured_ratio: float = 0.0
    """To round-robin."""
    simulated_ratio: float = 0.0
    moves: int = 0
    all_measured: list[float] = field(default_factory=list)


async def compare(workload: LiveWorkload, model: LengthModel, repeats: int, console: Console) -> list[Result]:
    """Play a workload under every policy, in turn."""
    bench = Bench(workload)
    try:
        await bench.calibrate()
        ranked = bench.ranked(model)
        first = await bench.play(bench.policy("round-robin"), {})  # warms up, and tells the lengths
        known = {sample_id: Forecast.exactly(length) for sample_id, length in first.lengths.items()}
        told = {"none": {}, "ranker": ranked, "known": known}
        played: dict[str, list[Played]] = {name: [] for name in POLICIES}
        for _, (name, (policy, knows)) in itertools.product(range(repeats), POLICIES.items()):
            played[name].append(await bench.play(bench.policy(policy), told[knows]))
            console.print(f"  {workload.name}: {name} {played[name][-1].seconds:.2f} s", highlight=False)
        results = []
        for name, (policy, knows) in POLICIES.items():
            expected = [bench.simulate(policy, turn.lengths, told[knows]) for turn in played[name]]
            times = [turn.seconds for turn in played[name]]
            results.append(
                Result(
                    workload.name,
                    name,
                    statistics.median(times),
                    statistics.median(expected),
                    moves=played[name][-1].moves,
                    all_measured=times,
                )
            )
        for result in results:
            result.measured_ratio = result.measured / results[0].measured
            result.simulated_ratio = result.simulated / results[0].simulated
        return results
    finally:
        bench.close()


def agreement(results: Sequence[Result], in_every_repeat: bool = False) -> tuple[int, int]:
    """Pairs of policies of a workload that measured apart: (simulated in the same order, all).

    Args:
        results: of all workloads.
        in_every_repeat: only pairs of which one was quicker in each of its repeats than the other in any.
    """
    same = count = 0
    for _, some in itertools.groupby(results, key=lambda result: result.workload):
        for a, b in itertools.combinations(list(some), 2):
            quicker, slower = sorted((a, b), key=lambda result: result.measured)
            apart = max(quicker.all_measured) < min(slower.all_measured)
            if slower.measured > (1 + CLOSE) * quicker.measured and (apart or not in_every_repeat):
                count += 1
                same += (a.measured < b.measured) == (a.simulated < b.simulated)
    return same, count


@click.command(help=__doc__)
@click.option("--repeats", default=2, show_default=True, type=click.IntRange(1))
@click.option("--only", multiple=True, help="Part of a workload's name; several.")
@click.option("--out", type=click.Path(path_type=Path), help=OUT_HELP)
def main(repeats: int, only: tuple[str, ...], out: Path | None) -> None:
    out = out or results_folder(None, "repeats", "only") / OUT.name
    os.environ.update(PASSIVE_WAITING | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    console = Console()
    models: dict[str, LengthModel] = {}
    results: list[Result] = []
    for workload in WORKLOADS:
        if only and not any(part in workload.name for part in only):
            continue
        if workload.data not in models:
            rollouts = read_rollouts([HERE / "data" / f"{workload.data}.parquet"])
            models[workload.data] = train_and_hold_out(rollouts).model
        results += asyncio.run(compare(workload, models[workload.data], repeats, console))
    table = Table(title="Generation of the same prompts; seconds, and ratios to round-robin", title_justify="left")
    for column in ("workload", "policy", "measured", "simulated", "error", "ratio", "simulated", "moves"):
        table.add_column(column, justify="left" if column in ("workload", "policy") else "right")
    for result in results:
        table.add_row(
            result.workload,
            result.policy,
            f"{result.measured:.2f}",
            f"{result.simulated:.2f}",
            f"{result.simulated / result.measured - 1:+.0%}",
            f"{result.measured_ratio:.3f}",
            f"{result.simulated_ratio:.3f}",
            str(result.moves),
            end_section=result.policy == list(POLICIES)[-1],
        )
    console.print(table)
    errors = [abs(result.simulated / result.measured - 1) for result in results]
    same, count = agreement(results)
    console.print(f"median error of the simulated time {statistics.median(errors):.1%}", highlight=False)
    same_apart, apart = agreement(results, in_every_repeat=True)
    console.print(f"policies that measured over {CLOSE:.0%} apart: {same} of {count} pairs simulated in that order")
    console.print(f"of those whose repeats do not overlap: {same_apart} of {apart}")
    for name in list(POLICIES)[1:]:
        mine = [result for result in results if result.policy == name]
        measured = statistics.geometric_mean(result.measured_ratio for result in mine)
        expected = statistics.geometric_mean(result.simulated_ratio for result in mine)
        console.print(f"{name}: {measured:.3f} of round-robin's time, simulated {expected:.3f}", highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    summary = {"median_error": statistics.median(errors), "same_order": same, "pairs": count}
    summary |= {"same_order_apart": same_apart, "pairs_apart": apart}
    (out / "results.json").write_text(json.dumps(summary | {"results": [asdict(r) for r in results]}, indent=1) + "\n")
    plot(results, out / "prediction.svg")


def plot(results: Sequence[Result], path: Path) -> None:
    """Simulated against measured, and each policy's ratio."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for name in POLICIES:
        mine = [result for result in results if result.policy == name]
        left.scatter([r.measured for r in mine], [r.simulated for r in mine], s=18, label=name)
        right.plot([r.measured_ratio for r in mine], range(len(mine)), "o", label=name)
    most = max(max(r.measured, r.simulated) for r in results)
    left.plot([0, most], [0, most], color="grey", lw=0.8, ls=":")
    left.set_xlabel("measured, s")
    left.set_ylabel("simulated, s")
    left.legend(fontsize=8)
    right.set_yticks(range(len({r.workload for r in results})), list(dict.fromkeys(r.workload for r in results)))
    right.set_xlabel("measured time / round-robin's")
    right.invert_yaxis()
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    with error_lines():
        main()
