"""Have the small reasoner learn the way over a frozen lake, gymnasium's as text, under several seeds; keep the curves.

    streamrl env add frozen_lake "gymnasium[toy-text]" --make gymnasium:FrozenLake-v1
    .venv/bin/python experiments/environment_learning.py                  # some minutes per seed on 2 cores; goes on
    .venv/bin/python experiments/environment_learning.py --summary-only   # table and plot from the runs' folders

Runs examples/environments/frozen_lake.yaml once per seed. An episode's reward is 1 at the goal and 0 in the hole or
after 8 moves; an answer without a move costs 0.1. All episodes have the same map and start, so nothing is held out: the
curve is that of training. A run that was cut short is resumed. Writes environment_learning.json, .md and .svg in
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

OUT = RESULTS / "environment_learning.json"
RUN_FILE = ROOT / "examples" / "environments" / "frozen_lake.yaml"
NO_MOVE = "There is no action in your answer"
"""What the environment says to an answer without a move."""
ENDS = 5
"""Steps averaged at each end of a curve."""


def answers(file: Path) -> dict[str, float]:
    """Return the turns of a step's episodes, and which share of them made a move."""
    table = pq.read_table(file, columns=["conversation"])
    told = [json.loads(text)["messages"] for text in table.column("conversation").to_pylist() if text]
    turns = sum(one["role"] == "assistant" for messages in told for one in messages)
    # the reply to an episode's last answer is no part of its conversation
    replies = [one["content"] for messages in told for one in messages[1:] if one["role"] == "user"]
    refused = sum(NO_MOVE in str(text) for text in replies)
    return {"turns": turns / len(told), "moved": 1 - refused / len(replies) if replies else 1.0}


def read(run_dir: Path, seed: int, most: int) -> dict[str, Any]:
    """Return what is kept of a run: at most so many steps."""
    steps = []
    for row in read_metrics(run_dir / layout.METRICS)[:most]:
        found = answers(run_dir / layout.ROLLOUTS / f"step_{row.step:06d}.parquet")
        steps.append({"step": row.step, "reward": row.reward_mean, "seconds": row.step_time_s, **found})
    return {"seed": seed, "steps": steps}


def sheets(record: dict[str, Any]) -> list[Sheet]:
    """Return the table."""
    rows = []
    for one in record["runs"]:
        steps = one["steps"]
        parts = steps[:ENDS], steps[len(steps) // 2 - ENDS // 2 :][:ENDS], steps[-ENDS:]
        rewards = [f"{statistics.mean(step['reward'] for step in part):.3f}" for part in parts]
        turns = [statistics.mean(step["turns"] for step in part) for part in (parts[0], parts[-1])]
        minutes = sum(step["seconds"] or 0.0 for step in steps) / 60
        rows.append([str(one["seed"]), str(len(steps)), *rewards, f"{turns[0]:.1f} / {turns[1]:.1f}", f"{minutes:.0f}"])
    head = ("seed", "steps", "reward, first 5 steps", "5 in the middle", "last 5", "turns, first / last", "minutes")
    moved = statistics.mean(one["steps"][0]["moved"] for one in record["runs"])
    notes = [
        "64 episodes per step; reward: 1 at the goal, 0 in the hole or after 8 moves, -0.1 per answer without a move",
        f"answers of the first step that are a move: {100 * moved:.0f} %; the shortest way has 4 moves",
    ]
    return [Sheet("FrozenLake-v1 as text, 3 x 3", head, rows, notes + [record["beside"]] * bool(record["beside"]))]


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw the reward of all seeds."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for one in record["runs"]:
        axes.plot(*zip(*((s["step"], s["reward"]) for s in one["steps"]), strict=True), label=f"seed {one['seed']}")
    axes.set(xlabel="optimizer step", ylabel="reward", ylim=(-0.05, 1.05), title="a frozen lake, 3 x 3, as text")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(path)


@click.command(help=__doc__)
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--steps", default=15, show_default=True, type=click.IntRange(2 * ENDS))
@click.option("--folder", type=click.Path(path_type=Path), default=ROOT / "runs" / "environment-learning")
@click.option("--beside", default="", help="a remark about the machine, for the table")
@click.option("--summary-only", is_flag=True, help="run nothing")
def main(seeds: int, steps: int, folder: Path, beside: str, summary_only: bool) -> None:
    target = results_folder(None, "seeds", "steps") / OUT.name
    folders = {seed: folder.absolute() / f"seed-{seed}" for seed in range(seeds)}
    if not summary_only:
        for seed, run_dir in folders.items():
            launch_or_resume(run_dir, steps, RUN_FILE, f"seed={seed}")
    runs = [read(run_dir, seed, steps) for seed, run_dir in folders.items()]
    record = {"machine": machine(), "run": RUN_FILE.name, "beside": beside, "runs": runs}
    for table in (tables := sheets(record)):
        table.show(terminal())
    write_results(target, record, "An environment is learnt", tables)
    draw(record, target.with_suffix(".svg"))


if __name__ == "__main__":
    main()
