"""Compare `streamrl plan`'s cost model with the published figures of the clusters in the StreamRL paper.

    .venv/bin/python experiments/plan_paper.py      # minutes; writes results/plan_paper.json and .md

Nothing here is fitted to the published rows: constants are from data sheets and other papers
(docs/explanation/cost_model.md).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from plan_constants import RATIO_LENGTHS, Clusters, batch, constants, offer, samples_per_cost, sensitivity
from rich.console import Console
from rich.table import Table

from scheduler.capacity.placement_plan import PlacementPlan, colocated
from scheduler.capacity.plan_search import plans
from scheduler.capacity.problem import Problem
from scheduler.capacity.steady_step import steady_step
from scheduler.cost.decode import PAPER_7B_H800, roofline
from scheduler.cost.hardware import device
from scheduler.cost.model_shapes import MODELS
from scheduler.cost.trainer_work import PPO
from streamrl.planning.planning_inputs import PROMPT_TOKENS, SAMPLES

OUT = Path(__file__).parent / "results"
LENGTHS = ("5k", "10k", "20k")
PUBLISHED_7B = {"5k": (13.0, 16.0, 21.3), "10k": (8.0, 8.8, 10.7), "20k": (4.8, 5.1, 5.7)}
"""Samples/s on 32 GPUs: colocated, stream, async."""
PUBLISHED_HETEROGENEOUS = (1.23, 1.33)
CLUSTERS = {"7b": 32, "32b": 128, "72b": 128}
"""H800 by model; 128 are all that the paper's cluster has."""
SCHEDULES: tuple[str, ...] = ("sync", "stream", "one_step_off", "async")
LABEL = ("model", "H800", "lengths")
"""Columns that say what a row is of."""
Titled = tuple[str, tuple[str, ...], Sequence[tuple[str, ...]]]
"""A table: (title, columns, rows)."""


def one_site(model: str, lengths: str, gpus: int) -> dict[str, Any]:
    """Every schedule at its own best split of one site's H800."""
    problem = Problem(MODELS[model], batch(lengths), PPO, (offer(device("H800"), gpus),))
    together = colocated(problem, "throughput")
    assert together is not None
    row: dict[str, Any] = {
        "model": model,
        "gpus": gpus,
        "lengths": lengths,
        "colocated": {
            "samples_per_s": together.step.samples_per_s,
            "generation_s": together.generation_s,
            "training_s": together.training_s,
            "switch_s": together.switch_s,
        },
    }
    for schedule in SCHEDULES:
        row[schedule] = plan_figures(plans(problem, schedule, "throughput")[0])
    return row


def plan_figures(best: PlacementPlan) -> dict[str, Any]:
    """A plan's figures."""
    return {
        "split": best.text,
        "samples_per_s": best.chosen.samples_per_s,
        "generation_s": best.makespan_s,
        "generation_across_steps_s": best.steady_s,
        "training_s": best.training_s,
        "weights_s": best.transfer_s + best.load_s,
        "cost_per_hour": best.chosen.usd_per_hour,
        "samples_per_cost": samples_per_cost(best),
        "limit": best.limit,
    }


def two_sites(lengths: str, schedule: str) -> dict[str, Any]:
    """32 H20 and 16 H800 in two sites against 32 H800 in one, 7B; the rest of what is not used is released."""
    one, both = Clusters(batch(lengths)).one, Clusters(batch(lengths)).two
    homogeneous, mixed = (plan_figures(plans(problem, schedule, "throughput")[0]) for problem in (one, both))
    everything = sum(part.count * part.usd_per_hour for part in both.offers)
    whole = sum(part.count * part.usd_per_hour for part in one.offers)
    return {
        "lengths": lengths,
        "schedule": schedule,
        "homogeneous": homogeneous,
        "heterogeneous": mixed,
        "ratio": mixed["samples_per_cost"] / homogeneous["samples_per_cost"],
        "ratio_nothing_released": mixed["samples_per_s"] / everything / (homogeneous["samples_per_s"] / whole),
    }


def parts_of_async(lengths: str) -> tuple[str, ...]:
    """Seconds of the planned `async` step of 7B on 32 H800, with one part of the model more in each column."""
    problem = Clusters(batch(lengths)).one
    best = plans(problem, "async", "throughput")[0]
    pools, time, shape = best.split.generation, best.split.time, problem.batch
    whole = replace(time, gpus=1, tensor_parallel=1)  # every sample on all GPUs at once
    steps = (
        max(best.steady_s, time.seconds),
        steady_step(pools, shape, whole, 0.0).seconds,
        steady_step(pools, shape, whole, best.transfer_s, best.load_s).seconds,
        steady_step(pools, shape, time, best.transfer_s, best.load_s).seconds,
        best.least_seconds("one_step_off"),
    )
    return (lengths, *(f"{seconds:.1f}" for seconds in steps))


def step_times() -> list[tuple[int, float, float]]:
    """(batch, published ms, ours) of a decode step, 7B on an H800; ours at the mean context of the 5k lengths."""
    curve, shape = roofline(MODELS["7b"].shape, device("H800")), batch("5k")
    return [
        (
            size,
            1e3 * float(PAPER_7B_H800.base(size)),
            1e3 * (float(curve.base(size)) + curve.per_context_token * size * shape.running_context),
        )
        for size in PAPER_7B_H800.batches
    ]


def tables(rows: list[dict[str, Any]], mixed: list[dict[str, Any]], raised: list[tuple[str, ...]]) -> list[Titled]:
    """All tables, in their order."""
    return [
        splits(rows),
        ratios(rows),
        published(rows),
        (
            "Step of the planned `async` split, 7B on 32 H800, s: with one part of the model more in each column",
            (
                *("lengths", "rates alone", "tails and staleness", "new weights: way and pauses"),
                *("a sample on one rank (the plan)", "one_step_off on this split"),
            ),
            [parts_of_async(lengths) for lengths in LENGTHS],
        ),
        pairs(mixed),
        (
            "Decode step of 7B on an H800, ms",
            ("batch", "published", "ours, 5k context"),
            [(str(size), f"{theirs:.1f}", f"{ours:.1f}") for size, theirs, ours in step_times()],
        ),
        ("Constants", ("constant", "value", "source"), list(constants())),
        (
            f"Each constant raised by 20 %: 7B on 32 H800, {RATIO_LENGTHS}",
            (
                *("constant", "stream / colocated", "one_step_off / colocated", "async / colocated"),
                *("colocated samples/s", "throughput per cost, two sites / one"),
            ),
            raised,
        ),
    ]


def label(row: dict[str, Any]) -> tuple[str, str, str]:
    """Its cells under `LABEL`."""
    return row["model"], str(row["gpus"]), row["lengths"]


def splits(rows: list[dict[str, Any]]) -> Titled:
    """Each schedule's split and stage times."""
    body: list[tuple[str, ...]] = []
    for row in rows:
        together = row["colocated"]
        body.append(
            (
                *label(row),
                "colocated",
                "all",
                f"{together['generation_s']:.1f}",
                f"{together['training_s']:.1f}",
                f"{together['switch_s']:.1f}",
                f"{together['samples_per_s']:.2f}",
            )
        )
        for schedule in SCHEDULES:
            one = row[schedule]
            generation = one["generation_across_steps_s"] if schedule == "async" else one["generation_s"]
            body.append(
                (
                    *label(row),
                    schedule,
                    one["split"].replace(" in h800", ""),
                    f"{generation:.1f}",
                    f"{one['training_s']:.1f}",
                    f"{one['weights_s']:.1f}",
                    f"{one['samples_per_s']:.2f}",
                )
            )
    stages = ("generation s", "training s", "weights or switch s", "samples/s")
    return "Split and stage times", (*LABEL, "schedule", "split (replicas x TP)", *stages), body


def ratios(rows: list[dict[str, Any]]) -> Titled:
    """Each schedule's rate over that of colocated."""
    body = []
    for row in rows:
        base = row["colocated"]["samples_per_s"]
        body.append((*label(row), *(f"{row[name]['samples_per_s'] / base:.2f}" for name in SCHEDULES)))
    return "Samples/s against colocated", (*LABEL, *SCHEDULES), body


def published(rows: list[dict[str, Any]]) -> Titled:
    """The published rates of 7B beside ours."""
    body: list[tuple[str, ...]] = []
    for row in rows:
        if row["model"] != "7b":
            continue
        theirs = PUBLISHED_7B[row["lengths"]]
        ours = [row[name]["samples_per_s"] for name in ("colocated", "stream", "one_step_off", "async")]
        body.append(
            (
                row["lengths"],
                " : ".join(f"{value / theirs[0]:.2f}" for value in theirs),
                " : ".join(f"{value / ours[0]:.2f}" for value in ours),
                " / ".join(f"{value:g}" for value in theirs),
                " / ".join(f"{value:.1f}" for value in ours),
                f"{ours[0] / theirs[0]:.2f}",
            )
        )
    columns = (
        "lengths",
        "published colocated : stream : async",
        "ours colocated : stream : one_step_off : async",
        "published samples/s",
        "ours samples/s",
        "ours / published, colocated",
    )
    return "7B on 32 H800 beside the published rows", columns, body


def pairs(mixed: list[dict[str, Any]]) -> Titled:
    """Two sites against one."""
    body = [
        (
            one["lengths"],
            one["schedule"],
            one["homogeneous"]["split"].replace(" in h800", ""),
            one["heterogeneous"]["split"].replace(" in h800", "").replace(" in h20", ""),
            f"{one['homogeneous']['samples_per_s']:.2f}",
            f"{one['heterogeneous']['samples_per_s']:.2f}",
            f"{one['ratio']:.2f}",
            f"{one['ratio_nothing_released']:.2f}",
        )
        for one in mixed
    ]
    columns = (
        *("lengths", "schedule", "one site", "two sites", "samples/s one", "two"),
        *("throughput per cost, two / one", "the same, nothing released"),
    )
    title = f"32 H20 + 16 H800 against 32 H800, 7B (published: {' to '.join(map(str, PUBLISHED_HETEROGENEOUS))})"
    return title, columns, body


NOTES = """
What explains the differences, as far as one can tell without their code and lengths (nothing was fitted to these rows):

- **Absolute rates.** Our decode steps are within 20 % of the published ones, so most of the gap is elsewhere: a real
  step also has padding, imbalance, rewards, and values and advantages that wait for them. Prompts and lengths are
  assumptions: only their shape is published.
- **Async.** The published steps of async last 48, 96 and 180 s at 5K, 10K and 20K: 9.6, 9.6 and 9.0 ms for each token
  of the longest answer, which is the paper's own step time at a batch of 8 to 16. So they end with the longest
  answers of a whole batch, as our `one_step_off` does, and that is the row to compare with. Our `async` is what this
  project runs: instances begin the next batch while the tail of the last one decodes, so that an answer has up to two
  steps. It is simulated, with tails, staleness 1, the way and the pauses of new weights, and samples that one rank of
  the trainer processes each (the table above shows what each part adds). Its ratio to colocated stays above the
  published one.
- **Constants** do not explain the misses: raised by 20 %, none moves a ratio to colocated by more than 5 % (last
  table). A second step of staleness, which is no constant, moves `async` by 22 %. What is left is what the model leaves
  out, and the lengths. Rows of 0.0 % are of what does not bind here: memory, and the link between both sites.
- **Lengths.** The published gains shrink from 5K to 20K, ours hardly: our three length distributions are one, scaled,
  and what grows faster than the lengths is only attention and KV cache.
- **Stream** trains a batch's short answers behind its tail, and the last ones on one rank each; micro-batches that wait
  for samples are not modelled, so ours is nearer to `one_step_off` than the published one.
- **Two sites.** The ratio rests on the relative price (2.85) and on what a plan releases: raised by 20 %, a price moves
  it by 8 %, the H800's rate of attention and the start-up of an all-reduce by 7 %, all others by 5 % or less, in whole
  GPUs, and a trainer's in numbers that its machines share evenly.
- The trainer is FSDP, with tensor parallelism where that fits or is faster, because that is what this project runs.
"""


@click.command(help=__doc__)
def main() -> None:
    rows = [one_site(model, lengths, gpus) for model, gpus in CLUSTERS.items() for lengths in LENGTHS]
    mixed = [two_sites(lengths, schedule) for schedule in ("one_step_off", "async") for lengths in LENGTHS]
    assert all(math.isfinite(one["ratio"]) for one in mixed)
    console = Console()
    raised = sensitivity(lambda name: console.print(f"raised: {name}"))
    text = [
        "# The paper's clusters in the cost model",
        "",
        "Written by `experiments/plan_paper.py`.",
        f"PPO (actor, critic, reference), {SAMPLES} samples a step, prompts of {PROMPT_TOKENS} "
        "tokens (assumed), lengths of the paper's shape (docs/explanation/cost_model.md).",
        "",
    ]
    for title, columns, body in tables(rows, mixed, raised):
        table = Table(*columns, title=title, title_justify="left")
        for line in body:
            table.add_row(*line)
        console.print(table)
        text += [f"## {title}", "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        text += [f"| {' | '.join(line)} |" for line in body] + [""]
    console.print(NOTES, markup=False, highlight=False)
    OUT.mkdir(exist_ok=True)
    (OUT / "plan_paper.md").write_text("\n".join(text) + NOTES)
    values = {
        "published_7b": PUBLISHED_7B,
        "published_heterogeneous": PUBLISHED_HETEROGENEOUS,
        "one_site": rows,
        "two_sites": mixed,
        "constants": [{"name": name, "value": value, "source": source} for name, value, source in constants()],
        "sensitivity": raised,
    }
    (OUT / "plan_paper.json").write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
