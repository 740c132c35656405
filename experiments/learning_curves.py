"""Draw the reward curves of the kept learning runs and print their rise.

    .venv/bin/streamrl launch --cluster cluster_configs/local.yaml --run examples/small_reasoner.yaml
    cp runs/small-reasoner/metrics.jsonl runs/small-reasoner/config.yaml experiments/results/small_reasoner/
    .venv/bin/python experiments/learning_curves.py

Reads experiments/results/*/metrics.jsonl (a row per optimizer step, as the run wrote it); writes reward.png beside.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import click
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from streamrl.run_dir.metrics import MetricsRow, read_metrics

RESULTS = Path(__file__).parent / "results"
WINDOW = 10


def draw(rows: list[MetricsRow], target: Path) -> None:
    """Mean reward per step with one deviation as a band, and its running mean over ten steps."""
    steps = [row.step for row in rows]
    rewards = [row.reward_mean or 0.0 for row in rows]
    spread = [row.reward_std or 0.0 for row in rows]
    smooth = [mean(rewards[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(rows))]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    band = (
        [r - s for r, s in zip(rewards, spread, strict=True)],
        [r + s for r, s in zip(rewards, spread, strict=True)],
    )
    axes.fill_between(steps, *band, alpha=0.15, label="one deviation over samples")
    axes.plot(steps, rewards, lw=1, alpha=0.7, label="mean reward of the step's samples")
    axes.plot(steps, smooth, lw=2, label=f"mean of the last {WINDOW} steps")
    axes.set(xlabel="optimizer step", ylabel="reward", title=target.parent.name)
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(target, dpi=110)


@click.command(help=__doc__)
def main() -> None:
    table = Table("run", "steps", f"first {WINDOW}", f"last {WINDOW}", "rise", "seconds (steps only)")
    for path in sorted(RESULTS.glob("*/metrics.jsonl")):
        rows = read_metrics(path)
        rewards = [row.reward_mean or 0.0 for row in rows]
        first, last = mean(rewards[:WINDOW]), mean(rewards[-WINDOW:])
        seconds = sum(row.step_time_s or 0.0 for row in rows)
        table.add_row(
            path.parent.name, str(len(rows)), f"{first:.3f}", f"{last:.3f}", f"{last - first:+.3f}", f"{seconds:.0f}"
        )
        draw(rows, path.with_name("reward.png"))
    Console().print(table)


if __name__ == "__main__":
    main()
