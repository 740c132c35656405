"""Measure how exactly the trainer's head computes what the generator draws from, and its gradient.

    .venv/bin/python experiments/exact_logprobs.py      # a quarter of an hour on two busy cores, most of it vLLM

Two tables. Ratios: a vLLM engine and the trainer's policy have the same weights (SmolLM2-135M, fp32); for each
combination of temperature, top_p, top_k and min_p, log ratios (trainer - generator) of the sampled tokens, which are 0
if both compute the same distribution; beside them those of the full softmax, which a trainer has that knows of the
temperature alone. Gradients: relative errors in bf16 of the head's weight gradient, against fp64 from the same bf16
logits, at rising confidence; beside them torch's autograd, and a softmax that is kept in bf16. Writes
experiments/results/exact_logprobs.json and .md.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from running import OUT_HELP, Sheet, machine, results_folder, terminal, write_results
from transformers import AutoTokenizer

from streamrl.cli.main import error_lines
from streamrl.config.cluster import GenerationPool
from streamrl.config.run import RunConfig
from streamrl.generation.instance.engine import Engine
from streamrl.machine.model_files import resolve_model
from streamrl.rollouts.train_groups import TrainGroup, TrainSequence
from streamrl.rollouts.types import Sample, SampleRequest
from streamrl.training.packing import pack
from streamrl.training.policy_model import load_policy
from streamrl.training.token_logprobs import TokenDistribution, token_logprobs
from streamrl.training.truncation import Truncation

GRID = list(itertools.product((0.7, 1.0, 1.3), (1.0, 0.9, 0.5), (0, 20), (0.0, 0.05)))
"""Temperature, top_p, top_k, min_p."""
PROMPTS = [
    "The three largest cities of the country are",
    "To add two numbers of several digits, first",
    "Once upon a time, in a village by the sea,",
    "def parse(line):\n",
]
MEANS = (0.5, 0.9, 0.99, 0.994, 0.999, 0.9994, 0.9999, 0.99999)
TOKENS, WIDTH, VOCABULARY = 256, 128, 4096
"""Shape of the head in the gradient table."""


def run_of(model: str, tokens: int, setting: tuple[float, float, int, float]) -> RunConfig:
    """A run that samples so."""
    temperature, top_p, top_k, min_p = setting
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "max_tokens": tokens}
    model_keys = {"path": model, "max_context": 256, "dtype": "float32"}
    return RunConfig.model_validate({"model": model_keys, "sampling": sampling})


async def draw(model: str, prompts: list[np.ndarray], tokens: int) -> list[list[Sample]]:
    """Samples of every setting, one for each prompt, from one engine."""
    pool = GenerationPool(max_batch=len(prompts), kv_cache_gb=0.5)
    drawn = []
    with tempfile.TemporaryDirectory() as store:
        engine = Engine(pool, run_of(model, tokens, GRID[0]), cuda=False, instance="i", site="here")
        try:
            await engine.set_up_weights({"directory": store}, 0)
            for number, setting in enumerate(GRID):
                engine.run = run_of(model, tokens, setting)
                asked = [SampleRequest(f"{number}.{n}", "g", p, n, 0.0) for n, p in enumerate(prompts)]
                finished = await asyncio.gather(*(engine.generate(one, "regular") for one in asked))
                drawn.append([one for one in finished if isinstance(one, Sample)])
        finally:
            engine.close()
    return drawn


def ratios(model: str, tokens: int) -> list[dict[str, Any]]:
    """The table of log ratios."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [np.asarray(tokenizer.encode(text), dtype=np.int32) for text in PROMPTS]
    drawn = asyncio.run(draw(model, prompts, tokens))
    policy = load_policy(model)
    rows = []
    for (temperature, top_p, top_k, min_p), samples in zip(GRID, drawn, strict=True):
        batch = pack(
            [
                TrainGroup(str(n), prompt, [TrainSequence(one.completion_tokens, one.logprobs, 0.0)])
                for n, (prompt, one) in enumerate(zip(prompts, samples, strict=True))
            ]
        )
        with torch.no_grad():
            ours = policy(batch, temperature, Truncation(top_k, top_p, min_p))
            full = policy(batch, temperature)
        mismatch = (ours.logprobs - batch.generator_logprobs).abs()
        of_full = (full.logprobs - batch.generator_logprobs).abs()
        rows.append(
            {
                "temperature": temperature,
                "top_p": top_p,
                "top_k": top_k,
                "min_p": min_p,
                "tokens": len(mismatch),
                "largest": float(mismatch.max()),
                "mean": float(mismatch.mean()),
                "outside": int(ours.outside.sum()),
                "full_largest": float(of_full.max()),
                "full_mean": float(of_full.mean()),
            }
        )
    return rows


def confident(mean: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states and weight (bf16), and targets whose mean probability is about that."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator) / WIDTH**0.5
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    direction = weight[targets] + torch.randn(TOKENS, WIDTH, generator=generator) * 0.2 * (8 / WIDTH) ** 0.5
    low, high = 0.0, 60.0
    logits = (direction.bfloat16() @ weight.bfloat16().t()).float()
    for _ in range(20):
        size = (low + high) / 2
        reached = torch.softmax(logits * size, -1).gather(-1, targets[:, None]).mean()
        low, high = (size, high) if reached < mean else (low, size)
    return (direction * size).bfloat16(), weight.bfloat16(), targets


def gradient(mean: float) -> dict[str, float]:
    """A row of the table of gradients: relative errors (norm of the difference over the norm)."""
    hidden, weight, targets = confident(mean)
    upstream = torch.randn(TOKENS, generator=torch.Generator().manual_seed(1))
    rows = torch.arange(TOKENS)
    logits = (hidden @ weight.t()).double()
    softmax = torch.softmax(logits, -1)
    lacking = softmax.scatter(-1, targets[:, None], 0.0).sum(-1)
    exact = -softmax * upstream[:, None]
    exact[rows, targets] = lacking * upstream

    def error(of_weight: torch.Tensor | None) -> float:
        assert of_weight is not None
        return float((of_weight.double() - expected).norm() / expected.norm())

    expected = exact.t() @ hidden.double()
    ours, plain = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    (token_logprobs(hidden, ours, None, targets, TokenDistribution()).logprobs * upstream).sum().backward()
    logprobs = torch.log_softmax((hidden @ plain.t()).float(), -1)[rows, targets]
    (logprobs * upstream).sum().backward()
    in_bf16 = softmax.bfloat16().mul_(-upstream.bfloat16()[:, None])
    in_bf16[rows, targets] += upstream.bfloat16()
    return {
        "mean_p": float(1 - lacking.mean()),
        "ours": error(ours.grad),
        "autograd": error(plain.grad),
        "softmax_in_bf16": error(in_bf16.t() @ hidden),
    }


@click.command()
@click.option("--model", default="smollm2-135m", help="Model of the ratios.")
@click.option("--tokens", default=24, help="Most tokens in a sample.")
@click.option("--out", type=click.Path(path_type=Path), help=OUT_HELP.replace("Where results go", "JSON file"))
def main(model: str, tokens: int, out: Path | None) -> None:
    out = out or results_folder(None, "model", "tokens") / "exact_logprobs.json"
    """Measure both tables."""
    console = terminal()
    gradients = [gradient(mean) for mean in MEANS]
    kinds = ("ours", "autograd", "softmax_in_bf16")
    errors = Sheet(
        "Relative error of the head's weight gradient in bf16",
        ("mean probability of the tokens", "ours", "autograd", "softmax kept in bf16"),
        [[f"{row['mean_p']:.6f}", *(f"{100 * row[kind]:.2f} %" for kind in kinds)] for row in gradients],
        ["Difference to fp64 from the same bf16 logits, norm over norm; 256 tokens, vocabulary 4096."],
    )
    errors.show(console)
    found = ratios(str(resolve_model(model)), tokens)
    settings = ("temperature", "top_p", "top_k", "min_p", "tokens", "outside")
    sizes = {"largest": ".1e", "mean": ".1e", "full_largest": ".2g", "full_mean": ".2g"}
    table = Sheet(
        "Log ratio of trainer and generator with equal weights, nats",
        (*settings, "largest", "mean", "largest, full softmax", "mean, full softmax"),
        [
            [*(f"{row[name]:g}" for name in settings), *(format(row[name], form) for name, form in sizes.items())]
            for row in found
        ],
        [
            "Absolute values; fp32 on both sides. Full softmax: a trainer that knows of the temperature alone.",
            "outside: sampled tokens that the trainer's own truncation would have dropped.",
        ],
    )
    table.show(console)
    record = {"machine": machine(), "model": model, "ratios": found, "gradients": gradients}
    write_results(out, record, "Log ratios with equal weights, and the head's gradient", [table, errors])


if __name__ == "__main__":
    with error_lines():
        main()
