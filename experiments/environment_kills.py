"""Kill processes of environments in a live run at a steady rate, and check in its ledger that no sample is lost.

    streamrl env add frozen_lake "gymnasium[toy-text]" --make gymnasium:FrozenLake-v1
    streamrl env add walker "gymnasium[mujoco]" --make walker:make --path examples/environments
    .venv/bin/python experiments/environment_kills.py     # some 12 minutes on 2 cores

The small reasoner plays a frozen lake and drives MuJoCo's walker, in 10 processes each. At first 5 % of the processes
get SIGKILL a minute, at random instants; then, so that more than a few deaths are seen, twenty times as many. An
episode whose step was cut is void; others of the process are played again. At the end every sample that was issued must
be trained or dropped once, or open. Writes environment_kills.json and .md in experiments/results/.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import psutil
from running import (
    HERE,
    LOCAL,
    RESULTS,
    ROOT,
    Sheet,
    done_steps,
    machine,
    results_folder,
    runs_folder,
    terminal,
    wait_for_steps,
    write_results,
)

from streamrl.chaos.audit import audit
from streamrl.chaos.observation import read_account
from streamrl.environments.in_venv import environment_main
from streamrl.run_dir import layout

OUT = RESULTS / "environment_kills.json"
RUN_FILE = HERE / "runs" / "environment_kills.yaml"
RATES = (0.05, 1.0)
"""Share of the processes that is killed in a minute, in each phase."""
LIMIT_S = 900.0
"""For the run to begin, and to end."""
MANY_STEPS = 100_000


def environments(launcher: int) -> list[psutil.Process]:
    """Return the processes of environments below a launcher."""
    found = []
    for one in psutil.Process(launcher).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if environment_main.__file__ in one.cmdline():
                found.append(one)
    return found


def kill_for(seconds: float, rate: float, process: subprocess.Popen[bytes], draw: random.Random) -> int:
    """Kill at random instants; return how many processes were killed.

    Args:
        seconds: how long.
        rate: share of the processes, per minute.
        process: the launcher.
        draw: draws instants and processes.
    """
    killed, end = 0, time.monotonic() + seconds
    while True:
        pause = draw.expovariate(rate * len(environments(process.pid)) / 60)
        if time.monotonic() + pause > end:
            time.sleep(max(0.0, end - time.monotonic()))
            return killed
        time.sleep(pause)
        if process.poll() is not None:
            raise SystemExit("the run has ended by itself")
        with contextlib.suppress(psutil.NoSuchProcess):
            draw.choice(environments(process.pid)).kill()
            killed += 1


def replaced(run_dir: Path) -> int:
    """Return the processes that the agents process has replaced, by its log."""
    text = "".join(path.read_text(errors="replace") for path in (run_dir / layout.LOGS).glob("agents-*.log"))
    return text.count("a process of environment")


def sheets(record: dict[str, Any]) -> list[Sheet]:
    """Return the tables."""
    phases = []
    for one in record["phases"]:
        share = f"{100 * one['rate']:g} % a minute"
        phases.append(
            [share, f"{one['seconds'] / 60:.1f}", str(one["steps"]), str(one["killed"]), f"{one['step_s']:.1f}"]
        )
    found = record["audit"]
    voids = ", ".join(f"{count} {cause}" for cause, count in sorted(found["voids"].items())) or "none"
    trained = [str(found[name]) for name in ("steps", "samples", "lost", "twice", "malformed")]
    return [
        Sheet("what was killed", ("processes killed", "minutes", "steps", "killed", "s per step"), phases),
        Sheet(
            "what the ledger says",
            ("steps", "trained", "lost", "twice", "malformed", "void", "processes replaced"),
            [[*trained, voids, str(record["replaced"])]],
            [*found["faults"], *[record["beside"]] * bool(record["beside"])],
        ),
    ]


@click.command(help=__doc__)
@click.option("--minutes", default=(8.0, 3.0), show_default=True, nargs=2, type=float, help="of each phase")
@click.option("--seed", default=0, show_default=True, help="of instants and processes")
@click.option("--runs-dir", type=click.Path(path_type=Path), help="where the run is kept")
@click.option("--beside", default="", help="a remark about the machine, for the table")
def main(minutes: tuple[float, float], seed: int, runs_dir: Path | None, beside: str) -> None:
    target = results_folder(None, "minutes") / OUT.name
    draw, phases = random.Random(seed), []
    console = terminal()
    with runs_folder(runs_dir) as folder, console.status("") as tell:
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        run_dir = folder / "killed"
        files = ["--cluster", str(LOCAL), "--run", str(RUN_FILE), "--runs-dir", str(folder), "--set", "name=killed"]
        command = [sys.executable, "-m", "streamrl.cli.main", "launch", "--plain", "--steps", str(MANY_STEPS), *files]
        with (folder / "killed.log").open("w") as log:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_for_steps(run_dir, 1, process, LIMIT_S)
            for rate, length in zip(RATES, minutes, strict=True):
                tell.update(f"{100 * rate:g} % of the processes are killed a minute")
                before, began = done_steps(run_dir), time.monotonic()
                killed = kill_for(60 * length, rate, process, draw)
                steps, seconds = done_steps(run_dir) - before, time.monotonic() - began
                step_s = seconds / max(1, steps)
                phases.append({"rate": rate, "seconds": seconds, "killed": killed, "steps": steps, "step_s": step_s})
            wait_for_steps(run_dir, done_steps(run_dir) + 2, process, LIMIT_S)  # what was open at the last kill
        finally:
            process.terminate()
            process.wait(LIMIT_S)
        found = asdict(audit(read_account(run_dir)))
        record: dict[str, Any] = {"machine": machine(), "beside": beside, "phases": phases, "audit": found}
        record["replaced"] = replaced(run_dir)
    for table in (tables := sheets(record)):
        table.show(console)
    write_results(target, record, "Processes of environments are killed", tables)


if __name__ == "__main__":
    main()
