"""Measure how much of a simulator's time is hidden behind generation, in processes of its own and inside the agent.

    streamrl env add walker "gymnasium[mujoco]" --make walker:make --path examples/environments
    .venv/bin/python experiments/environment_overlap.py                     # some minutes on 2 cores
    .venv/bin/python experiments/environment_overlap.py --summary-only

SmolLM2-135M drives the MuJoCo walker of examples/environments/walker.py: the same model, items, seeds and turns, once
with the environment's processes, once with an agent that steps the simulator itself, in the process and event loop in
which it runs. The shares come from the steps of the episodes in the rollouts. Writes environment_overlap.json and .md
in experiments/results/.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pyarrow.parquet as pq
import yaml
from running import HERE, ROOT, Sheet, machine, terminal, write_results

from streamrl.controller.environment_time import environment_time
from streamrl.environments.installed import InstalledEnvironment, find_environment
from streamrl.rollouts.trajectory import EpisodeStep
from streamrl.run_dir import layout
from streamrl.run_dir.metrics import read_metrics

OUT = HERE / "results" / "environment_overlap.json"
CLUSTER = ROOT / "cluster_configs" / "local.yaml"
TURNS = 5
WAYS = {"processes": "in 2 processes of its own", "agent": "inside the agent's process"}
AGENT = '''
import sys

sys.path += PATHS  # behind the packages of streamrl
import walker

FREE = []

def items(index, seed):
    return {"prompt": f"walker {index}", "seed": seed}

async def run(task, client):
    """Play as the environment's player does, but step here."""
    env = FREE.pop() if FREE else walker.make({"hold": HOLD})

    async def reset(): return env.reset(task)
    async def step(text): return env.step(text)

    messages, reward = [{"role": "user", "content": await client.tool("reset", reset)}], 0.0
    for _ in range(TURNS):
        messages.append(await client.chat(messages))
        said, gained, _, _ = await client.tool("step", step, messages[-1]["content"])
        reward += gained
        messages.append({"role": "user", "content": said})
    FREE.append(env)
    return reward
'''


def launch(way: str, installed: InstalledEnvironment, folder: Path, steps: int, hold: int) -> None:
    """Run one way to its end."""
    folder.mkdir(parents=True, exist_ok=True)
    task: dict[str, Any] = {"kind": "agent", "name": "walker", "max_turns": TURNS}
    if way == "processes":
        task["environment"] = {"name": str(installed.folder), "config": {"hold": hold}}
    else:
        packages = next((installed.python.parent.parent / "lib").glob("python*/site-packages"))
        paths = repr([str(ROOT / "examples" / "environments"), str(packages)])
        code = AGENT.replace("HOLD", str(hold)).replace("TURNS", str(TURNS)).replace("PATHS", paths)
        (folder / "driver.py").write_text(code)
        task |= {"run": "driver:run", "items": "driver:items", "deadlines": {"tool_s": 300}}
    run = {
        **{"name": way, "seed": 0, "steps": steps, "model": {"path": "smollm2-135m", "max_context": 512}},
        **{"tasks": [task], "schedule": {"name": "stream"}, "sampling": {"max_tokens": 12}},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 8, "micro_batch_tokens": 2048},
        "optimizer": {"lr": 1.0e-6},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    command = [sys.executable, "-m", "streamrl.cli.main", "launch", "--plain", "--cluster", str(CLUSTER)]
    command += ["--run", "run.yaml", "--runs-dir", str(folder)]
    subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)


def read(run_dir: Path) -> dict[str, Any]:
    """Return the figures of a run's steps after the first, in which the engine warms up."""
    found = []
    for row in read_metrics(run_dir / layout.METRICS):
        table = pq.read_table(run_dir / layout.ROLLOUTS / f"step_{row.step:06d}.parquet", columns=["conversation"])
        steps = []
        for text in table.column("conversation").to_pylist():
            for one in json.loads(text)["steps"] if text else ():
                kind = "environment" if one["kind"] == "tool" else one["kind"]
                steps.append(EpisodeStep(kind, one["name"], one["started"], one["finished"]))
        time = environment_time(steps)
        assert time is not None
        found.append(
            {
                **{"step": row.step, "seconds": row.step_time_s, "stepped_s": time.stepped_s, "busy_s": time.busy_s},
                **{"hidden_s": time.hidden_s, "generated_s": time.generated_s, "reward": row.reward_mean},
            }
        )
    return {"steps": found}


def sheets(record: dict[str, Any]) -> list[Sheet]:
    """Return the table."""
    rows = []
    for way, told in record["ways"].items():
        later = [one for one in told["steps"] if one["step"] > 1]
        mean = {name: statistics.mean(one[name] for one in later) for name in later[0]}
        hidden = sum(one["hidden_s"] for one in later) / sum(one["busy_s"] for one in later)
        rows.append(
            [
                WAYS[way],
                *(f"{mean[name]:.1f}" for name in ("seconds", "busy_s", "generated_s")),
                f"{100 * hidden:.0f} %",
            ]
        )
    head = ("the simulator steps", "s per step", "of these, some episode steps it", "some turn is generated", "hidden")
    notes = [
        f"32 episodes of {TURNS} turns per step, {record['hold']} simulator steps per turn; steps after the first",
        "hidden: share of the time in which the simulator stepped, in which a turn was generated as well",
    ]
    notes += [record["beside"]] if record["beside"] else []
    return [Sheet("A MuJoCo walker beside generation", head, rows, notes)]


@click.command(help=__doc__)
@click.option("--steps", default=4, show_default=True, type=click.IntRange(2))
@click.option("--hold", default=100, show_default=True, help="simulator steps of a turn")
@click.option("--folder", type=click.Path(path_type=Path), default=ROOT / "runs" / "environment-overlap")
@click.option("--beside", default="", help="a remark about the machine, for the table")
@click.option("--summary-only", is_flag=True, help="run nothing")
def main(steps: int, hold: int, folder: Path, beside: str, summary_only: bool) -> None:
    if not summary_only:
        for way in WAYS:
            launch(way, find_environment("walker"), folder.absolute(), steps, hold)
    ways = {way: read(folder / way) for way in WAYS}
    record = {"machine": machine(), "hold": hold, "beside": beside, "ways": ways}
    for table in (tables := sheets(record)):
        table.show(terminal())
    write_results(OUT, record, "Environments beside generation", tables)


if __name__ == "__main__":
    main()
