"""Run a job whose instances come and go: by the run's own rule as answers grow and shrink, and by hand.

    .venv/bin/python experiments/elastic.py --runs-dir runs/elastic   # 6 minutes on 2 cores; wants a quiet machine
    .venv/bin/python experiments/elastic.py --summary-only            # tables and plot from the JSON again

The small reasoner (experiments/small_reasoner) works out sums step by step: the more terms, the longer its answers. A
file of prompts whose terms go from 2 to 10 and back to 2, read in its order, makes the lengths of a real run grow and
shrink. `stream` schedule: training starts with the first groups, so that it covers a part of generation.

*By the rule.* `elasticity` on, a pool of 1 to 2 instances. The figure has generation and training time of each step
beside the number of instances (in the manner of the StreamRL paper's figure of its own rule).
*By hand.* Sums of 8 terms, elasticity off: `streamrl scale` takes a pool from 2 instances to 3 and back. Every sample
is then looked for in the ledger and in the rollouts.

Writes experiments/results/elastic.json, .md and .svg.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import pyarrow.parquet as pq
import reasoning_gym
import yaml
from matplotlib.figure import Figure
from running import (
    HERE,
    OUT_HELP,
    ROOT,
    Job,
    Sheet,
    done_steps,
    machine,
    read_record,
    results_folder,
    run_job,
    runs_folder,
    terminal,
    wait_for_steps,
    write_results,
)

from streamrl.rollouts.ledger import Ledger
from streamrl.run_dir import layout
from streamrl.run_dir.metrics import MetricsRow, read_metrics
from streamrl.run_dir.status import read_status

CLUSTER, RUN_FILE = HERE / "clusters" / "elastic.yaml", HERE / "runs" / "elastic.yaml"
TERMS = (*[2] * 6, *[6] * 4, *[8] * 4, *[10] * 8, *[8] * 2, *[6] * 4, *[2] * 36)
"""Of the sums of each step."""
PROMPTS, SAMPLES = 8, 4
"""Of a step, as in the run file."""
HAND_STEPS, HAND_TERMS = 400, 8
LIMIT_S = 600.0
"""For each thing that is waited for."""
COLUMNS = {
    *("step", "time", "step_time_s", "generate_time_s", "train_time_s", "instances", "output_length_mean", "usd"),
    *("bubble_fraction_generation", "samples_total"),
}


def write_files(folder: Path, terms: Sequence[int], replicas: int, most: int, **changes: Any) -> tuple[Path, Path]:
    """Cluster and run file of a run whose steps ask for sums of so many terms."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for step, count in enumerate(terms):
        limits = {"min_terms": count, "max_terms": count, "min_digits": 1, "max_digits": 1}
        made = reasoning_gym.create_dataset("chain_sum", seed=step, size=PROMPTS, **limits)
        lines += [json.dumps({"prompt": item["question"], "answer": item["answer"]}) for item in made]
    (folder / "sums.jsonl").write_text("\n".join(lines) + "\n")
    cluster, run = (yaml.safe_load(path.read_text()) for path in (CLUSTER, RUN_FILE))
    cluster["sites"]["here"]["generation"][0] |= {"replicas": replicas, "max_replicas": most}
    run["tasks"][0]["path"] = str(folder / "sums.jsonl")
    run["model"]["path"] = str(ROOT / run["model"]["path"])
    (folder / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    (folder / "run.yaml").write_text(yaml.safe_dump(run | changes))
    return folder / "cluster.yaml", folder / "run.yaml"


def by_rule(folder: Path, show: Callable[[int], None]) -> dict[str, Any]:
    """The run in which the rule decides."""
    cluster, run_file = write_files(folder / "files_rule", TERMS, 1, 2)
    outcome = run_job(Job("rule", cluster, run_file, len(TERMS)), folder, show, 3600)
    if outcome.error:
        raise SystemExit(f"by the rule: {outcome.error}")
    logged = (folder / "rule" / "logs" / "controller.log").read_text().splitlines()
    return {
        "rows": [row.model_dump(include=COLUMNS) for row in outcome.rows],
        "decisions": [line.partition("elasticity: ")[2] for line in logged if "elasticity: " in line],
        "came": [one.model_dump() for one in read_status(folder / "rule").scaling.coming],
    } | balance(folder / "rule")


def by_hand(folder: Path, show: Callable[[int], None]) -> dict[str, Any]:
    """The run in which `streamrl scale` does."""
    terms = [HAND_TERMS] * HAND_STEPS
    cluster, run_file = write_files(folder / "files_hand", terms, 2, 3, elasticity={"enabled": False})
    run_dir = folder / "hand"
    job = Job("hand", cluster, run_file, HAND_STEPS)
    with (folder / "hand.log").open("w") as log:
        process = subprocess.Popen(job.command(folder), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    try:
        said: list[str] = []
        for until, replicas in ((4, 3), (8, 2), (12, None)):
            wait_for_steps(run_dir, until if not said else done_steps(run_dir) + 4, process, LIMIT_S, show)
            if replicas is not None:
                said.append(_scale(run_dir, replicas))
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)
    rows = read_metrics(run_dir / layout.METRICS)
    return {
        "rows": [row.model_dump(include=COLUMNS) for row in rows],
        "said": said,
        "came": [one.model_dump() for one in read_status(run_dir).scaling.coming],
    } | balance(run_dir)


def _scale(run_dir: Path, replicas: int) -> str:
    options = ["--pool", "regular", "--replicas", str(replicas)]
    command = [sys.executable, "-m", "streamrl.cli.main", "scale", str(run_dir), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise SystemExit(f"by hand: {done.stdout}{done.stderr}")
    return done.stdout


def balance(run_dir: Path) -> dict[str, Any]:
    """What became of every sample of the steps that are done."""
    ledger = Ledger(run_dir / layout.LEDGER)
    steps = done_steps(run_dir)
    rows = [row for path in sorted((run_dir / "rollouts").glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    trained = [row for row in rows if row["t_trained"] is not None]
    ids = Counter(row["sample_id"] for row in trained)
    groups = {int(row["group_id"]) for row in trained}
    return {
        "steps": steps,
        "ledger": ledger.counts(),
        "trained_twice": sum(count - 1 for count in ids.values()),
        "groups_missing": len(set(range(steps * PROMPTS)) - groups),
        "by_instance": dict(Counter(row["instance"] for row in trained)),
    }


def sheets(results: dict[str, Any]) -> list[Sheet]:
    """Both runs as tables."""
    rule, hand = results["rule"], results["hand"]
    rows = [MetricsRow(**row) for row in rule["rows"]]
    table = []
    terms = list(TERMS)
    for first in [0, *[n for n in range(1, len(terms)) if terms[n] != terms[n - 1]]]:
        last = next((n for n in range(first, len(terms)) if terms[n] != terms[first]), len(terms))
        for count in dict.fromkeys(round(row.instances or 0) for row in rows[first:last]):
            some = [row for row in rows[first:last] if round(row.instances or 0) == count]
            mean = [
                statistics.mean(value for row in some if (value := getattr(row, name)) is not None)
                for name in ("output_length_mean", "generate_time_s", "train_time_s", "step_time_s", "usd")
            ]
            table.append(
                (
                    f"{some[0].step} to {some[-1].step}, {terms[first]} terms",
                    str(count),
                    *(f"{value:.{digits}f}" for value, digits in zip(mean, (0, 1, 1, 1, 4), strict=True)),
                )
            )
    notes = [f"decided: {line}" for line in rule["decisions"]]
    notes += [_came(one) for one in rule["came"]]
    columns = ("steps", "instances", "tokens", "generation s", "training s", "step s", "USD a step")
    sheet = Sheet("By the rule: means of steps with as many instances", columns, table, notes)
    balanced = [
        (
            name,
            str(some["steps"]),
            str(some["ledger"].get("trained", 0)),
            str(some["groups_missing"] * SAMPLES),
            str(some["trained_twice"]),
            " ".join(f"{key}: {value}" for key, value in sorted(some["by_instance"].items())),
        )
        for name, some in (("by the rule", rule), ("by hand, 2 to 3 to 2", hand))
    ]
    heads = ("run", "steps", "trained", "samples lost", "trained twice", "by instance")
    return [sheet, Sheet("Every sample", heads, balanced, [_came(one) for one in hand["came"]])]


def _came(one: dict[str, Any]) -> str:
    ready, first = (one[key] - one["requested_at"] for key in ("ready_at", "first_sample_at"))
    return f"{one['instance']}: ready {ready:.1f} s after it was asked for, its first sample came after {first:.1f} s"


def draw(results: dict[str, Any], path: Path) -> None:
    """Both stages and the number of instances, step by step."""
    rows = [MetricsRow(**row) for row in results["rule"]["rows"]]
    steps = [row.step for row in rows]
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    top.plot(steps, [row.generate_time_s for row in rows], color="#2f7ed8", marker="o", ms=3, label="generation")
    top.plot(steps, [row.train_time_s for row in rows], color="#e0801f", marker="o", ms=3, label="training")
    top.set(ylabel="seconds of the step", title="answers grow and shrink; the rule adds an instance and takes it away")
    lengths = top.twinx()
    lengths.plot(steps, [row.output_length_mean for row in rows], color="#999999", ls=":", label="mean answer")
    lengths.set_ylabel("tokens")
    lengths.set_ylim(0, None)
    lines = [*top.get_lines(), *lengths.get_lines()]
    top.legend(lines, [str(line.get_label()) for line in lines], fontsize=8, loc="upper left")
    bottom.step(steps, [row.instances for row in rows], where="mid", color="#1f9d78")
    bottom.set(xlabel="optimizer step", ylabel="instances, mean", ylim=(0, 2.5))
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    figure.savefig(path)


@click.command(help=__doc__)
@click.option(
    "--runs-dir", type=click.Path(path_type=Path), help="Where runs are kept; one that is done is not run again."
)
@click.option("--out", type=click.Path(path_type=Path), help=OUT_HELP)
@click.option("--summary-only", is_flag=True, help="Run nothing: tables and plot from the JSON.")
def main(runs_dir: Path | None, out: Path | None, summary_only: bool) -> None:
    out = results_folder(out)
    console = terminal()
    target = out / "elastic.json"
    if summary_only:
        results = read_record(target, "machine", "rule", "hand")
    else:
        with runs_folder(runs_dir) as folder, console.status("starting") as shown:
            folder = folder.resolve()

            def show(steps: int) -> None:
                shown.update(f"step {steps}")

            results = {"machine": machine(), "rule": by_rule(folder, show), "hand": by_hand(folder, show)}
    tables = sheets(results)
    for sheet in tables:
        sheet.show(console)
    write_results(target, results, "Instances that come and go", tables)
    draw(results, target.with_suffix(".svg"))
    console.print(f"written to {target}, .md and .svg beside", highlight=False)


if __name__ == "__main__":
    main()
