"""Compare training with what this CPU can do: its measured peaks beside the rates of a real step.

    .venv/bin/python experiments/cpu_speed.py      # two minutes, on a machine that does nothing else

The machine's peaks are products of large square matrices in fp32 and bf16 and reads of memory, on one and on all
threads. Training is one optimizer step of the demo's size (`examples/demo.yaml`: 8 prompts x 8 completions of up to 96
tokens, SmolLM2-135M) in the trainer's own class and with the environment that `streamrl launch` gives it. Tokens are
random, lengths are drawn to look like the demo's: neither content changes what is computed. Its operations are counted
by `scheduler/cost/model_shapes.py`, and one micro-batch more runs under torch's profiler, which says by kind where the
time goes. Writes experiments/results/cpu_speed.json and .md, or cpu_speed_bfloat16 where a CPU computes in that type,
with AMX cpu_speed_amx.
"""

from __future__ import annotations

import gc
import resource
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.distributed as dist
from bounds import GFLOP, gemm_peak, like_a_trainer, read_bandwidth, result_name, shape_of, threads
from running import ROOT, Sheet, machine, results_folder, terminal, write_results
from torch.profiler import ProfilerActivity, profile, record_function

from streamrl.cli.main import error_lines
from streamrl.config.load import load_run
from streamrl.config.run import RunConfig
from streamrl.machine.compute_type import decided
from streamrl.machine.cpu import this_cpu
from streamrl.machine.model_files import resolve_model
from streamrl.machine.own_share import core_numbers
from streamrl.rollouts.micro_batch import split_into_micro_batches
from streamrl.rollouts.train_groups import TrainGroup, TrainSequence
from streamrl.training.packing import pack
from streamrl.training.trainer import Trainer

DEMO = ROOT / "examples" / "demo.yaml"
PROMPT_TOKENS = 48
MEDIAN_LENGTH, SPREAD = 50, 0.6
"""Of completions before they are cut: log-normal, as the demo's are (their mean is 52 to 62 tokens)."""
OPTIMIZER = "optimizer"
KINDS = {
    **dict.fromkeys(("TokenLogprobs", "FusedTokenLogprobs"), "head"),
    **dict.fromkeys(("TokenLogprobsBackward", "FusedTokenLogprobsBackward"), "head"),
    **dict.fromkeys(("RMSNorm", "Rotate", "Gate"), "elementwise"),
    **dict.fromkeys(("RMSNormBackward", "RotateBackward", "GateBackward"), "elementwise"),
    "GroupAttention": "attention",
    "GroupAttentionBackward": "attention",
    "PlainAttention": "attention",
    "PlainAttentionBackward": "attention",
    OPTIMIZER: "optimizer",
    "aten::mm": "matrix products",
    "aten::addmm": "matrix products",
}
"""Kind of a profiled operation, by its own name or that of what called it; other ones of torch are elementwise."""


@dataclass(frozen=True)
class Peaks:
    """Peaks of the machine; keys are numbers of threads."""

    gemm: dict[str, dict[int, float]]
    """GFLOP/s by type."""
    read: dict[int, float]
    """GB/s."""


@dataclass(frozen=True)
class Half:
    """What was measured of training, or of decoding."""

    record: dict[str, Any]
    sheets: list[Sheet] = field(default_factory=list)


def measure_peaks(cores: int) -> Peaks:
    """Measure the peaks on one thread and on all."""
    counts = sorted({1, cores})
    gemm = {dtype: {count: gemm_peak(dtype, count) for count in counts} for dtype in ("float32", "bfloat16")}
    return Peaks(gemm, {count: read_bandwidth(count) for count in counts})


def demo_groups(run: RunConfig, vocabulary: int) -> list[TrainGroup]:
    """A step's groups: random tokens, lengths like the demo's."""
    rng = np.random.default_rng(0)

    def sequence() -> TrainSequence:
        length = int(np.clip(rng.lognormal(np.log(MEDIAN_LENGTH), SPREAD), 2, run.sampling.max_tokens))
        tokens = rng.integers(0, vocabulary, length).astype(np.int32)
        return TrainSequence(tokens, rng.normal(-1.5, 0.3, length).astype(np.float32), float(rng.normal()))

    prompts = [rng.integers(0, vocabulary, PROMPT_TOKENS).astype(np.int32) for _ in range(run.batch.prompts_per_step)]
    samples = range(run.batch.samples_per_prompt)
    return [TrainGroup(f"group-{i}", prompt, [sequence() for _ in samples]) for i, prompt in enumerate(prompts)]


def training(run: RunConfig, peaks: Peaks, cores: int, steps: int) -> Half:
    """Measure whole optimizer steps after one that is not counted, then profile the last micro-batch of another."""
    peak = peaks.gemm[run.model.dtype][cores]
    with tempfile.TemporaryDirectory() as folder, threads(cores):
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        model = Path(resolve_model(run.model.path))
        shape = shape_of(model)
        trainer = Trainer(run, str(model), torch.device("cpu"))
        gc.freeze()
        groups = demo_groups(run, shape.vocabulary)
        micro_batches = split_into_micro_batches(groups, run.batch.micro_batch_tokens)
        normalizer = float(sum(group.loss_tokens for group in groups))
        runs = []
        for number in range(steps + 1):
            began = time.perf_counter()
            stats = [trainer.accumulate(one, one is micro_batches[-1]) for one in micro_batches]
            passed = time.perf_counter()
            trainer.step(number, normalizer)
            seconds = passed - began, time.perf_counter() - passed
            runs.append({"passes_s": seconds[0], "optimizer_s": seconds[1], "flops": sum(s.flops for s in stats)})
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            began = time.perf_counter()
            trainer.accumulate(micro_batches[-1], is_last=True)
            with record_function(OPTIMIZER):
                trainer.step(steps + 1, normalizer)
            wall = time.perf_counter() - began
        dist.destroy_process_group()
    batch = pack(micro_batches[-1])
    tokens, predicting = batch.input_ids.numel(), batch.loss_tokens
    flops = {
        "matrix products": 3 * shape.forward_flops(tokens, 0, 0),
        "attention": 3 * shape.forward_flops(0, batch.squares(separate=False), 0),
        "head": 3 * shape.forward_flops(0, 0, predicting),
    }
    found = by_kind(profiled.events())
    kinds = {**found, "other": max(0.0, wall - sum(found.values()))}
    counted = runs[1:]
    rates = [one["flops"] / one["passes_s"] / GFLOP for one in counted]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    row_tokens = sum(one.tokens for one in groups)
    record = {
        "dtype": run.model.dtype,
        "threads": cores,
        "row_tokens": row_tokens,
        "micro_batches": [sum(one.tokens for one in groups) for groups in micro_batches],
        "first_step": runs[0],
        "steps": counted,
        "share_of_peak": [rate / peak for rate in rates],
        "profiled_s": wall,
        "profile_s": kinds,
        "profile_flops": flops,
        "memory_gib": memory,
    }
    tokens_s = row_tokens / min(one["passes_s"] for one in counted)
    rows = [
        [
            str(number + 1),
            f"{one['passes_s']:.2f}",
            f"{one['flops'] / one['passes_s'] / GFLOP:.0f}",
            f"{one['flops'] / one['passes_s'] / GFLOP / peak:.0%}",
            f"{one['optimizer_s']:.2f}",
        ]
        for number, one in enumerate(runs)
    ]
    of_kinds = [
        [
            kind,
            f"{seconds:.2f}",
            f"{seconds / wall:.0%}",
            *(
                [f"{flops[kind] / seconds / GFLOP:.0f}", f"{flops[kind] / seconds / GFLOP / peak:.0%}"]
                if kind in flops
                else "--"
            ),
        ]
        for kind, seconds in sorted(kinds.items(), key=lambda item: -item[1])
    ]
    notes = [
        f"{row_tokens} tokens of packed rows in micro-batches of {record['micro_batches']}, "
        f"{run.model.dtype}, {cores} threads: at best {tokens_s:.0f} tokens/s; peak memory {memory:.1f} GiB",
        "the first step is not counted: memory is got and kernels are made in it",
    ]
    return Half(
        record,
        [
            Sheet(
                "Training: a step of the demo", ("step", "passes s", "GFLOP/s", "of peak", "optimizer s"), rows, notes
            ),
            Sheet(
                "Training: where the time of one micro-batch and the optimizer goes",
                ("kind", "s", "of the time", "GFLOP/s", "of peak"),
                of_kinds,
                [f"profiled, {wall:.2f} s in all; other: what no operation of torch took, Python for the most part"],
            ),
        ],
    )


def by_kind(events: Any) -> dict[str, float]:
    """Seconds of profiled operations themselves, without those that they called, by kind."""
    seconds: dict[str, float] = defaultdict(float)
    for event in events:
        if not (event.name.startswith("aten::") or event.name in KINDS):
            continue
        kind = KINDS.get(event.name, "elementwise")
        caller = event.cpu_parent
        while caller is not None:  # the outermost one that is known decides: an optimizer's or a head's products
            kind = KINDS.get(caller.name, kind)
            caller = caller.cpu_parent
        seconds[kind] += event.self_cpu_time_total / 1e6
    return dict(seconds)


HALVES: dict[str, Callable[[RunConfig, Peaks, int, int], Half]] = {"training": training}
"""By name: with the run, the machine's peaks, threads and how many steps to measure."""


def peak_sheet(peaks: Peaks) -> Sheet:
    """The machine's peaks as a table."""
    counts = sorted(peaks.read)
    rows = [
        *[[f"products, {dtype}, GFLOP/s", *[f"{found[n]:.3g}" for n in counts]] for dtype, found in peaks.gemm.items()],
        ["memory reads, GB/s", *[f"{peaks.read[n]:.0f}" for n in counts]],
    ]
    return Sheet("Measured peaks", ("", *[f"{n} thread{'s' * (n > 1)}" for n in counts]), rows)


@click.command(help=__doc__)
@click.option("--steps", default=2, show_default=True, type=click.IntRange(1), help="counted ones")
@click.option("--dtype", default="auto", show_default=True, type=click.Choice(["auto", "float32", "bfloat16"]))
@click.option("--model", default="smollm2-135m", show_default=True)
def main(steps: int, dtype: str, model: str) -> None:
    like_a_trainer()
    console, out = terminal(), results_folder(None, "steps", "model")
    cores = len(core_numbers())
    peaks = measure_peaks(cores)
    sheets = [peak_sheet(peaks)]
    sheets[0].show(console)
    run = decided(load_run(DEMO, [f"model.dtype={dtype}", f"model.path={model}"]), cuda=False)
    record: dict[str, Any] = {"machine": machine(), "cpu": str(this_cpu()), "peaks": asdict(peaks)}
    for name, measure in HALVES.items():
        half = measure(run, peaks, cores, steps)
        record[name] = half.record
        sheets += half.sheets
        for sheet in half.sheets:
            sheet.show(console)
    target = out / f"{result_name('cpu_speed', run.model.dtype)}.json"
    write_results(target, record, "Speed of this CPU and what is made of it", sheets)
    console.print(f"written to {target} and .md")


if __name__ == "__main__":
    with error_lines():
        main()
