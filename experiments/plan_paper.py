"""Compare `streamrl plan`'s cost model with the published figures of the clusters in the StreamRL paper.

    .venv/bin/python experiments/plan_paper.py      # minutes; writes results/plan_paper.json and .md

Nothing here is fitted to the published rows: constants are from data sheets and other papers
(docs/explanation/cost_model.md).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from scheduler.capacity.allocation import Offer, Problem, Route
from scheduler.capacity.placement_plan import PlacementPlan, colocated, plans
from scheduler.capacity.steady_step import steady_step
from scheduler.cost import decode, generation_cost, training_cost
from scheduler.cost.decode import PAPER_7B_H800, roofline
from scheduler.cost.generation_cost import Batch
from scheduler.cost.hardware import Device, device
from scheduler.cost.model_shapes import MODELS
from scheduler.cost.training_cost import PPO
from streamrl.planning.planning_inputs import PROMPT_TOKENS, SAMPLES, find_lengths

OUT = Path(__file__).parent / "results"
LENGTHS = ("5k", "10k", "20k")
PUBLISHED_7B = {"5k": (13.0, 16.0, 21.3), "10k": (8.0, 8.8, 10.7), "20k": (4.8, 5.1, 5.7)}
"""Samples/s on 32 GPUs: colocated, stream, async."""
PUBLISHED_HETEROGENEOUS = (1.23, 1.33)
CLUSTERS = {"7b": 32, "32b": 128, "72b": 128}
"""H800 by model; 128 are all that the paper's cluster has."""
SCHEDULES: tuple[str, ...] = ("sync", "stream", "one_step_off", "async")
BETWEEN = Route(80e9 / 8)
"""The paper's link between both sites."""


def batch(lengths: str) -> Batch:
    """1,024 answers of the paper's shape."""
    values, _ = find_lengths(lengths)
    return Batch.of(values, SAMPLES, PROMPT_TOKENS)


def offer(site: str, gpu: str, count: int) -> Offer:
    """At the paper's relative machine cost (H20 1.00, H800 2.85)."""
    found = device(gpu)
    assert found.price is not None
    return Offer(site, found, count, found.price.usd_per_hour)


def one_site(model: str, lengths: str, gpus: int) -> dict[str, Any]:
    """Every schedule at its own best split of one site's H800."""
    problem = Problem(MODELS[model], batch(lengths), PPO, (offer("h800", "H800", gpus),))
    together = colocated(problem, "throughput")
    assert together is not None
    row: dict[str, Any] = {
        "model": model,
        "gpus": gpus,
        "lengths": lengths,
        "colocated": {
            "samples_per_s": together.step.samples_per_s,
            "generation_s": together.generation_s,
            "training_s": together.training_s,
            "switch_s": together.switch_s,
        },
    }
    for schedule in SCHEDULES:
        row[schedule] = told(plans(problem, schedule, "throughput")[0])
    return row


def told(best: PlacementPlan) -> dict[str, Any]:
    """A plan's figures."""
    return {
        "split": best.text,
        "samples_per_s": best.chosen.samples_per_s,
        "generation_s": best.makespan_s,
        "generation_across_steps_s": best.steady_s,
        "training_s": best.training_s,
        "weights_s": best.transfer_s + best.load_s,
        "cost_per_hour": best.chosen.usd_per_hour,
        "samples_per_cost": 3600 * best.chosen.samples_per_s / best.chosen.usd_per_hour,
        "limit": best.limit,
    }


def two_sites(lengths: str, schedule: str) -> dict[str, Any]:
    """32 H20 and 16 H800 in two sites against 32 H800 in one, 7B; the rest of what is not used is released."""
    one = Problem(MODELS["7b"], batch(lengths), PPO, (offer("h800", "H800", 32),))
    both = Problem(
        *(MODELS["7b"], batch(lengths), PPO, (offer("h800", "H800", 16), offer("h20", "H20", 32))),
        ((frozenset(("h800", "h20")), BETWEEN),),
    )
    homogeneous, mixed = (told(plans(problem, schedule, "throughput")[0]) for problem in (one, both))
    everything = sum(part.count * part.usd_per_hour for part in both.offers)
    whole = sum(part.count * part.usd_per_hour for part in one.offers)
    return {
        "lengths": lengths,
        "schedule": schedule,
        "homogeneous": homogeneous,
        "heterogeneous": mixed,
        "ratio": mixed["samples_per_cost"] / homogeneous["samples_per_cost"],
        "ratio_nothing_released": mixed["samples_per_s"] / everything / (homogeneous["samples_per_s"] / whole),
    }


def parts_of_async(lengths: str) -> tuple[str, ...]:
    """Seconds of the planned `async` step of 7B on 32 H800, with one part of the model more in each column."""
    problem = Problem(MODELS["7b"], batch(lengths), PPO, (offer("h800", "H800", 32),))
    best = plans(problem, "async", "throughput")[0]
    pools, time, shape = best.split.generation, best.split.time, problem.batch
    whole = replace(time, gpus=1, tensor_parallel=1)  # every sample on all GPUs at once
    steps = (
        max(best.steady_s, time.seconds),
        steady_step(pools, shape, whole, 0.0).seconds,
        steady_step(pools, shape, whole, best.transfer_s, best.load_s).seconds,
        steady_step(pools, shape, time, best.transfer_s, best.load_s).seconds,
        best.least_seconds("one_step_off"),
    )
    return (lengths, *(f"{seconds:.1f}" for seconds in steps))


SOURCES: dict[ModuleType, dict[str, str]] = {
    decode: {
        "MEMORY_EFFICIENCY": "assumption within measured kernels: FlashMLA 0.90, whole steps 0.5 to 0.8",
        "COMPUTE_EFFICIENCY": "assumption: thin products; no published figure was found",
        "STEP_OVERHEAD_S": "assumption: scheduling, sampling, launches of an engine step",
        "ALLREDUCE_LATENCY_S": "assumption: start-up of an all-reduce inside a machine",
    },
    training_cost: {
        "REACHED": "median of ten FSDP steps in MosaicML's llm-foundry benchmarks",
        "ELEMENTWISE_BYTES": "counted: Korthikanti's 34 bytes, each written and read once",
        "BANDWIDTH_SHARE": "FlashMLA on an H800, 3,000 of 3,350 GB/s",
        "TRAINED_BYTES": "ZeRO (arXiv 1910.02054, section 3.1), fp32 gradients",
        "FROZEN_BYTES": "bf16",
        "GATHER_BYTES": "training/learner.py: bf16 gathers",
        "REDUCE_BYTES": "training/learner.py: fp32 reduction",
        "OPTIMIZER_BYTES": "counted: AdamW's reads and writes",
        "NORM_BYTES": "counted in the trainer's graph (experiments/training_graph.py)",
        "QUERY_BYTES": "the same",
        "KEY_BYTES": "the same",
        "MLP_BYTES": "the same",
        "GRADIENT_BYTES": "the same",
        "CHECKPOINT_BYTES": "a layer's bf16 input",
        "LOGIT_BYTES": "counted: bf16 and fp32",
        "LOGITS_AT_ONCE": "training/token_logprobs.py",
        "HEAD_GRADIENT_BYTES": "the same: fp32 sums over slabs",
        "MICRO_BATCH_TOKENS": "assumption",
        "USABLE_MEMORY": "assumption: CUDA context, NCCL, fragmentation",
        "HOST_LINK_GB_S": "80 % (assumption) of PCIe gen 4 x16",
    },
    generation_cost: {
        "GPU_MEMORY_FRACTION": "assumption between a pool's default 0.85 and vLLM's 0.92",
        "ENGINE_BYTES": "assumption; no published figure was found",
    },
}
DEVICE_SOURCES = {
    "bf16_tflops": "the paper's table 1",
    "memory_bandwidth_gb_s": "the paper's table 1",
    "memory_gb": "the paper's table 1",
    "link_gb_s": "the paper's table 1",
    "network_gbit_s": "the paper: 8 x 200 Gbit/s per machine",
    "matmul_share": "Bekman's maximum achievable matmul FLOPS, H100; assumption for the H800",
    "attention_share": "FlashAttention-2 on an H100 (arXiv 2407.08608); assumption for the H800",
}
RAISED = 1.2
"""Factor by which each constant is raised for the sensitivity."""
RATIO_LENGTHS = "10k"


def constants() -> list[tuple[str, str, str]]:
    """(name, value, source) of all constants of the cost model, and of the H800."""
    gpu = device("H800")
    code = [
        (f"{module.__name__.rpartition('.')[2]}.{name}", f"{getattr(module, name):g}", source)
        for module, sources in SOURCES.items()
        for name, source in sources.items()
    ]
    return code + [(f"H800.{name}", f"{getattr(gpu, name):g}", source) for name, source in DEVICE_SOURCES.items()]


def ratios(gpu: Device, shape: Batch) -> tuple[float, ...]:
    """Samples/s of stream, one_step_off and async against colocated, and those of colocated: 7B on 32 of these GPUs."""
    assert gpu.price is not None
    problem = Problem(MODELS["7b"], shape, PPO, (Offer("h800", gpu, 32, gpu.price.usd_per_hour),))
    together = colocated(problem, "throughput")
    assert together is not None
    base = together.step.samples_per_s
    found = [plans(problem, name, "throughput")[0].chosen.samples_per_s for name in ("stream", "one_step_off", "async")]
    return (*(rate / base for rate in found), base)


def changes(gpu: Device, shape: Batch, before: tuple[float, ...]) -> list[str]:
    """Return the relative change of each ratio from what it was before."""
    return [f"{now / then - 1:+.1%}" for now, then in zip(ratios(gpu, shape), before, strict=True)]


def sensitivity(say: Callable[[str], None]) -> list[tuple[str, ...]]:
    """Relative change of each ratio for each constant raised by 20 %."""
    gpu, shape = device("H800"), batch(RATIO_LENGTHS)
    before = ratios(gpu, shape)
    rows: list[tuple[str, ...]] = [("as they are", *(f"{value:.2f}" for value in before))]

    def add(name: str, gpu: Device = gpu, shape: Batch = shape) -> None:
        say(name)
        rows.append((name, *changes(gpu, shape, before)))

    for module, sources in SOURCES.items():
        for name in sources:
            value = getattr(module, name)
            share = value < 1 < value * RAISED
            raised = 1.0 if share else value * RAISED
            label = f"{name} (a share: to 1)" if share else name
            rows.append((label, *_with(module, name, raised, gpu, shape, before)))
            say(name)
    for name in DEVICE_SOURCES:
        add(f"H800.{name}", gpu=replace(gpu, **{name: min(getattr(gpu, name) * RAISED, _most(name))}))
    add("prompt_tokens", shape=replace(shape, prompt_tokens=shape.prompt_tokens * RAISED))
    mean = shape.mean_length
    wider = np.maximum(mean + RAISED * (np.asarray(shape.lengths) - mean), 1.0)
    add("staleness 2 instead of 1", shape=replace(shape, staleness=2))
    add("answers' spread around their mean", shape=replace(shape, lengths=tuple(wider.tolist())))
    return rows


def _most(name: str) -> float:
    return 1.0 if name.endswith("_share") else math.inf


def _with(
    module: ModuleType, name: str, value: float, gpu: Device, shape: Batch, before: tuple[float, ...]
) -> list[str]:
    """Change a constant for one evaluation; everything that was computed with the old one is forgotten."""
    old, users = getattr(module, name), [one for one in SOURCES if hasattr(one, name)]
    try:
        for one in users:  # a module may have imported it
            setattr(one, name, value)
        _forget()
        return changes(gpu, shape, before)
    finally:
        for one in users:
            setattr(one, name, old)
        _forget()


def _forget() -> None:
    generation_cost.replica_kind.cache_clear()
    training_cost.trainer_times.cache_clear()


def step_times() -> list[tuple[int, float, float]]:
    """(batch, published ms, ours) of a decode step, 7B on an H800; ours at the mean context of the 5k lengths."""
    curve, shape = roofline(MODELS["7b"].shape, device("H800")), batch("5k")
    return [
        (
            size,
            1e3 * float(PAPER_7B_H800.base(size)),
            1e3 * (float(curve.base(size)) + curve.per_context_token * size * shape.running_context),
        )
        for size in PAPER_7B_H800.batches
    ]


def tables(
    rows: list[dict[str, Any]], mixed: list[dict[str, Any]], raised: list[tuple[str, ...]]
) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """(title, columns, rows)."""
    splits, ratios, published = [], [], []
    for row in rows:
        label = (row["model"], str(row["gpus"]), row["lengths"])
        together = row["colocated"]
        splits.append(
            (
                *label,
                "colocated",
                "all",
                f"{together['generation_s']:.1f}",
                f"{together['training_s']:.1f}",
                f"{together['switch_s']:.1f}",
                f"{together['samples_per_s']:.2f}",
            )
        )
        for schedule in SCHEDULES:
            one = row[schedule]
            generation = one["generation_across_steps_s"] if schedule == "async" else one["generation_s"]
            splits.append(
                (
                    *label,
                    schedule,
                    one["split"].replace(" in h800", ""),
                    f"{generation:.1f}",
                    f"{one['training_s']:.1f}",
                    f"{one['weights_s']:.1f}",
                    f"{one['samples_per_s']:.2f}",
                )
            )
        base = together["samples_per_s"]
        ratios.append((*label, *(f"{row[name]['samples_per_s'] / base:.2f}" for name in SCHEDULES)))
        if row["model"] == "7b":
            theirs = PUBLISHED_7B[row["lengths"]]
            ours = (
                base,
                row["stream"]["samples_per_s"],
                row["one_step_off"]["samples_per_s"],
                row["async"]["samples_per_s"],
            )
            published.append(
                (
                    row["lengths"],
                    " : ".join(f"{value / theirs[0]:.2f}" for value in theirs),
                    " : ".join(f"{value / ours[0]:.2f}" for value in ours),
                    " / ".join(f"{value:g}" for value in theirs),
                    " / ".join(f"{value:.1f}" for value in ours),
                    f"{ours[0] / theirs[0]:.2f}",
                )
            )
    pairs = [
        (
            one["lengths"],
            one["schedule"],
            one["homogeneous"]["split"].replace(" in h800", ""),
            one["heterogeneous"]["split"].replace(" in h800", "").replace(" in h20", ""),
            f"{one['homogeneous']['samples_per_s']:.2f}",
            f"{one['heterogeneous']['samples_per_s']:.2f}",
            f"{one['ratio']:.2f}",
            f"{one['ratio_nothing_released']:.2f}",
        )
        for one in mixed
    ]
    label = ("model", "H800", "lengths")
    return [
        (
            "Split and stage times",
            (
                *label,
                "schedule",
                "split (replicas x TP)",
                "generation s",
                "training s",
                "weights or switch s",
                "samples/s",
            ),
            splits,
        ),
        ("Samples/s against colocated", (*label, *SCHEDULES), ratios),
        (
            "7B on 32 H800 beside the published rows",
            (
                "lengths",
                "published colocated : stream : async",
                "ours colocated : stream : one_step_off : async",
                "published samples/s",
                "ours samples/s",
                "ours / published, colocated",
            ),
            published,
        ),
        (
            "Step of the planned `async` split, 7B on 32 H800, s: with one part of the model more in each column",
            (
                *("lengths", "rates alone", "tails and staleness", "new weights: way and pauses"),
                *("a sample on one rank (the plan)", "one_step_off on this split"),
            ),
            [parts_of_async(lengths) for lengths in LENGTHS],
        ),
        (
            f"32 H20 + 16 H800 against 32 H800, 7B (published: {' to '.join(map(str, PUBLISHED_HETEROGENEOUS))})",
            (
                "lengths",
                "schedule",
                "one site",
                "two sites",
                "samples/s one",
                "two",
                "throughput per cost, two / one",
                "the same, nothing released",
            ),
            pairs,
        ),
        (
            "Decode step of 7B on an H800, ms",
            ("batch", "published", "ours, 5k context"),
            [(str(size), f"{theirs:.1f}", f"{ours:.1f}") for size, theirs, ours in step_times()],
        ),
        ("Constants", ("constant", "value", "source"), list(constants())),
        (
            f"Each constant raised by 20 %: 7B on 32 H800, {RATIO_LENGTHS}",
            ("constant", "stream / colocated", "one_step_off / colocated", "async / colocated", "colocated samples/s"),
            raised,
        ),
    ]


NOTES = """
What explains the differences, as far as one can tell without their code and lengths (nothing was fitted to these rows):

- **Absolute rates.** Our decode steps are within 20 % of the published ones, so most of the gap is elsewhere: a real
  step also has padding, imbalance, rewards, and values and advantages that wait for them. Prompts and lengths are
  assumptions: only their shape is published.
- **Async.** The published steps of async last 48, 96 and 180 s at 5K, 10K and 20K: 9.6, 9.6 and 9.0 ms for each token
  of the longest answer, which is the paper's own step time at a batch of 8 to 16. So they end with the longest
  answers of a whole batch, as our `one_step_off` does, and that is the row to compare with. Our `async` is what this
  project runs: instances begin the next batch while the tail of the last one decodes, so that an answer has up to two
  steps. It is simulated, with tails, staleness 1, the way and the pauses of new weights, and samples that one rank of
  the trainer processes each (the table above shows what each part adds). Its ratio to colocated stays above the
  published one.
- **Constants** do not explain the misses: raised by 20 %, none moves a ratio by more than 4 % (last table). A second
  step of staleness, which is no constant, moves `async` by 11 %. What is left is what the model leaves out, and the
  lengths.
- **Lengths.** The published gains shrink from 5K to 20K, ours hardly: our three length distributions are one, scaled,
  and what grows faster than the lengths is only attention and KV cache.
- **Stream** trains a batch's short answers behind its tail, and the last ones on one rank each; micro-batches that wait
  for samples are not modelled, so ours is nearer to `one_step_off` than the published one.
- **Two sites.** The ratio rests on the relative price (2.85), the H20's bandwidth, and what a plan releases.
- The trainer is FSDP, with tensor parallelism where that fits or is faster, because that is what this project runs.
"""


@click.command(help=__doc__)
def main() -> None:
    rows = [one_site(model, lengths, gpus) for model, gpus in CLUSTERS.items() for lengths in LENGTHS]
    mixed = [two_sites(lengths, schedule) for schedule in ("one_step_off", "async") for lengths in LENGTHS]
    assert all(math.isfinite(one["ratio"]) for one in mixed)
    console = Console()
    raised = sensitivity(lambda name: console.print(f"raised: {name}"))
    text = [
        "# The paper's clusters in the cost model",
        "",
        "Written by `experiments/plan_paper.py`.",
        f"PPO (actor, critic, reference), {SAMPLES} samples a step, prompts of {PROMPT_TOKENS} "
        "tokens (assumed), lengths of the paper's shape (docs/explanation/cost_model.md).",
        "",
    ]
    for title, columns, body in tables(rows, mixed, raised):
        table = Table(*columns, title=title, title_justify="left")
        for line in body:
            table.add_row(*line)
        console.print(table)
        text += [f"## {title}", "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        text += [f"| {' | '.join(line)} |" for line in body] + [""]
    console.print(NOTES, markup=False, highlight=False)
    OUT.mkdir(exist_ok=True)
    (OUT / "plan_paper.md").write_text("\n".join(text) + NOTES)
    values = {
        "published_7b": PUBLISHED_7B,
        "published_heterogeneous": PUBLISHED_HETEROGENEOUS,
        "one_site": rows,
        "two_sites": mixed,
        "constants": [{"name": name, "value": value, "source": source} for name, value, source in constants()],
        "sensitivity": raised,
    }
    (OUT / "plan_paper.json").write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
