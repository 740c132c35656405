"""Have an agent of several turns learn, and keep its curve: reward of training, and on items that are not trained.

    .venv/bin/python experiments/agent_learning.py                     # some minutes on 2 cores; again: goes on
    .venv/bin/python experiments/agent_learning.py --summary-only      # tables and plot from the run's folder

Runs examples/agents/try_again.yaml: the small reasoner answers a sum in tags and is asked again, in the same
conversation, as long as the answer is not right; each further try costs 0.3 of the reward. Every 10 steps the policy
plays 32 items of its own 4 times. A run that was cut short is resumed. Writes agent_learning.json, .md and .svg in
experiments/results/.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import click
import pyarrow.parquet as pq
from matplotlib.figure import Figure
from running import RESULTS, ROOT, Sheet, launch_or_resume, machine, results_folder, terminal, write_results

from streamrl.run_dir import layout
from streamrl.run_dir.metrics import read_metrics

OUT = RESULTS / "agent_learning.json"
RUN_FILE = ROOT / "examples" / "agents" / "try_again.yaml"


def turns_by_step(run_dir: Path) -> dict[int, dict[str, float]]:
    """Return mean turns and rows of the episodes of each step."""
    found = {}
    for file in sorted((run_dir / layout.ROLLOUTS).glob("step_*.parquet")):
        rows = pq.read_table(file, columns=["trajectory_id", "step", "conversation"]).to_pylist()
        told = {row["trajectory_id"]: row["conversation"] for row in rows if row["conversation"]}
        turns = [sum(one["role"] == "assistant" for one in json.loads(text)["messages"]) for text in told.values()]
        if turns:
            found[rows[0]["step"]] = {"turns": statistics.mean(turns), "rows": len(rows) / len(told)}
    return found


def read(run_dir: Path) -> dict[str, Any]:
    """Return what is kept of the run."""
    turns = turns_by_step(run_dir)
    steps = [
        {"step": row.step, "reward": row.reward_mean, "seconds": row.step_time_s, **turns.get(row.step, {})}
        for row in read_metrics(run_dir / layout.METRICS)
    ]
    lines = [json.loads(line) for line in (run_dir / layout.EVALUATIONS).read_text().splitlines()]
    held_out = [
        {"step": line["step"], "reward": line["overall"]["reward_sampled"], "episodes": line["overall"]["samples"]}
        for line in lines
    ]
    return {"machine": machine(), "run": RUN_FILE.name, "steps": steps, "held_out": held_out}


def sheets(record: dict[str, Any]) -> list[Sheet]:
    """Return the tables."""
    steps = {step["step"]: step for step in record["steps"]}
    rows = []
    for held in record["held_out"]:
        near = [one for number, one in steps.items() if abs(number - held["step"]) <= 2]
        turns = [one["turns"] for one in near if "turns" in one]
        rows.append(
            [
                str(held["step"]),
                f"{held['reward']:.3f}",
                f"{statistics.mean(one['reward'] for one in near):.3f}",
                f"{statistics.mean(turns):.2f}" if turns else "-",
            ]
        )
    seconds = sum(step["seconds"] or 0.0 for step in record["steps"])
    per_episode = [step["rows"] for step in record["steps"] if "rows" in step]
    return [
        Sheet(
            f"examples/agents/{record['run']}",
            ("after step", "reward on held-out items", "in training, steps around", "turns of an episode"),
            rows,
            [
                f"held-out: {record['held_out'][0]['episodes']} episodes at temperature 1, the same items each time, "
                "drawn apart from those of training; there are 729 sums, so that some are drawn for both",
                f"rows per episode: {statistics.mean(per_episode):.3f} (an answer that the limit cuts ends its row)",
                f"{len(record['steps'])} steps in {seconds / 60:.0f} minutes, without the starts"
                + (f"; {record['beside']}" if record.get("beside") else ""),
            ],
        )
    ]


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw both curves, and the turns of an episode."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([s["step"] for s in record["steps"]], [s["reward"] for s in record["steps"]], lw=1, label="training")
    held = record["held_out"]
    axes.plot([h["step"] for h in held], [h["reward"] for h in held], marker="o", lw=2, label="held-out items")
    axes.set(xlabel="optimizer step", ylabel="reward", ylim=(0, 1.02), title="an agent of up to three turns")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(path)


@click.command(help=__doc__)
@click.option("--steps", default=30, show_default=True, type=click.IntRange(1))
@click.option("--run-dir", type=click.Path(path_type=Path), default=ROOT / "runs" / "agent-learning", show_default=True)
@click.option("--beside", default="", help="a remark about the machine, for the table")
@click.option("--summary-only", is_flag=True, help="run nothing")
def main(steps: int, run_dir: Path, beside: str, summary_only: bool) -> None:
    target = results_folder(None, "steps") / OUT.name
    if not summary_only:
        launch_or_resume(run_dir, steps, RUN_FILE)
    record = read(run_dir) | {"beside": beside}
    tables = sheets(record)
    for table in tables:
        table.show(terminal())
    write_results(target, record, "An agent learns", tables)
    draw(record, target.with_suffix(".svg"))


if __name__ == "__main__":
    main()
