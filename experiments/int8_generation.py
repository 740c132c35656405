"""Compare generation in 8 bits with bf16: step times, and how far sampled tokens are from the trainer's distribution.

    .venv/bin/python experiments/int8_generation.py     # some 6 minutes on 2 cores; needs AVX-512 with VNNI

Speed: two engines of the same model, `generation.compute: int8` and `same` (bf16), one thread each, are timed in turns:
decode steps of 1, 8 and 64 requests. The models are SmolLM2-135M and a Llama of 1.5 B random parameters.

Mismatch: both engines of SmolLM2 sample the same prompts, and the trainer's policy computes the log-probabilities of
the sampled tokens from the same bf16 weights, in fp32. With r the ratio of the trainer's probability to the engine's,

    E|r - 1| / 2            is the total variation distance of the two distributions, and
    E(r - c)+ / 2           what is left of it where samples are weighted by min(r, c), truncated importance sampling,

both over the engine's samples. Writes experiments/results/int8_generation.json and .md.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import click
import numpy as np
import torch
from running import RESULTS, Sheet, machine, results_folder, terminal, write_results
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from streamrl.cli.main import error_lines
from streamrl.config.cluster import GenerationPool
from streamrl.config.run import RunConfig
from streamrl.generation.instance.calibration import Stopwatch
from streamrl.generation.instance.eight_bit_probe import probe_products
from streamrl.generation.instance.eight_bits import WORTH, choose_here, with_computation
from streamrl.generation.instance.engine import Engine
from streamrl.generation.instance.step_trials import ONE_TOKEN, TimingTrial
from streamrl.machine.model_files import resolve_model
from streamrl.rollouts.train_groups import TrainGroup, TrainSequence
from streamrl.rollouts.types import Sample, SampleRequest
from streamrl.training.packing import pack
from streamrl.training.policy_model import load_policy

OUT = RESULTS / "int8_generation.json"
KINDS = ("same", "int8")
BATCHES = (1, 8, 64)
FEW, MANY = 2, 18
"""Tokens of the two runs of a pair; their difference is decode steps."""
CLIP = 2.0
"""c of the truncated weights."""
PROMPTS = (
    "The three largest cities of the country are",
    "To add two numbers of several digits, first",
    "Once upon a time, in a village by the sea,",
    "def parse(line):\n",
    "My grandmother's recipe for bread is simple:",
    "The difference between weather and climate is",
)
TOKENS = 48


def large_model(folder: Path, small: Path) -> Path:
    """Write a Llama of 1.5 B random parameters with the tokenizer of the small model."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    config = LlamaConfig(**sizes, **heads, vocab_size=49152, tie_word_embeddings=True)
    torch.set_default_dtype(torch.bfloat16)
    try:
        LlamaForCausalLM(config).save_pretrained(folder)
    finally:
        torch.set_default_dtype(torch.float32)
    for file in small.glob("*token*"):
        shutil.copy(file, folder / file.name)
    return folder


def engine_of(model: Path, kind: str) -> Engine:
    """Start an engine."""
    run = RunConfig.model_validate(
        {
            "model": {"path": str(model), "max_context": 256, "dtype": "bfloat16"},
            "sampling": {"max_tokens": TOKENS},
            "generation": {"compute": kind},
            "algorithm": {
                "name": "grpo",
                "off_policy": {"ratio_to": "proximal", "correction": "truncate", "high": CLIP},
            },
        }
    )
    pool = GenerationPool(max_batch=max(BATCHES), kv_cache_gb=0.5)
    return Engine(pool, with_computation(run, choose_here(run, False, 1)), False, kind, "here")


async def times(engines: dict[str, Engine], repeats: int) -> list[dict[str, float]]:
    """Return the seconds of a decode step by batch and kind, medians of repeats in turns."""
    watches = {kind: Stopwatch(engine) for kind, engine in engines.items()}
    found: list[dict[str, float]] = []
    for batch in BATCHES:
        taken: dict[str, list[float]] = {kind: [] for kind in engines}
        for number in range(repeats + 1):  # the first one prepares kernels
            for kind in KINDS if number % 2 else KINDS[::-1]:
                few, many = [await watches[kind].trial(TimingTrial(batch, ONE_TOKEN, each)) for each in (FEW, MANY)]
                if number:
                    taken[kind].append((many - few) / (MANY - FEW))
        found.append({"batch": batch} | {kind: statistics.median(each) for kind, each in taken.items()})
    return found


async def sampled(engine: Engine, prompts: list[np.ndarray], each: int) -> list[tuple[np.ndarray, Sample]]:
    """Return (prompt, sample) of every prompt, `each` times."""
    asked = [
        SampleRequest(f"{number}.{turn}", "g", prompt, 100 * number + turn, 0.0)
        for number, prompt in enumerate(prompts)
        for turn in range(each)
    ]
    drawn = await asyncio.gather(*(engine.generate(one, "regular") for one in asked))
    pairs = zip(asked, drawn, strict=True)
    return [(one.prompt_tokens, sample) for one, sample in pairs if isinstance(sample, Sample)]


def mismatch(policy: Any, drawn: list[tuple[np.ndarray, Sample]]) -> dict[str, float]:
    """Return the distance of an engine's samples from the trainer's distribution, before and after correction."""
    ratios = []
    for prompt, sample in drawn:
        batch = pack([TrainGroup("g", prompt, [TrainSequence(sample.completion_tokens, sample.logprobs, 0.0)])])
        with torch.no_grad():
            ratios.append((policy(batch, 1.0).logprobs - batch.generator_logprobs).numpy())
    logs = np.concatenate(ratios).astype(np.float64)
    ratio = np.exp(logs)
    return {
        "tokens": len(logs),
        "mean": float(np.abs(logs).mean()),
        "largest": float(np.abs(logs).max()),
        "before": float(np.abs(ratio - 1).mean() / 2),
        "after": float(np.maximum(ratio - CLIP, 0).mean() / 2),
        "ess": float(ratio.sum() ** 2 / (ratio**2).sum() / len(ratio)),
    }


async def study(model: Path, repeats: int, each: int) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Return step times of both kinds, and both kinds' mismatches (none if `each` is 0)."""
    engines = {kind: engine_of(model, kind) for kind in KINDS}
    try:
        for engine in engines.values():
            await engine.warm_up()
        steps = await times(engines, repeats)
        if not each:
            return steps, {}
        tokenizer = AutoTokenizer.from_pretrained(model)
        prompts = [np.asarray(tokenizer.encode(text), dtype=np.int32) for text in PROMPTS]
        drawn = {kind: await sampled(engine, prompts, each) for kind, engine in engines.items()}
    finally:
        for engine in engines.values():
            engine.close()
    policy = load_policy(str(model))
    return steps, {kind: mismatch(policy, one) for kind, one in drawn.items()}


@click.command(help=__doc__)
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1))
@click.option(
    "--samples", default=8, show_default=True, type=click.IntRange(1), help="of each prompt, for the mismatch"
)
@click.option("--beside", default="", help="a remark about the machine, for the table")
def main(repeats: int, samples: int, beside: str) -> None:
    target = results_folder(None, "repeats", "samples") / OUT.name
    small = Path(resolve_model("smollm2-135m"))
    speed: dict[str, Any] = {}
    mismatches: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, model, each in (
            ("SmolLM2-135M", small, samples),
            ("Llama of 1.5 B", large_model(Path(folder) / "large", small), 0),
        ):
            steps, found = asyncio.run(study(model, repeats, each))
            if (probe := probe_products(model, "bfloat16")) is None:
                raise click.ClickException(f"the products of {name} cannot be measured on this machine")
            speed[name] = {"steps": steps, "probe": probe.speedup}
            mismatches |= found
    rows = [
        [
            f"{name}, {one['batch']}",
            *(f"{1000 * one[kind]:.1f}" for kind in KINDS),
            *(f"{one['batch'] / one[kind]:.1f}" for kind in KINDS),
            f"{one['same'] / one['int8']:.2f}",
        ]
        for name, each in speed.items()
        for one in each["steps"]
    ]
    probes = ", ".join(f"{each['probe']:.2f} ({name})" for name, each in speed.items())
    notes = [f"probe of `auto`: products of a decode step {probes} times as fast; it takes int8 from {WORTH} on"]
    heads = ("model, requests", "bf16, ms", "int8, ms", "bf16, tokens/s", "int8, tokens/s", "int8 over bf16")
    sheets = [Sheet("A decode step, one thread", heads, rows, notes + [beside] * bool(beside))]
    lines = [
        [
            {"same": "bf16", "int8": "int8"}[kind],
            f"{one['tokens']:,}",
            f"{one['mean']:.4f}",
            f"{one['largest']:.2f}",
            f"{one['before']:.4f}",
            f"{one['after']:.5f}",
            f"{one['ess']:.4f}",
        ]
        for kind, one in mismatches.items()
    ]
    figures = ("engine", "tokens", "mean, nats", "largest", "distance before", "after correction", "ESS")
    sheets.append(
        Sheet("From the trainer's distribution (SmolLM2-135M)", figures, lines, [f"weights are cut at {CLIP:g}"])
    )
    for sheet in sheets:
        sheet.show(terminal())
    record = {"machine": machine(), "speed": speed, "gaps": mismatches, "clip": CLIP, "beside": beside}
    write_results(target, record, "Generation in 8 bits", sheets)


if __name__ == "__main__":
    with error_lines():
        main()
