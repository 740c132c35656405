"""Train programs that know nothing but OPENAI_BASE_URL and OPENAI_API_KEY: LangGraph's agent, and the openai package.

    python -m venv examples/agents/.venv                                           # LangGraph's packages
    examples/agents/.venv/bin/pip install -r examples/agents/langgraph_requirements.txt
    .venv/bin/python experiments/agent_programs.py                                 # some minutes on 2 cores

Runs examples/agents/calculator_langgraph.yaml and guess_number_openai.yaml for a few steps each, and reads from the
runs' folders what was trained: episodes, turns, sampled tokens, and how far the trainer's log-probabilities are from
those of the tokens as they were sampled. Writes experiments/results/agent_programs.json and .md.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import pyarrow.parquet as pq
from running import LOCAL, RESULTS, ROOT, Job, Sheet, machine, results_folder, run_job, terminal, write_results

from streamrl.rollouts.ledger import Ledger
from streamrl.run_dir import layout

OUT = RESULTS / "agent_programs.json"
PROGRAMS = {"LangGraph": "calculator_langgraph.yaml", "openai": "guess_number_openai.yaml"}
COLUMNS = ["trajectory_id", "reward", "mask", "conversation", "t_trained"]
LIMIT_S = 1500


def play(run_file: Path, steps: int, folder: Path) -> dict[str, Any]:
    """Run a program's training; return what was trained."""
    job = Job(run_file.stem, LOCAL, run_file, steps)
    outcome = run_job(job, folder, lambda done: None, LIMIT_S)
    if outcome.error:
        raise click.ClickException(outcome.error)
    run_dir = folder / job.name
    rows = [
        row
        for file in sorted((run_dir / layout.ROLLOUTS).glob("step_*.parquet"))
        for row in pq.read_table(file, columns=COLUMNS).to_pylist()
    ]
    trained = [row for row in rows if row["t_trained"] is not None]
    told = [json.loads(row["conversation"]) for row in trained if row["conversation"]]
    calls = [sum(step["kind"] == "generate" for step in one["steps"]) for one in told]
    return {
        "run": run_file.name,
        "steps": len(outcome.rows),
        "episodes": len({row["trajectory_id"] for row in trained}),
        "once": len(Ledger(run_dir / layout.LEDGER).trained_ids()),
        "void": len({row["trajectory_id"] for row in rows if row["reward"] is None}),
        "rows": len(trained),
        "turns": statistics.mean(calls),
        "tokens": sum(sum(row["mask"]) for row in trained),
        "rewards": [row.reward_mean for row in outcome.rows],
        "gradients": [row.grad_norm for row in outcome.rows],
        "gap": max(row.logprob_gap_mean or 0.0 for row in outcome.rows),
    }


@click.command(help=__doc__)
@click.option("--steps", default=3, show_default=True, type=click.IntRange(1))
def main(steps: int) -> None:
    target = results_folder(None, "steps") / OUT.name
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # the example calls `python`
    with tempfile.TemporaryDirectory() as folder:
        found = {
            name: play(ROOT / "examples" / "agents" / run_file, steps, Path(folder))
            for name, run_file in PROGRAMS.items()
        }
    rows = [
        [
            name,
            str(one["steps"]),
            str(one["episodes"]),
            str(one["void"]),
            f"{one['turns']:.2f}",
            str(one["rows"]),
            str(one["tokens"]),
            ", ".join(f"{reward:.2f}" for reward in one["rewards"]),
            ", ".join(f"{norm:.2g}" for norm in one["gradients"]),
            f"{one['gap']:.1e}",
        ]
        for name, one in found.items()
    ]
    heads = (
        "program",
        "steps",
        "episodes",
        "void",
        "turns",
        "rows",
        "tokens",
        "rewards",
        "norms of gradients",
        "mismatch",
    )
    notes = ["SmolLM2-135M; mismatch: mean difference of log-probabilities, trainer's from engine's, of the worst step"]
    sheet = Sheet("Programs that were trained unchanged", heads, rows, notes)
    sheet.show(terminal())
    write_results(target, {"machine": machine(), "programs": found}, "Agents that are programs", [sheet])


if __name__ == "__main__":
    main()
