"""Measure how much of a simulator's time is hidden behind generation: in processes of its own, and inside the agent's.

    streamrl env add walker "gymnasium[mujoco]" --make walker:make --path examples/environments
    .venv/bin/python experiments/simulator_overlap.py      # some 6 minutes on 2 cores

MuJoCo's walker, driven by the small reasoner: 32 episodes of 6 turns in each step of a `sync` run. One core generates,
the other one steps. The same episodes are played with the simulator in an environment's process; in the agent's own
process; and there in lockstep, where all episodes wait for each other before they step, as in loops over a batch. Runs
take turns. What is hidden is counted from the times of all turns and steps that the rollouts have. Writes
simulator_overlap.json and .md in experiments/results/.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import click
import pyarrow.parquet as pq
from running import HERE, RESULTS, Job, Sheet, machine, results_folder, run_job, runs_folder, terminal, write_results

from streamrl.controller.environment_time import environment_time
from streamrl.rollouts.trajectory import EpisodeStep
from streamrl.run_dir import layout

OUT = RESULTS / "simulator_overlap.json"
RUN_FILE, CLUSTER = HERE / "runs" / "simulator.yaml", HERE / "clusters" / "simulator.yaml"
TASK = {"kind": "agent", "name": "walker", "max_turns": 6}
INSIDE = {**TASK, "run": "experiments.simulator_agent:run", "items": "experiments.simulator_agent:item"}
LOCKSTEP = {**INSIDE, "run": "experiments.simulator_agent:run_in_lockstep"}
WAYS: dict[str, tuple[str, ...]] = {
    "a process of the environment": (),
    "inside the agent's process": (f"tasks={json.dumps([INSIDE])}",),
    "the same, all in lockstep": (f"tasks={json.dumps([LOCKSTEP])}",),
}
"""Overrides of the run file."""
WARM = 1
"""Steps at the start of a run that are not counted."""
LIMIT_S = 900.0


def read(run_dir: Path, step: int) -> dict[str, float]:
    """Return the seconds of a step's turns and of its simulators, from the times of its episodes."""
    table = pq.read_table(run_dir / layout.ROLLOUTS / f"step_{step:06d}.parquet", columns=["conversation"])
    told = [json.loads(text)["steps"] for text in table.column("conversation").to_pylist() if text]
    # a tool is what the simulator is to an agent that steps it itself
    episodes = [
        [EpisodeStep(**{**one, "kind": one["kind"].replace("tool", "environment")}) for one in steps] for steps in told
    ]
    steps = [one for each in episodes for one in each]
    found = environment_time(episodes)
    assert found is not None and found.hidden_fraction is not None
    ends = [(one.started, one.finished) for one in steps if one.kind != "agent"]
    return {
        "seconds": max(end for _, end in ends) - min(start for start, _ in ends),
        "stepped_s": found.stepped_s,
        "busy_s": found.busy_s,
        "hidden_s": found.hidden_s,
        "generated_s": found.generated_s,
        "turns": float(sum(one.kind == "generate" for one in steps)),
        "tokens": float(sum(one.tokens for one in steps)),
    }


def sheets(record: dict[str, Any]) -> list[Sheet]:
    """Return the table."""
    rows = []
    for way in WAYS:
        steps = [step for run in record["runs"] if run["way"] == way for step in run["steps"]]
        total = {name: sum(step[name] for step in steps) for name in steps[0]}
        rows.append(
            [
                way,
                str(len(steps)),
                f"{statistics.median(step['seconds'] for step in steps):.2f}",
                f"{total['stepped_s'] / len(steps):.2f}",
                f"{total['generated_s'] / len(steps):.2f}",
                f"{100 * total['hidden_s'] / total['busy_s']:.1f} %",
                f"{total['tokens'] / total['seconds']:.0f}",
            ]
        )
    head = (
        "simulator in",
        "steps",
        "s of a step's episodes",
        "simulated",
        "generated",
        "hidden",
        "tokens/s",
    )
    notes = [
        "s of a step's episodes: median, from the first reset to the last turn or step; the rest are means per step",
        "with 32 episodes at once turns of others are generated wherever one steps; a process apart adds cores",
        "hidden: share of the time in which a simulator stepped, in which at least one turn was generated as well",
        *[record["beside"]] * bool(record["beside"]),
    ]
    return [Sheet("MuJoCo's Walker2d-v5, 32 episodes of 6 turns per step", head, rows, notes)]


@click.command(help=__doc__)
@click.option("--rounds", default=2, show_default=True, type=click.IntRange(1), help="runs of each way, in turns")
@click.option("--steps", default=4, show_default=True, type=click.IntRange(WARM + 1))
@click.option("--runs-dir", type=click.Path(path_type=Path), help="where the runs are kept")
@click.option("--beside", default="", help="a remark about the machine, for the table")
def main(rounds: int, steps: int, runs_dir: Path | None, beside: str) -> None:
    target = results_folder(None, "rounds", "steps") / OUT.name
    console, runs = terminal(), []
    with runs_folder(runs_dir) as folder, console.status("") as tell:
        for number in range(rounds):
            for place, (way, overrides) in enumerate(WAYS.items()):
                job = Job(f"round-{number}-{place}", CLUSTER, RUN_FILE, steps, overrides)
                tell.update(f"round {number + 1} of {rounds}: {way}")
                if error := (outcome := run_job(job, folder, lambda done: None, LIMIT_S)).error:
                    raise SystemExit(f"{way}: {error}")
                found = [read(folder / job.name, step) for step in range(1 + WARM, steps + 1)]
                runs.append({"way": way, "round": number, "seconds": outcome.seconds, "steps": found})
    record = {"machine": machine(), "beside": beside, "runs": runs}
    for table in (tables := sheets(record)):
        table.show(console)
    write_results(target, record, "A simulator behind generation", tables)


if __name__ == "__main__":
    main()
