"""Compute the share of the oracle's saving within reach of one who knows each prompt's lengths, but not the sample's.

    .venv/bin/python experiments/dispatch_ceiling.py      # some minutes; writes results/dispatch_ceiling.{json,md}

The prompts of the small reasoner with 32 samples (experiments/data). A batch is 8 of a prompt's samples; the other 24
are what is known of the prompt: their quantiles are a forecast that no predictor can be expected to beat, whatever it
has learned ("24 others"). The ranker's forecasts are of a model trained on all other prompts. Both are given to the
same dispatch policy, on 4 instances with the step times of a 7B model on an H800, and compared with least-loaded
dispatch and with the true lengths (the oracle); sums over batches of other samples of the same prompts. "Captured" is
the share of the oracle's saving, and says little where the oracle saves next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import click
import numpy as np
from rich.progress import track
from running import HERE, RESULTS, Sheet, machine, results_folder, terminal, write_results

from ranker.data import Rollouts, read_rollouts
from ranker.segments import Array
from ranker.train import train_and_hold_out
from scheduler.cost.decode import PAPER_7B_H800
from scheduler.cost.length_forecast import Forecast
from scheduler.simulation.generation_simulator import SimulatedInstance, SimulatedRequest
from scheduler.simulation.saving import Replay, Saving

DATA, OUT = HERE / "data" / "small_reasoner.parquet", RESULTS / "dispatch_ceiling.json"
MANY, ISSUED = 32, 8
"""Samples of a prompt, and how many of them are a batch's."""
LEVELS = np.linspace(0.02, 0.98, 25)
INSTANCES, SLOTS = 4, (16, 32, 64, 128, 256)
RANKER, OTHERS = "ranker", "24 others"


def batches(rollouts: Rollouts, prompts: Array, ranked: Array, levels: Array, count: int) -> list[dict[str, list]]:
    """So many batches, each as requests by the name of their forecasts.

    Args:
        rollouts: all samples.
        prompts: numbers of those with many samples.
        ranked: [prompts, Q] the ranker's quantiles.
        levels: [Q] of those.
        count: of batches.
    """
    found = []
    for seed in range(count):
        rng = np.random.default_rng(seed)
        batch: dict[str, list] = {RANKER: [], OTHERS: []}
        for prompt, quantiles in zip(prompts.tolist(), ranked, strict=True):
            lengths = rng.permutation(rollouts.output_length[rollouts.prompt == prompt])
            known = Forecast.from_quantiles(LEVELS, np.quantile(lengths[ISSUED:MANY], LEVELS))
            told = Forecast.from_quantiles(levels, quantiles)
            for number, length in enumerate(lengths[:ISSUED].tolist()):
                for name, forecast in ((RANKER, told), (OTHERS, known)):
                    request = SimulatedRequest(f"{prompt}.{number}", length, str(prompt), forecast=forecast)
                    batch[name].append(request)
        found.append(batch)
    return found


def on_fleet(some: Sequence[dict[str, list]], slots: int, limit: float) -> dict[str, Saving]:
    """All batches under each kind of forecast."""
    fleet = [SimulatedInstance(f"instance {n}", PAPER_7B_H800, slots) for n in range(INSTANCES)]
    nothing = Saving(0.0, 0.0, 0.0)
    replay = Replay(fleet, longest=limit)
    return {name: sum((replay.saving(batch[name]) for batch in some), nothing) for name in (RANKER, OTHERS)}


@click.command(help=__doc__)
@click.option("--batches", "count", default=8, show_default=True, type=click.IntRange(min=1))
def main(count: int) -> None:
    target = results_folder(None, "count") / OUT.name
    console = terminal()
    rollouts = read_rollouts([DATA])
    prompts = np.flatnonzero(np.bincount(rollouts.prompt) >= MANY)
    model = train_and_hold_out(rollouts.take(~np.isin(rollouts.prompt, prompts))).model
    task_of = {prompt: rollouts.tasks[task] for prompt, task in zip(rollouts.prompt, rollouts.task, strict=True)}
    told = model.predict([rollouts.texts[n] for n in prompts], [task_of[n] for n in prompts])
    limit = float(rollouts.cap or rollouts.output_length.max())
    some = batches(rollouts, prompts, told.quantiles, told.levels, count)
    values, rows = {}, []
    for slots in track(SLOTS, "fleets", console=console):
        sums = on_fleet(some, slots, limit)
        of = sums[OTHERS]
        values[slots] = {
            "oracle": of.oracle / of.least_loaded,
            **{
                name: {"makespan": one.policy / one.least_loaded, "captured": one.captured}
                for name, one in sums.items()
            },
        }
        shares = ["-" if one.captured is None else f"{one.captured:.0%}" for one in sums.values()]
        ratios = [f"{one.policy / one.least_loaded:.3f}" for one in sums.values()]
        rows.append((str(slots), f"{of.oracle / of.least_loaded:.3f}", ratios[0], shares[0], ratios[1], shares[1]))
    columns = ("slots each", "oracle", RANKER, "captured", OTHERS, "captured")
    sheet = Sheet(f"{count} batches of {len(prompts)} prompts x {ISSUED}: time against least-loaded", columns, rows)
    sheet.show(console)
    record = {"machine": machine(), "batches": count, "slots": values}
    write_results(target, record, "What of the oracle's saving can be captured", [sheet])
    console.print(f"written to {target} and .md beside", highlight=False)


if __name__ == "__main__":
    main()
