"""Measure the trainer's cost of a conversation of several turns as one row, against a row for every turn.

    .venv/bin/python experiments/agent_rows.py                  # SmolLM2-135M in fp32, 8 turns: 5 minutes on 2 cores
    .venv/bin/python experiments/agent_rows.py --summary-only   # the table from the JSON again

One episode: a question, and turns of a sampled answer and a tool's result (the last turn has no result). Its sampled
tokens are trained in three ways, by turns: `one row`, as an agent that only appends gets; `rows with a shared prompt`,
as an agent gets whose turns each begin a row (the packed row computes the question once for all of them); `rows`, each
with its whole prompt, as a trainer computes them that takes a conversation for as many samples. The loss is the same
sum over the same sampled tokens, so the gradients are the same up to rounding: the largest difference is in the table.
Each way is warmed up once, on a shorter conversation. Writes experiments/results/agent_rows.json and .md.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
import torch
from running import RESULTS, Sheet, machine, read_record, results_folder, terminal, write_results

from streamrl.cli.main import error_lines
from streamrl.machine.model_files import resolve_model
from streamrl.rollouts.train_groups import TrainGroup, TrainSequence
from streamrl.rollouts.types import IntArray
from streamrl.training.attention import SHARED_PREFIX
from streamrl.training.packing import PackedBatch, pack
from streamrl.training.policy_model import Policy, load_policy

OUT = RESULTS / "agent_rows.json"
ADVANTAGE = 0.7
SIZES = ("turns", "question", "answer", "result", "threads", "repeats")
"""Parameters of a measurement that its record keeps."""


@dataclass(frozen=True)
class Conversation:
    """The tokens of one episode."""

    question: IntArray
    answers: list[IntArray]
    results: list[IntArray]
    """What a tool said after each answer but the last."""

    def row(self, turns: int) -> tuple[IntArray, np.ndarray]:
        """Return the tokens behind the question in the first turns, [C], and which of them were sampled, [C]."""
        parts = [(self.answers[0], True)]
        for answer, result in zip(self.answers[1:turns], self.results, strict=False):
            parts += [(result, False), (answer, True)]
        tokens = np.concatenate([part for part, _ in parts])
        return tokens, np.concatenate([np.full(len(part), sampled) for part, sampled in parts])


def conversation(turns: int, question: int, answer: int, result: int, vocabulary: int, seed: int = 0) -> Conversation:
    """Draw a conversation whose parts have these numbers of tokens."""
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> IntArray:
        return rng.integers(10, vocabulary, count).astype(np.int32)

    return Conversation(
        tokens(question), [tokens(answer) for _ in range(turns)], [tokens(result) for _ in range(turns - 1)]
    )


def _sequence(tokens: IntArray, mask: np.ndarray) -> TrainSequence:
    return TrainSequence(tokens, np.zeros(len(tokens), np.float32), ADVANTAGE, mask=mask)


def one_row(said: Conversation) -> list[TrainGroup]:
    """Train all turns in the conversation's last state."""
    return [TrainGroup("episode", said.question, [_sequence(*said.row(len(said.answers)))])]


def _turns(said: Conversation) -> list[tuple[IntArray, int]]:
    rows = [said.row(turns)[0] for turns in range(1, len(said.answers) + 1)]
    return [(row, len(row) - len(answer)) for row, answer in zip(rows, said.answers, strict=True)]


def shared_prompt(said: Conversation) -> list[TrainGroup]:
    """Train each turn in a row of its own; the rows share the question."""
    rows = [_sequence(row, np.arange(len(row)) >= begin) for row, begin in _turns(said)]
    return [TrainGroup("episode", said.question, rows)]


def whole_rows(said: Conversation) -> list[TrainGroup]:
    """Train each turn in a row of its own, with its whole prompt."""
    return [
        TrainGroup(
            f"turn-{number}",
            np.concatenate([said.question, row[:begin]]),
            [_sequence(row[begin:], np.ones(len(row) - begin, bool))],
        )
        for number, (row, begin) in enumerate(_turns(said))
    ]


WAYS: dict[str, Callable[[Conversation], list[TrainGroup]]] = {
    "one row": one_row,
    "rows with a shared prompt": shared_prompt,
    "rows": whole_rows,
}


def learn(policy: Policy, batch: PackedBatch) -> tuple[float, float]:
    """Run forward and backward passes of a policy gradient's sum; return their seconds, and those of CPU time."""
    policy.zero_grad(set_to_none=True)
    began, used = time.perf_counter(), time.process_time()
    logprobs = policy(batch, 1.0).logprobs
    (-(logprobs * batch.advantages).sum()).backward()
    return time.perf_counter() - began, time.process_time() - used


def measure(policy: Policy, said: Conversation, repeats: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Train a conversation in every way, by turns."""
    batches = {name: pack(way(said)) for name, way in WAYS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    cpu: dict[str, list[float]] = {name: [] for name in WAYS}
    gradients: dict[str, torch.Tensor] = {}
    for repeat in range(repeats):
        for name, batch in batches.items():
            wall, used = learn(policy, batch)
            seconds[name].append(wall)
            cpu[name].append(used)
            progress(f"{repeat + 1}/{repeats} {name}: {wall:.1f} s, {used:.1f} s of CPU time")
            if repeat == 0:
                gradients[name] = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    base = gradients["one row"]
    return {
        name: {
            "tokens": batch.row_tokens(separate=False),
            "trained_tokens": batch.loss_tokens,
            "seconds": seconds[name],
            "cpu_seconds": cpu[name],
            "gradient_difference": float((gradients[name] - base).norm() / base.norm()),
        }
        for name, batch in batches.items()
    }


def sheet(record: dict[str, Any]) -> Sheet:
    """Return the table."""
    ways = record["ways"]
    base = ways["one row"]
    cost = statistics.median(base["cpu_seconds"])
    rows = [
        [
            name,
            str(found["tokens"]),
            str(found["trained_tokens"]),
            f"{statistics.median(found['cpu_seconds']):.2f}",
            f"{statistics.median(found['seconds']):.2f}",
            f"{found['tokens'] / base['tokens']:.2f}",
            f"{statistics.median(found['cpu_seconds']) / cost:.2f}",
            f"{found['gradient_difference']:.1e}",
        ]
        for name, found in ways.items()
    ]
    columns = ("way", "tokens computed", "trained", "CPU s", "s", "tokens, times", "CPU time, times")
    return Sheet(
        f"{record['turns']} turns of {record['model']}, {record['repeats']} times each",
        (*columns, "gradient differs by"),
        rows,
        [
            f"a question of {record['question']} tokens, answers of {record['answer']}, results of {record['result']}; "
            f"forward and backward pass in fp32, torch with {record['threads']} thread(s), no optimizer step; medians",
            "gradient differs by: norm of the difference from one row's over its norm",
            f"load of the machine before and after (1 is one busy core): {record['load']}",
        ],
    )


@click.command(help=__doc__)
@click.option("--turns", default=8, show_default=True, type=click.IntRange(2))
@click.option("--question", default=128, show_default=True, help="tokens")
@click.option("--answer", default=32, show_default=True, help="tokens")
@click.option("--result", default=48, show_default=True, help="tokens")
@click.option("--threads", default=os.cpu_count() or 1, help="of torch; 1 where other work runs beside")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1))
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--summary-only", is_flag=True, help="measure nothing: the table from the JSON")
def main(
    turns: int, question: int, answer: int, result: int, threads: int, repeats: int, model: str, summary_only: bool
) -> None:
    console, target = terminal(), results_folder(None, *SIZES, "model") / OUT.name
    if summary_only:
        record = read_record(target, "machine", "model", "load", "ways", *SIZES)
    else:
        torch.set_num_threads(threads)
        load = os.getloadavg()[0]
        policy = load_policy(resolve_model(model), attention=SHARED_PREFIX)
        vocabulary = policy.model.config.vocab_size
        for way in WAYS.values():
            learn(policy, pack(way(conversation(2, 16, 8, 8, vocabulary))))
        said = conversation(turns, question, answer, result, vocabulary)
        ways = measure(policy, said, repeats, lambda text: console.print(f"  {text}", highlight=False))
        sizes = dict(zip(SIZES, (turns, question, answer, result, threads, repeats), strict=True))
        loads = f"{load:.1f}, {os.getloadavg()[0]:.1f}"
        record = {"machine": machine(), "model": model, "load": loads, **sizes, "ways": ways}
    table = sheet(record)
    table.show(console)
    write_results(target, record, "A conversation as one row", [table])


if __name__ == "__main__":
    with error_lines():
        main()
