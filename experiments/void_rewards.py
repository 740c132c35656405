"""Kill 5 % and 15 % of the rewards of a training run at random, and compare it with undisturbed ones.

    .venv/bin/python experiments/void_rewards.py                     # 5 runs, about 30 minutes on 2 cores
    .venv/bin/python experiments/void_rewards.py --only killed_5-0   # one of them; writes nothing
    .venv/bin/python experiments/void_rewards.py --summary-only      # tables and plot from the JSON again

SmolLM2-135M on the sums of examples/smollm2_easy.yaml with its settings, but half the prompts a step. The questions
come from a file, so that a reward of a user judges them (dying_rewards.py): undisturbed with three seeds, and dying in
5 % and 15 % of its calls. It raises, kills its own process, loses a connection, or hangs; a death is not tried again.

From each run's own files: void rewards by cause; whether every group with two survivors or more has been trained, with
its survivors alone; the advantages that were trained against those of a group that never had the dead; and the reward
curve against the band of the undisturbed seeds. A finished run in `--runs-dir` is not run again. Writes
void_rewards.json, .md and .svg in experiments/results/."""

from __future__ import annotations

import json
import sqlite3
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow.parquet as pq
import reasoning_gym
import yaml
from matplotlib.figure import Figure
from running import (
    LOCAL,
    OUT_HELP,
    ROOT,
    Job,
    Outcome,
    Sheet,
    machine,
    read_record,
    results_folder,
    run_all,
    terminal,
    write_results,
)

from streamrl.run_dir import layout

RUN_FILE = ROOT / "examples" / "smollm2_easy.yaml"
UNDISTURBED = "undisturbed"
ARMS = {UNDISTURBED: (0, 1, 2), "killed_15": (0,), "killed_5": (0,)}
"""Function of dying_rewards.py -> seeds."""
COLOURS = {UNDISTURBED: "#444444", "killed_5": "#2f7ed8", "killed_15": "#e0801f"}
STEPS = 16
STEP_S = 17.0
"""Rough seconds of a step."""
LAST = 5
"""Steps whose mean reward is compared."""
SMOOTH = 3
"""Steps of the plot's moving average."""
QUESTIONS = 400
COMMON = (
    "batch.prompts_per_step=4",
    "rewards.attempts=1",
    "deadlines.reward_s=5",
    "checkpoint.every=1000",
)
"""Settings of all runs: a death is final, and one that hangs ends soon."""
COLUMNS = {"step", "time", "step_time_s", "reward_mean", "samples_trained", "samples_judged", "samples_void"}
"""Columns of metrics.jsonl that are kept."""


def write_questions(path: Path) -> None:
    """Write questions of the example's task, with their answers."""
    task = yaml.safe_load(RUN_FILE.read_text())["tasks"][0]
    items = reasoning_gym.create_dataset(task["name"], seed=0, size=QUESTIONS, **task["config"])
    lines = [json.dumps({"prompt": item["question"], "answer": item["answer"]}) for item in items]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def jobs_of(questions: Path) -> dict[Job, tuple[str, int]]:
    """Return each run with its arm and seed."""
    found = {}
    for arm, seeds in ARMS.items():
        reward = f"experiments.dying_rewards:{arm}"
        task = f"tasks=[{{kind: file, name: chain_sum, path: {questions}, reward: '{reward}'}}]"
        for seed in seeds:
            found[Job(f"{arm}-{seed}", LOCAL, RUN_FILE, STEPS, (*COMMON, task, f"seed={seed}"))] = arm, seed
    return found


@dataclass(frozen=True)
class Deaths:
    """What a run's own files say of its void rewards."""

    judged: int
    """Samples of the steps that were done."""
    void: dict[str, int]
    """Dead ones of them by cause."""
    groups: int
    """Groups with two survivors or more."""
    wounded: int
    """Those of them that have dead."""
    lost: int
    """Groups with two survivors or more of which a survivor was not trained."""
    dead_trained: int
    """Dead samples that were trained, or that have an advantage."""
    replaced: int
    """Groups with fewer than two survivors, in whose place others came."""
    error: float
    """Largest difference of an advantage that was trained from that of a group without the dead."""
    error_if_zero: float
    """Largest difference of the same from that of a group whose dead count as 0."""

    @property
    def rate(self) -> float:
        """Share of void rewards."""
        return sum(self.void.values()) / self.judged


def group_std(rewards: Sequence[float]) -> np.ndarray:
    """Return GRPO's advantages (arXiv 2402.03300, sec. 4.1.2), apart from the code that is checked: [n] from [n]."""
    values = np.array(rewards)
    return (values - np.mean(values)) / (np.sqrt(np.mean((values - np.mean(values)) ** 2)) + 1e-6)


def deaths_of(run_dir: Path) -> Deaths:
    """Read a run's ledger and rollouts."""
    sql = "SELECT group_id, state, reward, void_cause FROM samples WHERE state IN ('trained', 'dropped')"
    with sqlite3.connect(run_dir / layout.LEDGER) as ledger:
        samples = ledger.execute(sql).fetchall()
    in_ledger: Mapping[str, list[tuple[str, float | None]]] = defaultdict(list)
    for group, state, reward, _ in samples:
        in_ledger[group].append((state, reward))
    in_rollouts: Mapping[str, list[dict[str, Any]]] = defaultdict(list)
    columns = ["group_id", "reward", "advantage", "t_trained"]
    for path in sorted((run_dir / layout.ROLLOUTS).glob("*.parquet")):
        for row in pq.read_table(path, columns=columns).to_pylist():
            in_rollouts[row["group_id"]].append(row)
    alive = {group: [one for one in some if one[1] is not None] for group, some in in_ledger.items()}
    enough = [group for group, some in alive.items() if len(some) >= 2]
    trained = {group for group, rows in in_rollouts.items() if any(row["advantage"] is not None for row in rows)}
    errors, errors_if_zero, dead_trained = [0.0], [0.0], 0
    for rows in in_rollouts.values():
        survivors = [row for row in rows if row["reward"] is not None]
        given = np.array([row["advantage"] for row in survivors])
        errors.append(np.abs(given - group_std([row["reward"] for row in survivors])).max())
        as_zero = group_std([row["reward"] or 0.0 for row in rows])
        mine = [value for row, value in zip(rows, as_zero, strict=True) if row["reward"] is not None]
        errors_if_zero.append(np.abs(given - mine).max())
        dead = [row for row in rows if row["reward"] is None]
        dead_trained += sum(row["advantage"] is not None or row["t_trained"] is not None for row in dead)
    return Deaths(
        judged=len(samples),
        void=dict(Counter(cause for *_, cause in samples if cause is not None)),
        groups=len(enough),
        wounded=sum(len(alive[group]) < len(in_ledger[group]) for group in enough),
        lost=sum(group not in trained or any(state != "trained" for state, _ in alive[group]) for group in enough),
        dead_trained=dead_trained + sum(state == "trained" for _, state, reward, _ in samples if reward is None),
        replaced=len(in_ledger) - len(enough),
        error=float(max(errors)),
        error_if_zero=float(max(errors_if_zero)),
    )


@dataclass(frozen=True)
class Run(Outcome):
    """What is kept of one run."""

    arm: str
    seed: int
    deaths: dict[str, Any] | None
    """Its `Deaths`; None: it failed."""

    @property
    def name(self) -> str:
        """Arm and seed."""
        return f"{self.arm}-{self.seed}"

    @property
    def rewards(self) -> list[float]:
        """Mean over the survivors, by step."""
        return [row.reward_mean or 0.0 for row in self.rows]

    @property
    def last(self) -> float:
        """Mean reward of the last steps."""
        return statistics.mean(self.rewards[-LAST:])

    @property
    def area(self) -> float:
        """Mean reward of all steps."""
        return statistics.mean(self.rewards)


def sheets(runs: Sequence[Run]) -> list[Sheet]:
    """Return the tables."""
    done = [run for run in runs if not run.error]
    found = {run.name: Deaths(**run.deaths) for run in done if run.deaths is not None}
    rows = [
        (
            *(name, str(one.judged), f"{100 * one.rate:.1f} %", str(one.groups), str(one.wounded), str(one.lost)),
            *(str(one.replaced), str(one.dead_trained), f"{one.error:.1e}", f"{one.error_if_zero:.2f}"),
        )
        for name, one in found.items()
    ]
    columns = ("run", "samples", "void", "groups", "with dead", "lost", "replaced", "dead trained", "error", "if zero")
    causes = sorted({cause for one in found.values() for cause in one.void})
    by_cause = [(name, *(str(one.void.get(cause, 0)) for cause in causes)) for name, one in found.items()]
    curves = [(run.name, f"{run.last:.3f}", f"{run.area:.3f}") for run in done]
    undisturbed = [run for run in done if run.arm == UNDISTURBED]
    notes = [f"{run.name}: FAILED: {run.error}" for run in runs if run.error]
    if undisturbed:
        for label, values in (
            ("last steps", [r.last for r in undisturbed]),
            ("all steps", [r.area for r in undisturbed]),
        ):
            notes.append(f"undisturbed, {label}: {min(values):.3f} to {max(values):.3f} over {len(values)} seeds")
    return [
        Sheet(
            "Groups and advantages",
            columns,
            rows,
            [
                "groups: those with two survivors or more; lost: those of which a survivor was not trained; replaced: "
                "groups with fewer survivors, in whose place others came",
                "error: largest difference of a trained advantage from that of a group that never had the dead; "
                "if zero: from that of a group whose dead count as 0",
            ],
        ),
        Sheet("Void rewards by cause", ("run", *causes), by_cause),
        Sheet("Mean reward of survivors", ("run", f"last {LAST} steps", "all steps"), curves, notes),
    ]


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw the reward by step: the band and the lines of the undisturbed seeds, and those of the killed runs."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    done = [run for run in runs if not run.error]
    smooth = {
        run.name: [statistics.mean(run.rewards[max(0, n - SMOOTH + 1) : n + 1]) for n in range(len(run.rewards))]
        for run in done
    }
    undisturbed = [smooth[run.name] for run in done if run.arm == UNDISTURBED]
    if undisturbed:
        steps = range(1, len(undisturbed[0]) + 1)
        low, high = (list(map(end, zip(*undisturbed, strict=True))) for end in (min, max))
        axes.fill_between(steps, low, high, color="#444444", alpha=0.12)
    for run in done:
        values, killed = smooth[run.name], run.arm != UNDISTURBED
        axes.plot(range(1, len(values) + 1), values, color=COLOURS[run.arm], lw=1.8 if killed else 0.8, label=run.name)
    axes.set(xlabel="optimizer step", ylabel=f"mean reward of {SMOOTH} steps", title="rewards killed at random")
    axes.legend(fontsize=8, loc="upper left")
    axes.grid(alpha=0.3)
    figure.savefig(path)


@click.command(help=__doc__)
@click.option("--only", multiple=True, help="Carry out only these runs (killed_5-0), and write nothing.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=ROOT / "runs" / "void_rewards", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help=OUT_HELP)
@click.option("--summary-only", is_flag=True, help="Run nothing: tables and plot from the JSON.")
def main(only: tuple[str, ...], runs_dir: Path, out: Path | None, summary_only: bool) -> None:
    out = results_folder(out)
    console, kept = terminal(), out / "void_rewards.json"
    runs: list[Run] = []
    record: dict[str, Any] = {"machine": machine(), "steps": STEPS, "settings": COMMON}
    if summary_only:
        record = read_record(kept, "machine", "runs")
        runs = [Run.from_json(run) for run in record["runs"]]
    else:
        questions = runs_dir.resolve() / "questions.jsonl"
        write_questions(questions)
        jobs = {job: whose for job, whose in jobs_of(questions).items() if not only or job.name in only}

        def done(job: Job, outcome: Outcome) -> None:
            deaths = None if outcome.error else asdict(deaths_of(runs_dir / job.name))
            runs.append(Run(outcome.rows, outcome.seconds, outcome.error, *jobs[job], deaths))

        run_all(list(jobs), runs_dir, console, done, STEP_S)
    tables = sheets(runs)
    for table in tables:
        table.show(console)
    if only:
        return
    record["runs"] = [run.to_json(COLUMNS) for run in runs]
    write_results(kept, record, "Rewards killed at random", tables)
    draw(runs, out / "void_rewards.svg")
    console.print(f"written to {kept}, .md and .svg beside", highlight=False)


if __name__ == "__main__":
    main()
