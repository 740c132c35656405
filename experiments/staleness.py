"""Measure whether stale samples harm learning: reward after the same number of samples, `sync` against `async`.

    .venv/bin/python experiments/staleness.py                      # 15 runs, about 50 minutes on 2 cores
    .venv/bin/python experiments/staleness.py --seeds 1 --arms sync --arms async-4
    .venv/bin/python experiments/staleness.py --summary-only       # tables and plot from the JSON again

GRPO on the small reasoner (examples/small_reasoner.yaml, with half the prompts a step), from the same weights with the
same prompts, for each seed under each arm: `sync`; `async` with a bound on staleness of 1 and of 4; both also with
decoupled PPO and truncated importance sampling (docs/explanation/algorithms.md). `async` generates ahead up to its
bound where generation is the faster role: so it gets an instance on each core, and the trainer only one core
(clusters/ahead.yaml); and a KL term too small to matter keeps groups without a gradient in the batch, which would be
skipped. The table says how stale samples really were. A finished run in `--runs-dir` is not run again. Writes
staleness.json, .md and .svg in experiments/results/."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

import click
import numpy as np
from matplotlib.figure import Figure
from running import (
    HERE,
    OUT_HELP,
    ROOT,
    Job,
    Outcome,
    Sheet,
    machine,
    read_record,
    results_folder,
    run_all,
    shown,
    terminal,
    write_tables,
)

RUN_FILE = ROOT / "examples" / "small_reasoner.yaml"
CLUSTER = HERE / "clusters" / "ahead.yaml"
COMMON = (
    "batch.prompts_per_step=8",
    "algorithm.kl.coef=0.001",
    "ranker.refit_every=0",
    "dispatch.policy=least-loaded",
    "checkpoint.every=1000",
)
"""Of all arms."""
CORRECTION = "algorithm.off_policy={ratio_to: proximal, correction: truncate, high: 2.0}"
"""The ratio of the surrogate is against the weights as last published; min(those / the generator's, 2) is a weight."""
ARMS = {
    "sync": ("schedule={name: sync}",),
    "async-1": ("schedule={name: async, max_staleness: 1}",),
    "async-4": ("schedule={name: async, max_staleness: 4}",),
    "async-1-corrected": ("schedule={name: async, max_staleness: 1}", CORRECTION),
    "async-4-corrected": ("schedule={name: async, max_staleness: 4}", CORRECTION),
}
"""Name -> what is set; a number is the bound on staleness."""
COLOURS = dict(zip(ARMS, ("#444444", "#2f7ed8", "#e0801f", "#1f9d78", "#c2569b"), strict=True))
STEP_S = 5.0
"""Of a step, roughly."""
SMOOTH = 3
"""Steps of the plot's moving average."""
LAST = 5
"""Steps whose mean reward is compared."""
COLUMNS = {
    *("step", "time", "step_time_s", "reward_mean", "samples_total", "staleness_mean", "staleness_max"),
    *("ess_token", "ess_sequence", "truncated_weight_fraction", "clip_fraction", "output_length_mean", "entropy"),
    *("generate_time_s", "train_time_s"),
}
"""Of metrics.jsonl, that are kept."""


@dataclass(frozen=True)
class Run(Outcome):
    """What is kept of one run."""

    arm: str
    seed: int

    @property
    def rewards(self) -> list[float]:
        """By step."""
        return [row.reward_mean or 0.0 for row in self.rows]

    @property
    def last_reward(self) -> float:
        """Mean of the last steps."""
        return statistics.mean(self.rewards[-LAST:])

    def mean(self, column: str) -> float | None:
        """Over the steps that have a figure."""
        values = [value for row in self.rows if (value := getattr(row, column)) is not None]
        return statistics.mean(values) if values else None


@dataclass(frozen=True)
class Summary:
    """An arm over its seeds."""

    last_reward: dict[int, float]
    """By seed: mean over the last steps."""
    mean: float
    spread: float | None
    """Standard deviation over seeds; None with one."""
    staleness_mean: float | None
    staleness_max: float
    ess_token: float | None
    ess_sequence: float | None
    step_s: float | None


def summarise(runs: Sequence[Run]) -> Summary:
    """Of one arm's runs, one or more."""
    rewards = {run.seed: run.last_reward for run in runs}

    def mean(column: str) -> float | None:
        values = [value for run in runs if (value := run.mean(column)) is not None]
        return statistics.mean(values) if values else None

    return Summary(
        rewards,
        statistics.mean(rewards.values()),
        statistics.stdev(rewards.values()) if len(rewards) > 1 else None,
        mean("staleness_mean"),
        max(row.staleness_max or 0.0 for run in runs for row in run.rows),
        mean("ess_token"),
        mean("ess_sequence"),
        mean("step_time_s"),
    )


def by_arm(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return the runs that did not fail, by seed; arms without any are left out."""
    found = {arm: sorted((r for r in runs if r.arm == arm and not r.error), key=lambda r: r.seed) for arm in ARMS}
    return {arm: some for arm, some in found.items() if some}


def sheet(runs: Sequence[Run]) -> Sheet:
    """The table; below it each arm's distance from `sync`, over the seeds that both have, and failures."""
    arms = by_arm(runs)
    seeds = sorted({run.seed for run in runs})
    summaries = {arm: summarise(some) for arm, some in arms.items()}
    rows = [
        (
            arm,
            *(shown(some.last_reward.get(seed), ".3f") for seed in seeds),
            f"{some.mean:.3f}",
            shown(some.spread, ".3f"),
            f"{shown(some.staleness_mean)} ({some.staleness_max:.0f})",
            shown(some.ess_token, ".3f"),
            shown(some.ess_sequence, ".3f"),
            shown(some.step_s),
        )
        for arm, some in summaries.items()
    ]
    notes = []
    base = summaries["sync"].last_reward if "sync" in summaries else {}
    for arm, some in summaries.items():
        shared = [seed for seed in some.last_reward if seed in base]
        if arm != "sync" and shared:
            gaps = [some.last_reward[seed] - base[seed] for seed in shared]
            notes.append(f"{arm} - sync: {statistics.mean(gaps):+.3f}, by seed {', '.join(f'{g:+.3f}' for g in gaps)}")
    notes += [f"{run.arm}, seed {run.seed}: FAILED: {run.error}" for run in runs if run.error]
    columns = (
        *("arm", *(f"seed {seed}" for seed in seeds), "mean", "deviation", "stale (most)"),
        *("ESS tokens", "ESS sequences", "step s"),
    )
    return Sheet(f"Mean reward of the last {LAST} steps", columns, rows, notes)


def smooth(values: Sequence[float]) -> np.ndarray:
    """Each value's mean with the ones before it: [n] from [n]."""
    return np.array([np.mean(values[max(0, n - SMOOTH + 1) : n + 1]) for n in range(len(values))])


def draw(runs: Sequence[Run], path: Path) -> None:
    """Rewards against samples, one line and band by arm; beside it how stale the samples were."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    for arm, some in by_arm(runs).items():
        samples = list(accumulate(row.samples_total or 0 for row in some[0].rows))
        curves = np.stack([smooth(run.rewards) for run in some])
        left.plot(samples, curves.mean(axis=0), color=COLOURS[arm], lw=1.6, label=arm)
        left.fill_between(samples, curves.min(axis=0), curves.max(axis=0), color=COLOURS[arm], alpha=0.12, lw=0)
        staleness = np.array([[row.staleness_mean or 0.0 for row in run.rows] for run in some])
        right.plot(samples, staleness.mean(axis=0), color=COLOURS[arm], lw=1.2)
    left.set(xlabel="samples trained", ylabel=f"mean reward of {SMOOTH} steps", title="mean, least and most over seeds")
    right.set(xlabel="samples trained", ylabel="staleness, mean over tokens", title="how stale samples were")
    left.legend(fontsize=8, loc="lower right")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path)


def save(path: Path, steps: int, on: str, runs: Sequence[Run]) -> None:
    """Everything, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    summary = {arm: asdict(summarise(some)) for arm, some in by_arm(runs).items()}
    values = {"machine": on, "steps": steps, "settings": COMMON, "arms": ARMS, "summary": summary}
    path.write_text(json.dumps(values | {"runs": [run.to_json(COLUMNS) for run in runs]}, indent=1) + "\n")


@click.command(help=__doc__)
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1), help="Seeds 0, 1, .. of each arm.")
@click.option("--steps", default=30, show_default=True, type=click.IntRange(1), help="Optimizer steps of each run.")
@click.option("--arms", multiple=True, type=click.Choice(tuple(ARMS)), default=tuple(ARMS), help="Several.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key of the run file.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=ROOT / "runs" / "staleness", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help=OUT_HELP)
@click.option("--summary-only", is_flag=True, help="Run nothing: table and plot from the JSON.")
def main(
    seeds: int,
    steps: int,
    arms: tuple[str, ...],
    overrides: tuple[str, ...],
    runs_dir: Path,
    out: Path | None,
    summary_only: bool,
) -> None:
    out = results_folder(out, "seeds", "steps", "arms", "overrides")
    console = terminal()
    kept = out / "staleness.json"
    runs: list[Run] = []
    on = machine()
    if summary_only:
        values = read_record(kept, "machine", "steps", "runs")
        runs, steps, on = [Run.from_json(run) for run in values["runs"]], values["steps"], values["machine"]
    else:
        jobs = {
            Job(f"{arm}-{seed}", CLUSTER, RUN_FILE, steps, (*COMMON, *ARMS[arm], *overrides, f"seed={seed}")): (
                arm,
                seed,
            )
            for seed in range(seeds)
            for arm in arms
        }

        def done(job: Job, outcome: Outcome) -> None:
            runs.append(Run(outcome.rows, outcome.seconds, outcome.error, *jobs[job]))
            save(kept, steps, on, runs)

        run_all(list(jobs), runs_dir, console, done, STEP_S)
    save(kept, steps, on, runs)
    table = sheet(runs)
    table.show(console)
    write_tables(kept.with_suffix(".md"), "Staleness and learning", f"{steps} steps a run; {on}.", [table])
    draw(runs, out / "staleness.svg")
    console.print(f"written to {kept}, .md and .svg beside", highlight=False)


if __name__ == "__main__":
    main()
