"""Compare a run whose every process is killed at random instants and resumed with the same run undisturbed.

    .venv/bin/python experiments/kill_everywhere.py     # some 15 minutes on 2 cores

The small reasoner, `async` with staleness 1, one machine. All processes get SIGKILL at the same moment, as when a
machine is switched off; then `streamrl launch --resume`. What is compared: which samples are trained, and in which
step's file each of them is, that none is trained twice, and that the ledger, the rollouts and the metrics agree.

Writes experiments/results/kill_everywhere.json and .md.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import psutil
import pyarrow.parquet as pq
from running import (
    LOCAL,
    OUT_HELP,
    ROOT,
    Sheet,
    done_steps,
    machine,
    results_folder,
    runs_folder,
    terminal,
    write_results,
)

from streamrl.rollouts.ledger import Ledger
from streamrl.run_dir import layout
from streamrl.run_dir.metrics import read_metrics

RUN_FILE = ROOT / "examples" / "small_reasoner.yaml"
SETS = (
    *("schedule={name: async, max_staleness: 1}", "batch.prompts_per_step=8", "batch.samples_per_prompt=4"),
    *("sampling.max_tokens=320", "checkpoint.every=3"),
)
LIMIT_S = 900.0
"""For a run, or a part of one, to end."""


@dataclass(frozen=True)
class Outcome:
    """What a run has trained."""

    seconds: float
    starts: int
    killed_at_steps: list[int]
    steps: int
    trained: int
    twice: int
    open: int
    """Samples in the ledger that are not trained."""
    agree: bool
    """Ledger, rollouts and metrics say the same."""
    groups: list[str]


def start(folder: Path, name: str, steps: int, resume: bool) -> subprocess.Popen[bytes]:
    """Begin a run, or resume it."""
    sets = [word for value in (*SETS, f"name={name}") for word in ("--set", value)]
    files = ["--cluster", str(LOCAL), "--run", str(RUN_FILE), "--runs-dir", str(folder), *sets]
    what = ["--resume", str(folder / name)] if resume else files
    command = [sys.executable, "-m", "streamrl.cli.main", "launch", "--plain", "--steps", str(steps), *what]
    log = (folder / f"{name}.log").open("ab")
    return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)


def switch_off(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the launcher and everything below it: all are stopped first, so that none sees another die."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(number)
    process.wait(30)
    psutil.wait_procs(family, timeout=30)


def play(folder: Path, name: str, steps: int, kills: int, seed: int, tell: object) -> Outcome:
    """Run to the end, with so many kills on the way."""
    rng, run_dir = random.Random(seed), folder / name
    began, at = time.monotonic(), []
    process = start(folder, name, steps, resume=False)
    for number in range(kills):
        # from the moment at which it works to some steps later, also in the middle of a checkpoint
        first = done_steps(run_dir)
        deadline = time.monotonic() + LIMIT_S
        while done_steps(run_dir) <= first and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(rng.uniform(0.0, 6.0))
        if process.poll() is not None or done_steps(run_dir) == steps:  # a run that has done all is not resumed
            break
        switch_off(process)
        at.append(done_steps(run_dir))
        tell.update(f"{name}: killed {number + 1} times, at step {at[-1]} of {steps}")  # type: ignore[attr-defined]
        process = start(folder, name, steps, resume=True)
    if process.wait(LIMIT_S):
        raise SystemExit(f"{name} failed: {(folder / f'{name}.log').read_text()[-2000:]}")
    return outcome(run_dir, time.monotonic() - began, 1 + len(at), at)


def outcome(run_dir: Path, seconds: float, starts: int, at: list[int]) -> Outcome:
    """What a finished run has left."""
    rows = [row for path in sorted((run_dir / "rollouts").glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    trained = [row for row in rows if row["t_trained"] is not None]
    ids = Counter(row["sample_id"] for row in trained)
    ledger = Ledger(run_dir / layout.LEDGER)
    counts, metrics = ledger.counts(), read_metrics(run_dir / layout.METRICS)
    agree = ledger.trained_ids() == sorted(ids) and sum(row.samples_total or 0 for row in metrics) == len(trained)
    agree &= [row.step for row in metrics] == list(range(1, len(metrics) + 1))
    twice = sum(count - 1 for count in ids.values())
    left = sum(counts.values()) - counts.get("trained", 0)
    groups = sorted({row["group_id"] for row in trained})
    return Outcome(seconds, starts, at, len(metrics), len(trained), twice, left, agree, groups)


@click.command(help=__doc__)
@click.option("--kills", default=10, show_default=True, type=click.IntRange(1))
@click.option("--steps", default=40, show_default=True, type=click.IntRange(2))
@click.option("--seed", default=0, show_default=True, help="Of the instants.")
@click.option("--runs-dir", type=click.Path(path_type=Path), help="Where the runs are kept.")
@click.option("--out", type=click.Path(path_type=Path), help=OUT_HELP)
def main(kills: int, steps: int, seed: int, runs_dir: Path | None, out: Path | None) -> None:
    out = results_folder(out, "kills", "steps")
    console = terminal()
    with runs_folder(runs_dir) as folder, console.status("") as tell:
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        runs = {"undisturbed": play(folder, "undisturbed", steps, 0, seed, tell)}
        runs["killed"] = play(folder, "killed", steps, kills, seed, tell)
    same = runs["killed"].groups == runs["undisturbed"].groups
    rows = [
        (
            name,
            str(run.starts),
            str(run.steps),
            str(run.trained),
            str(run.twice),
            str(run.open),
            "yes" if run.agree else "NO",
            f"{run.seconds:.0f}",
        )
        for name, run in runs.items()
    ]
    columns = ("run", "starts", "steps", "trained", "twice", "left open", "files agree", "seconds")
    notes = [
        f"killed when these steps were done: {', '.join(map(str, runs['killed'].killed_at_steps))}",
        f"the same prompts are trained, with all their samples: {'yes' if same else 'NO'}",
    ]
    sheet = Sheet("Everything killed and resumed", columns, rows, notes)
    sheet.show(console)
    target = out / "kill_everywhere.json"
    record = {"machine": machine(), "same": same, "runs": {name: asdict(run) for name, run in runs.items()}}
    write_results(target, record, "Killed everywhere", [sheet])
    console.print(f"written to {target} and .md beside", highlight=False)


if __name__ == "__main__":
    main()
