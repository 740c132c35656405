"""The paper's clusters as problems of the planner, the constants of the cost model with sources, and what they move."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import ModuleType

import numpy as np

from scheduler.capacity import allocation, gpu_memory, problem
from scheduler.capacity.placement_plan import PlacementPlan, colocated
from scheduler.capacity.plan_search import plans
from scheduler.capacity.problem import Offer, Problem, Route
from scheduler.cost import decode, generation_cost, training_cost, training_memory
from scheduler.cost.generation_cost import Batch
from scheduler.cost.hardware import Device, device
from scheduler.cost.model_shapes import MODELS
from scheduler.cost.trainer_work import PPO
from streamrl.planning.planning_inputs import PROMPT_TOKENS, SAMPLES, find_lengths

BETWEEN = Route(80e9 / 8)
"""The paper's link between both sites."""


def batch(lengths: str) -> Batch:
    """1,024 answers of the paper's shape."""
    values = find_lengths(lengths)[0]
    return Batch.of(values, SAMPLES, PROMPT_TOKENS)


def offer(gpu: Device, count: int) -> Offer:
    """GPUs of one site, at the paper's relative machine cost (H20 1.00, H800 2.85)."""
    assert gpu.price is not None
    return Offer(gpu.name.lower(), gpu, count, gpu.price.usd_per_hour)


@dataclass(frozen=True)
class Clusters:
    """7B on 32 H800 in one site, and on 16 H800 and 32 H20 in two."""

    shape: Batch
    h800: Device = field(default_factory=lambda: device("H800"))
    h20: Device = field(default_factory=lambda: device("H20"))

    def with_h800(self, gpu: Device) -> Clusters:
        """Return the same clusters with other GPUs in place of the H800."""
        return replace(self, h800=gpu)

    def with_h20(self, gpu: Device) -> Clusters:
        """Return the same clusters with other GPUs in place of the H20."""
        return replace(self, h20=gpu)

    @property
    def one(self) -> Problem:
        return Problem(MODELS["7b"], self.shape, PPO, (offer(self.h800, 32),))

    @property
    def two(self) -> Problem:
        offers = offer(self.h800, 16), offer(self.h20, 32)
        routes = ((frozenset(one.site for one in offers), BETWEEN),)
        return Problem(MODELS["7b"], self.shape, PPO, offers, routes, delta_ratio=problem.DELTA_RATIO)


def samples_per_cost(best: PlacementPlan) -> float:
    return 3600 * best.chosen.samples_per_s / best.chosen.usd_per_hour


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
        "OPTIMIZER_BYTES": "counted: AdamW's reads and writes",
        "HOST_LINK_GB_S": "80 % (assumption) of PCIe gen 4 x16",
    },
    training_memory: {
        "TRAINED_BYTES": "ZeRO (arXiv 1910.02054, section 3.1), fp32 gradients",
        "FROZEN_BYTES": "bf16",
        "GATHER_BYTES": "training/learner.py: bf16 gathers",
        "REDUCE_BYTES": "training/learner.py: fp32 reduction",
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
        "WHOLE_GRADIENT_SHARE": "a choice: up to this share of a device's memory, gradients are reduced once per step",
        "COMPILED_NORM_BYTES": "counted: what compiled norms and MLPs save (not planned here)",
        "COMPILED_MLP_BYTES": "the same",
        "COMPILED_GRADIENT_BYTES": "counted in the formula of the gradient (not planned here)",
        "KEPT_NORM_BYTES": "counted in the trainer's graph, selective recomputation (not planned here)",
        "KEPT_QUERY_BYTES": "the same",
        "KEPT_KEY_BYTES": "the same",
        "KEPT_MLP_BYTES": "the same",
    },
    generation_cost: {
        "GPU_MEMORY_FRACTION": "assumption between a pool's default 0.85 and vLLM's 0.92",
        "ENGINE_BYTES": "assumption; no published figure was found",
        "STEPS_IN_FLIGHT": "vLLM 0.32: asynchronous scheduling (models with windows alone)",
    },
    problem: {
        "DELTA_RATIO": "measured at a learning rate of 5e-6 (experiments/delta_codec.py)",
        "SAMPLE_BYTES_PER_TOKEN": "controller/site_services.py",
    },
    gpu_memory: {
        "CONTEXT_BYTES": "assumption; only for the memory of one run's GPUs, in no plan",
        "ASLEEP_BYTES": "the same",
    },
}
OF_THE_SEARCH = {
    decode: ("MOST_POINTS",),
    generation_cost: ("LENGTHS", "GRID", "MOST_QUEUED", "MOST_ROUNDS"),
    allocation: ("COARSE", "FINE", "SYNC_SIZES", "SYNC_KEPT", "NEAR", "ROWS_GAIN"),
    gpu_memory: ("GIB", "FRACTION_STEP", "MICRO_STEP", "MOST_GPUS", "MOST_SHARING"),
}
"""Numbers that say how finely plans are searched and how much is read, not what hardware does."""
DEVICE_SOURCES = {
    "bf16_tflops": "the paper's table 1",
    "memory_bandwidth_gb_s": "the paper's table 1",
    "memory_gb": "what nvidia-smi shows of such GPUs (memory.total)",
    "link_gb_s": "the paper's table 1",
    "network_gbit_s": "the paper: 8 x 200 Gbit/s per machine of H800, 100 Gbit/s per machine of H20",
    "matmul_share": "Bekman's maximum achievable matmul FLOPS, H100; assumption for both",
    "attention_share": "FlashAttention-2 on an H100 (arXiv 2407.08608); assumption for both",
}
RAISED = 1.2
"""Factor by which each constant is raised for the sensitivity."""
RATIO_LENGTHS = "10k"


def constants() -> list[tuple[str, str, str]]:
    """(name, value, source) of all constants of the cost model, and of the paper's GPUs."""
    code = [
        (f"{module.__name__.rpartition('.')[2]}.{name}", f"{getattr(module, name):g}", source)
        for module, sources in SOURCES.items()
        for name, source in sources.items()
    ]
    gpus = device("H800"), device("H20")
    devices = [
        (f"{gpu.name}.{name}", f"{getattr(gpu, name):g}", source)
        for gpu in gpus
        for name, source in DEVICE_SOURCES.items()
    ]
    prices = [(f"{gpu.name}.price", f"{gpu.price.usd_per_hour:g}", gpu.price.source) for gpu in gpus if gpu.price]
    return code + devices + prices


def ratios(of: Clusters) -> tuple[float, ...]:
    """Samples/s of stream, one_step_off and async against colocated, those of colocated, and the throughput per cost of
    two sites against one (`one_step_off`)."""
    together = colocated(of.one, "throughput")
    assert together is not None
    base = together.step.samples_per_s
    best = {name: plans(of.one, name, "throughput")[0] for name in ("stream", "one_step_off", "async")}
    apart = plans(of.two, "one_step_off", "throughput")[0]
    two = samples_per_cost(apart) / samples_per_cost(best["one_step_off"])
    return (*(one.chosen.samples_per_s / base for one in best.values()), base, two)


def changes(of: Clusters, before: tuple[float, ...]) -> list[str]:
    """Return the relative change of each ratio from what it was before."""
    return [f"{now / then - 1:+.1%}" for now, then in zip(ratios(of), before, strict=True)]


def sensitivity(say: Callable[[str], None]) -> list[tuple[str, ...]]:
    """Relative change of each ratio for each constant raised by 20 %."""
    base = Clusters(batch(RATIO_LENGTHS))
    before, shape = ratios(base), base.shape
    rows: list[tuple[str, ...]] = [("as they are", *(f"{value:.2f}" for value in before))]

    def add(name: str, of: Clusters) -> None:
        say(name)
        rows.append((name, *changes(of, before)))

    for module, sources in SOURCES.items():
        for name in sources:
            value = getattr(module, name)
            share = value < 1 < value * RAISED
            raised = 1.0 if share else value * RAISED
            label = f"{name} (a share: to 1)" if share else name
            rows.append((label, *_with(module, name, raised, base, before)))
            say(name)
    for gpu, swap in ((base.h800, base.with_h800), (base.h20, base.with_h20)):
        for name in DEVICE_SOURCES:
            raised = min(getattr(gpu, name) * RAISED, _most(name))
            add(f"{gpu.name}.{name}", swap(replace(gpu, **{name: raised})))
        assert gpu.price is not None
        price = replace(gpu.price, usd_per_hour=RAISED * gpu.price.usd_per_hour)
        add(f"{gpu.name}.price", swap(replace(gpu, price=price)))
    add("prompt_tokens", replace(base, shape=replace(shape, prompt_tokens=shape.prompt_tokens * RAISED)))
    mean = shape.mean_length
    wider = np.maximum(mean + RAISED * (np.asarray(shape.lengths) - mean), 1.0)
    add("staleness 2 instead of 1", replace(base, shape=replace(shape, staleness=2)))
    add("answers' spread around their mean", replace(base, shape=replace(shape, lengths=tuple(wider.tolist()))))
    return rows


def _most(name: str) -> float:
    return 1.0 if name.endswith("_share") else math.inf


def _with(module: ModuleType, name: str, value: float, of: Clusters, before: tuple[float, ...]) -> list[str]:
    """Change a constant for one evaluation; everything that was computed with the old one is forgotten."""
    old, users = getattr(module, name), [one for one in SOURCES if hasattr(one, name)]
    try:
        for one in users:  # a module may have imported it
            setattr(one, name, value)
        _forget()
        return changes(of, before)
    finally:
        for one in users:
            setattr(one, name, old)
        _forget()


def _forget() -> None:
    generation_cost.replica_kind.cache_clear()
    training_cost.trainer_times.cache_clear()
