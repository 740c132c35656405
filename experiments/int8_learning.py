"""Compare reward curves of the small reasoner with generation in 8 bits and without, under several seeds.

    .venv/bin/python experiments/int8_learning.py                   # a quarter of an hour on 2 cores; again: goes on
    .venv/bin/python experiments/int8_learning.py --summary-only    # table and plot from the JSON again

Runs examples/small_reasoner.yaml in bf16 with truncated importance sampling, once with `generation.compute: int8` and
once with `same` per seed. The curves are within the seeds if the rewards of int8 are no further from those of bf16 than
seeds are from each other. Writes experiments/results/int8_learning.json, .md and .svg.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import click
from matplotlib.figure import Figure
from running import (
    LOCAL,
    RESULTS,
    ROOT,
    Job,
    Outcome,
    Sheet,
    machine,
    read_record,
    results_folder,
    run_all,
    runs_folder,
    terminal,
    write_results,
)

OUT = RESULTS / "int8_learning.json"
KINDS = ("same", "int8")
NAMES = {"same": "bf16", "int8": "int8"}
COLORS = {"same": "tab:blue", "int8": "tab:orange"}
ENDS = 5
"""Steps averaged at each end of a curve."""
OFF_POLICY = "{ratio_to: proximal, correction: truncate, high: 2.0}"
ALGORITHM = "algorithm={name: grpo, aggregation: token, clip_high: 0.28, off_policy: " + OFF_POLICY + "}"


def job(kind: str, seed: int, steps: int) -> Job:
    """Return the run of a kind and seed."""
    changes = (f"seed={seed}", f"generation={{compute: {kind}}}", "model.dtype=bfloat16", ALGORITHM)
    run_file = ROOT / "examples" / "small_reasoner.yaml"
    return Job(f"{kind}-{seed}", LOCAL, run_file, steps, changes)


def kept(outcome: Outcome) -> list[dict[str, Any]]:
    """Return what is kept of a run's steps."""
    return [
        {
            "reward": row.reward_mean,
            "gap": row.logprob_gap_mean,
            "ess": row.ess,
            "seconds": row.step_time_s,
            "generating": row.generate_time_s,
        }
        for row in outcome.rows
    ]


def sheet(record: dict[str, Any]) -> Sheet:
    """Return the table."""
    rows = []
    for kind in KINDS:
        for one in (one for one in record["runs"] if one["kind"] == kind):
            steps = one["steps"]
            first, last = (statistics.mean(s["reward"] for s in part) for part in (steps[:ENDS], steps[-ENDS:]))
            means = [statistics.mean(s[key] for s in steps) for key in ("gap", "ess")]
            middle = statistics.median(s["seconds"] for s in steps)
            figures = [f"{first:.3f}", f"{last:.3f}", f"{means[0]:.4f}", f"{means[1]:.4f}", f"{middle:.1f}"]
            rows.append([f"{NAMES[kind]}, seed {one['seed']}", str(len(steps)), *figures])
    heads = ("generation", "steps", f"reward, first {ENDS}", f"last {ENDS}", "mismatch, nats", "ESS", "median step, s")
    return Sheet(
        "The small reasoner with truncated importance sampling",
        heads,
        rows,
        [record["beside"]] * bool(record["beside"]),
    )


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw all curves, each as the mean of the last three steps."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for number, one in enumerate(record["runs"]):
        rewards = [s["reward"] for s in one["steps"]]
        smooth = [statistics.mean(rewards[max(0, i - 2) : i + 1]) for i in range(len(rewards))]
        label = NAMES[one["kind"]] if number in (0, len(record["runs"]) - 1) else None
        axes.plot(range(1, len(smooth) + 1), smooth, color=COLORS[one["kind"]], lw=1.2, label=label)
    axes.set(xlabel="optimizer step", ylabel="mean reward of three steps", title="generation in int8 and bf16, by seed")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(path)


@click.command(help=__doc__)
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--steps", default=25, show_default=True, type=click.IntRange(2 * ENDS))
@click.option("--runs-dir", type=click.Path(path_type=Path), help="keep the runs' folders here, and go on from them")
@click.option("--beside", default="", help="a remark about the machine, for the table")
@click.option("--summary-only", is_flag=True, help="run nothing")
def main(seeds: int, steps: int, runs_dir: Path | None, beside: str, summary_only: bool) -> None:
    target = results_folder(None, "seeds", "steps") / OUT.name
    if summary_only:
        record = read_record(target, "machine", "beside", "runs")
    else:
        done: dict[str, list[dict[str, Any]]] = {}

        def keep(one: Job, outcome: Outcome) -> None:
            if outcome.error:
                raise click.ClickException(outcome.error)
            done[one.name] = kept(outcome)

        plan = [(kind, seed) for seed in range(seeds) for kind in KINDS]
        with runs_folder(runs_dir) as folder:
            run_all([job(kind, seed, steps) for kind, seed in plan], folder, terminal(), keep, step_s=5)
        runs = [{"kind": kind, "seed": seed, "steps": done[f"{kind}-{seed}"]} for kind, seed in plan]
        record = {"machine": machine(), "beside": beside, "runs": runs}
    table = sheet(record)
    table.show(terminal())
    write_results(target, record, "Learning with generation in 8 bits", [table])
    draw(record, target.with_suffix(".svg"))


if __name__ == "__main__":
    main()
