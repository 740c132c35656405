"""Evaluate the small reasoner in vLLM: scores and lengths by task, difficulty and number of checks.

.venv/bin/python experiments/small_reasoner/evaluate.py      # writes evaluation.json beside this file
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import numpy as np
from reasoning_gym.utils import extract_answer
from rich.console import Console
from rich.table import Table
from solutions import CHECK, PLAN, TASKS, dataset, difficulty

HERE = Path(__file__).resolve().parent


def checks_of(text: str) -> str:
    """How often a completion checks its work."""
    return str(text.count(CHECK)) if text.startswith(PLAN) else "other"


def lengths(rows: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Quantiles of completion length, in tokens with the end token."""
    values = [row["tokens"] for row in rows]
    return {f"p{q}": int(np.percentile(values, q)) for q in (50, 90, 95, 99)} | {"max": max(values)}


def grouped(rows: list[dict[str, Any]], key: str) -> dict[str, list[dict[str, Any]]]:
    """Rows by the value of ``key``, in order of that value."""
    found: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        found[row[key]].append(row)
    return {str(name): found[name] for name in sorted(found)}


def mean(rows: Iterable[dict[str, Any]], key: str) -> float:
    """Mean of ``key`` over rows, rounded to 3 decimals."""
    return round(float(np.mean([row[key] for row in rows])), 3)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Score, share of tagged and of ended completions, lengths and checks of some completions."""
    checks = {
        name: {
            "share": round(len(part) / len(rows), 3),
            "score": mean(part, "score"),
            "length": lengths(part),
        }
        for name, part in grouped(rows, "checks").items()
    }
    return {
        "samples": len(rows),
        "score": mean(rows, "score"),
        "score_if_tagged": mean([r for r in rows if r["tagged"]] or rows, "score"),
        "tagged": mean(rows, "tagged"),
        "ended": mean(rows, "ended"),
        "length": lengths(rows),
        "checks": checks,
    }


def report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summary over all rows, by task, and by difficulty within a task."""
    tasks: dict[str, Any] = {}
    for task, part in grouped(rows, "task").items():
        tasks[task] = summary(part)
        tasks[task]["by_difficulty"] = {
            level: {"score": mean(some, "score"), "samples": len(some), "length": lengths(some)}
            for level, some in grouped(part, "difficulty").items()
        }
    return {"all": summary(rows), "tasks": tasks}


def show(name: str, found: dict[str, Any]) -> None:
    """A table of scores and lengths by task."""
    table = Table("task", "score", "tagged", "ended", "p50", "p90", "p99", "right if tagged", title=name)
    for task, part in [("all", found["all"]), *found["tasks"].items()]:
        size = part["length"]
        right = part["score_if_tagged"]
        cells = (part["score"], part["tagged"], part["ended"], size["p50"], size["p90"], size["p99"], right)
        table.add_row(task, *map(str, cells))
    Console().print(table)


@click.command()
@click.option("--model", type=click.Path(path_type=Path, exists=True), default=HERE / "model")
@click.option("--out", type=click.Path(path_type=Path), default=HERE / "evaluation.json")
@click.option("--prompts", default=80, help="Prompts for each task.")
@click.option("--samples", default=4, help="Samples for each prompt at temperature 1.")
@click.option("--seed", default=500_000_000, help="First reasoning-gym seed (train.py uses 10^9 and above).")
@click.option("--threads", default=2, help="CPU threads of vLLM.")
def main(model: Path, out: Path, prompts: int, samples: int, seed: int, threads: int) -> None:
    """Sample the model in vLLM at temperature 1 and greedily, score it with reasoning-gym."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams  # after its environment is set
    from vllm.renderers.chat_utils import ChatCompletionMessageParam

    llm = LLM(str(model), dtype="bfloat16", enforce_eager=True, max_model_len=1024, max_num_seqs=128, seed=0)
    sets = {task: dataset(task, seed, prompts) for task in TASKS}
    asked = [(task, sets[task][index]) for task in TASKS for index in range(prompts)]
    chats: list[list[ChatCompletionMessageParam]]
    chats = [[{"role": "user", "content": entry["question"]}] for _, entry in asked]

    def sample(temperature: float, n: int) -> list[dict[str, Any]]:
        """One row for every completion of every prompt."""
        settings = SamplingParams(temperature=temperature, n=n, max_tokens=1024)
        rows = []
        for (task, entry), result in zip(asked, llm.chat(chats, settings), strict=True):
            for completion in result.outputs:
                answer = extract_answer(completion.text)
                rows.append(
                    {
                        "task": task,
                        "difficulty": difficulty(task, entry["metadata"]),
                        "checks": checks_of(completion.text),
                        "score": float(sets[task].score_answer(answer, entry)),
                        "tagged": answer is not None,
                        "ended": completion.finish_reason == "stop",
                        "tokens": len(completion.token_ids),
                    }
                )
        return rows

    found = {"temperature 1": report(sample(1.0, samples)), "greedy": report(sample(0.0, 1))}
    for name, part in found.items():
        show(name, part)
    out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
