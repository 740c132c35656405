"""Measure how far trainer and engine are apart in fp32 over the six turns of an episode, token by token.

    .venv/bin/python experiments/agent_logprobs.py                  # some minutes on 2 cores

SmolLM2-135M plays episodes of six turns (agent_logprobs_task.py) in a run of one step, whose engine computes in fp32
and keeps the log-probability of each token that it sampled. Then the trainer's policy, with the same weights, computes
them for the rows that the run has kept: once a row, with all its turns. Answers end with their first sentence, so that
they are not cut: a cut one would end its row. Writes experiments/results/agent_logprobs.json and .md.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow.parquet as pq
import torch
from agent_logprobs_task import TURNS
from running import LOCAL, RESULTS, Job, Sheet, machine, results_folder, run_job, terminal, write_results

from streamrl.cli.main import error_lines
from streamrl.machine.model_files import resolve_model
from streamrl.rollouts.train_groups import TrainGroup, TrainSequence
from streamrl.run_dir import layout
from streamrl.training.packing import pack
from streamrl.training.policy_model import load_policy

OUT = RESULTS / "agent_logprobs.json"
COLUMNS = ["prompt_tokens", "completion_tokens", "logprobs", "mask"]
LIMIT_S = 900
AIM = 1e-5
"""Nats."""


def run_config(prompts: int, samples: int) -> dict[str, Any]:
    """Return the run file."""
    functions = {"run": "experiments.agent_logprobs_task:run", "items": "experiments.agent_logprobs_task:item"}
    return {
        "name": "agent-logprobs",
        "steps": 1,
        "seed": 0,
        "model": {"path": "smollm2-135m", "max_context": 1024, "dtype": "float32"},
        "tasks": [
            {"kind": "agent", "name": "sentences", "max_turns": TURNS, "deadlines": {"episode_s": 600}} | functions
        ],
        "batch": {"prompts_per_step": prompts, "samples_per_prompt": samples, "micro_batch_tokens": 2048},
        "sampling": {"max_tokens": 96, "temperature": 1.0, "stop": ["."]},
        "schedule": {"name": "sync"},
    }


def play(prompts: int, samples: int) -> list[dict[str, Any]]:
    """Run one step; return the rows that it kept."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.yaml").write_text(json.dumps(run_config(prompts, samples)))
        job = Job("agent-logprobs", LOCAL, folder / "run.yaml", 1)
        outcome = run_job(job, folder, lambda done: None, LIMIT_S)
        if outcome.error:
            raise click.ClickException(outcome.error)
        files = sorted((folder / job.name / layout.ROLLOUTS).glob("step_*.parquet"))
        return [row for file in files for row in pq.read_table(file, columns=COLUMNS).to_pylist()]


def turns_of(mask: np.ndarray) -> np.ndarray:
    """Return the number of the turn, from 1, that each sampled token of a row belongs to; shape [sampled]."""
    begins = mask & ~np.concatenate([[False], mask[:-1]])
    return np.cumsum(begins)[mask]


def mismatches(rows: list[dict[str, Any]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (absolute difference in nats, turn) of the sampled tokens of each row; shapes [sampled]."""
    policy = load_policy(str(resolve_model("smollm2-135m")))
    found = []
    for row in rows:
        tokens, logprobs = np.asarray(row["completion_tokens"], np.int32), np.asarray(row["logprobs"], np.float32)
        mask = np.asarray(row["mask"], bool)
        sequence = TrainSequence(tokens, logprobs, 0.0, mask=mask)
        batch = pack([TrainGroup("row", np.asarray(row["prompt_tokens"], np.int32), [sequence])])
        with torch.no_grad():
            mismatch = (policy(batch, 1.0).logprobs - batch.generator_logprobs).abs().numpy()
        found.append((mismatch if len(mismatch) == mask.sum() else mismatch[mask], turns_of(mask)))
    return found


def row_of(name: str, mismatch: np.ndarray) -> list[str]:
    """Return a row of the table."""
    figures = [mismatch.mean(), *np.quantile(mismatch, (0.5, 0.99)), mismatch.max()]
    return [name, f"{len(mismatch):,}", *(f"{one:.1e}" for one in figures), f"{100 * (mismatch > AIM).mean():.0f} %"]


@click.command(help=__doc__)
@click.option("--prompts", default=6, show_default=True, type=click.IntRange(1))
@click.option("--samples", default=4, show_default=True, type=click.IntRange(2))
def main(prompts: int, samples: int) -> None:
    target = results_folder(None, "prompts", "samples") / OUT.name
    rows = play(prompts, samples)
    found = mismatches(rows)
    mismatch, turn = (np.concatenate([one[part] for one in found]) for part in (0, 1))
    longest = max(len(row["prompt_tokens"]) + len(row["completion_tokens"]) for row in rows)
    heads = ("turn of the row", "tokens", "mean", "median", "99 %", "largest", f"above {AIM:g}")
    lines = [row_of(str(one), mismatch[turn == one]) for one in sorted(set(turn.tolist()))]
    sheet = Sheet(
        "Log-probabilities of trainer and engine, fp32: absolute difference in nats",
        heads,
        [*lines, row_of("all", mismatch)],
        [
            f"SmolLM2-135M, {prompts * samples} episodes of {TURNS} turns in {len(rows)} rows of at most {longest}"
            " tokens"
        ],
    )
    sheet.show(terminal())
    record = {
        "machine": machine(),
        "episodes": prompts * samples,
        "rows": len(rows),
        "tokens": len(mismatch),
        "longest": longest,
        "mean": float(mismatch.mean()),
        "p99": float(np.quantile(mismatch, 0.99)),
        "largest": float(mismatch.max()),
        "above": float((mismatch > AIM).mean()),
        "by_turn": {int(one): float(mismatch[turn == one].mean()) for one in sorted(set(turn.tolist()))},
    }
    write_results(target, record, "Exactness over the turns of an episode", [sheet])


if __name__ == "__main__":
    with error_lines():
        main()
