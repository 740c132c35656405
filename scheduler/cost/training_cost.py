"""Time of an optimizer step: FSDP training on GPUs of one type. Pure functions.

    compute = (products / matmul rate + attention / attention rate + bytes of activations / bandwidth) / GPUs
              / REACHED + all-reduces of tensor parallelism, or all-to-alls of sequence parallelism
    step    = max(compute, communication) + optimizer + gradients between replicas

The rates are what kernels of each type reach (`hardware.Device`), so a shape with long samples, small layers or a GPU
with much bandwidth for its compute has a utilisation of its own: a roofline (Williams et al., CACM 2009) of three kinds
of work, one after the other.

What fits is a matter of memory (`training_memory.py`). The GPUs are spread evenly over as few machines as hold them, as
the ranks of a trainer are; numbers for which that does not come out, such as 13 on machines of 8, are left out.
Every micro-batch gathers the weights of all layers for the forward and again for the backward pass; gradients are
scattered once per update where the whole of them is small (`reduces_once`), else by every micro-batch. A step has an
update for each part of its batch and each pass over it (`TrainingWork.updates`); the optimizer's time and the exchange
between replicas are those of an update.
These overlap with compute (FSDP prefetches the next layer), so the slower of both counts.
A trained model costs a forward pass and a backward pass of twice that, and with recomputed activations one more
forward; a model that is only evaluated costs one forward. Samples are split over ranks that share rows alone: none of
these is done before the longest sample is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from scheduler.cost.hardware import Device, machines_of, tensor_parallel_degrees
from scheduler.cost.model_shapes import Transformer
from scheduler.cost.trainer_work import TrainingWork
from scheduler.cost.training_memory import (
    GATHER_BYTES,
    REDUCE_BYTES,
    TRAINED_BYTES,
    TrainerLayout,
    key_copies,
    layout_on,
    micro_batch_tokens,
    sequence_parallel_degrees,
)

REACHED = 0.75
"""Share of that roofline that whole steps reach: what kernel launches, unhidden communication and power limits leave.

Median over ten published FSDP steps (MosaicML's llm-foundry, scripts/train/benchmarking/README.md: 7B, 13B and 70B at
2k to 32k tokens on H100 and A100), which reach 0.60 to 0.89 of it; the long samples on H100 are the lower ones
(docs/explanation/cost_model.md has the rows).
"""
ELEMENTWISE_BYTES = 68
"""Bytes per token and hidden unit that a layer's forward pass moves apart from its products, counted: each of the 34
that a layer of a GPT keeps (Korthikanti et al., arXiv 2205.05198) is written once and read once. A backward pass moves
twice that.
"""
BANDWIDTH_SHARE = 0.90
"""Share of the peak bandwidth that element-wise kernels reach: what FlashMLA's memory-bound kernel does on an H800,
3,000 of 3,350 GB/s (https://github.com/deepseek-ai/FlashMLA); that others do is an assumption."""
OPTIMIZER_BYTES = 28
"""Bytes per weight that AdamW moves, counted: reads gradient, master and both moments, writes the last three, 4
each."""
HOST_LINK_GB_S = 25.0
"""Rate from device to host memory, each way: 80 % (assumption) of the 32 GB/s of PCIe gen 4 x16, half of the 64 GB/s
for both directions in the L40S's table (scheduler/cost/hardware.py). Gen 5 machines (H100 and later) have twice that.
"""


@dataclass(frozen=True)
class StepTokens:
    """Tokens that one optimizer step trains on."""

    tokens: float
    """Tokens of prompts and answers together."""
    squares: float
    """Sum of the samples' squared lengths, as far as the model's windows see them (`Transformer.pairs`)."""
    longest: float
    """Tokens of the longest sample."""
    samples: int
    limit: float = 0.0
    """Tokens of a sample that must fit, though the step may have none as long; 0: the longest."""

    @property
    def must_fit(self) -> float:
        """Tokens of the longest sample that memory must hold."""
        return max(self.limit, self.longest)


@dataclass(frozen=True)
class TrainerTime:
    """Seconds of an optimizer step."""

    gpus: int
    """GPUs that are used; at most those offered."""
    shard: int
    """GPUs that hold one copy of the weights together."""
    compute_s: float
    communication_s: float
    """Seconds of gathers and scatters; overlaps with compute."""
    optimizer_s: float
    """Seconds of the optimizer, including the exchange of gradients between replicas."""
    tensor_parallel: int = 1
    """GPUs that split each layer; FSDP shards over the others (`trainer.tensor_parallel`)."""
    sequence_parallel: int = 1
    """GPUs that share each row of tokens (`trainer.sequence_parallel`)."""
    nodes: int = 1
    """Machines over which the GPUs are spread evenly (`trainer.nodes`)."""
    after_batch: float = 0.0
    """Share of the seconds that follows the step's last group (`TrainingWork`)."""

    @property
    def copies(self) -> int:
        """Copies of the weights: one, or with hybrid sharding one on every machine."""
        return self.gpus // (self.shard * self.tensor_parallel)

    @property
    def keys(self) -> dict[str, int | str]:
        """Keys of the cluster file's `trainer` that give this layout, beside `ranks`, other than defaults."""
        keys: dict[str, int | str] = {} if self.nodes == 1 else {"nodes": self.nodes}
        if self.copies > 1:
            keys["sharding"] = "hybrid"
        degrees = {"tensor_parallel": self.tensor_parallel, "sequence_parallel": self.sequence_parallel}
        return keys | {name: degree for name, degree in degrees.items() if degree > 1}

    def busy_ranks(self, tokens: float, longest: float) -> float:
        """Return the data-parallel ranks, or sets of ranks, each of which processes samples of its own.

        At most as many as the longest sample leaves busy: no sample takes longer than the whole step.

        Args:
            tokens: of a step.
            longest: tokens of its longest sample.
        """
        return min(self.gpus / self.tensor_parallel / self.sequence_parallel, tokens / longest)

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return max(self.compute_s, self.communication_s) + self.optimizer_s


def compute_seconds(model: Transformer, work: TrainingWork, device: Device, tokens: float, squares: float) -> float:
    """Return the seconds that one GPU would compute for all passes over samples; see the module.

    Args:
        model: one size for all roles.
        work: models that are trained and evaluated.
        device: the GPU.
        tokens: tokens of all samples together.
        squares: sum of their `Transformer.pairs`.
    """
    peak = device.bf16_tflops * 1e12
    attention = model.forward_flops(tokens, squares) - model.forward_flops(tokens, 0.0)
    products = model.forward_flops(tokens, 0.0) / (peak * device.matmul_share)
    moved = ELEMENTWISE_BYTES * model.hidden * model.layers * tokens
    rest = attention / (peak * device.attention_share) + moved / (device.memory_bandwidth_gb_s * 1e9 * BANDWIDTH_SHARE)
    return work.forwards * (products + rest) / REACHED


def _all_reduce_seconds(model: Transformer, work: TrainingWork, device: Device, tokens: float, tp: int) -> float:
    """Return the seconds of tensor parallelism's all-reduces over a rank's tokens.

    Two per layer in a forward pass and two in a backward pass (Megatron-LM, arXiv 1909.08053, section 3), in bf16.
    """
    passes = work.epochs * (work.trained * (3 if work.recompute else 2) + work.forward_only)
    moved = 2 * (tp - 1) / tp * tokens * model.hidden * GATHER_BYTES
    return 2 * model.layers * passes * moved / (device.link_gb_s * 1e9 / 2)


def _all_to_all_seconds(
    model: Transformer, work: TrainingWork, device: Device, tokens: float, layout: TrainerLayout
) -> float:
    """Return the seconds of sequence parallelism's all-to-alls over a rank's own tokens.

    Per layer four in a forward pass, of queries, keys, values and attention's output, and four in a backward pass
    (DeepSpeed-Ulysses, arXiv 2309.14509, section 3.2), in bf16. A rank keeps its own part.
    """
    sharing = layout.sequence_parallel
    passes = work.epochs * (work.trained * (3 if work.recompute else 2) + work.forward_only)
    heads = 2 * model.heads + 2 * model.kv_heads * key_copies(model, layout)
    moved = (sharing - 1) / sharing * tokens * heads * model.head_size * GATHER_BYTES
    return model.layers * passes * moved / (device.link_gb_s * 1e9 / 2)


def exactly(
    model: Transformer, work: TrainingWork, device: Device, gpus: int, step: StepTokens, by_rows: bool = False
) -> TrainerTime | None:
    """Return the time of a step on all of these GPUs, spread in the best way.

    None: it does not fit into memory, or the GPUs cannot be spread evenly over machines.

    Args:
        model: one size for all roles.
        work: models that are trained and evaluated.
        device: the kind of GPU.
        gpus: number of GPUs.
        step: tokens of the step.
        by_rows: whether GPUs of a machine share rows of tokens, instead of layers where that is better.
    """
    best: TrainerTime | None = None
    degrees = [(tp, 1) for tp in tensor_parallel_degrees(device, model.kv_heads)]
    if by_rows:
        degrees = [(1, sharing) for sharing in sequence_parallel_degrees(device, model)]
    for tp, sharing in degrees:
        if (machines := machines_of(device, gpus, tp * sharing)) is not None:
            for shard in sorted({gpus // machines // tp, gpus // tp}):  # hybrid sharding, and full
                layout = layout_on(device, model, shard, tp, sharing)
                one = _spread_over(model, work, device, gpus, machines, step, layout)
                if one is not None and (best is None or one.seconds < best.seconds):
                    best = one
    return best


def _spread_over(
    model: Transformer,
    work: TrainingWork,
    device: Device,
    gpus: int,
    machines: int,
    step: StepTokens,
    layout: TrainerLayout,
) -> TrainerTime | None:
    """Return the time of a step in one layout; None: it does not fit into memory."""
    tp, shard, sharing = layout.tensor_parallel, layout.shard, layout.sequence_parallel
    micro = micro_batch_tokens(model, work, device, layout, step.must_fit)
    if micro is None:
        return None
    ranks = gpus // tp
    whole = compute_seconds(model, work, device, step.tokens, step.squares) / gpus
    longest = compute_seconds(model, work, device, step.longest, model.pairs(step.longest)) if step.samples else 0.0
    compute = max(whole, longest / tp / sharing)
    if tp > 1:
        compute += _all_reduce_seconds(model, work, device, max(step.tokens / ranks, step.longest), tp)
    if sharing > 1:
        most = max(step.tokens / ranks, step.longest / sharing)
        compute += _all_to_all_seconds(model, work, device, most, layout)
    network, fast = device.network_gbit_s * 1e9 / 8, device.link_gb_s * 1e9 / 2
    weights = model.parameters / tp
    rounds = work.updates * max(1, math.ceil(step.tokens / work.mini_batches / ranks / micro))
    gathered = rounds * (2 * work.trained + work.forward_only) * GATHER_BYTES
    reduced = (work.updates if layout.whole_gradients else rounds) * work.trained * REDUCE_BYTES
    moved = (gathered + reduced) * weights * (shard - 1) / shard
    optimizer = work.trained * OPTIMIZER_BYTES * weights / shard / (device.memory_bandwidth_gb_s * 1e9)
    replicas = ranks // shard
    if replicas > 1:
        share = 2 * (replicas - 1) / replicas * REDUCE_BYTES * weights / shard
        optimizer += work.trained * share / (network if gpus > device.per_machine else fast)
    between = fast if shard * tp <= device.per_machine else network
    seconds = compute, moved / between, work.updates * optimizer
    return TrainerTime(gpus, shard, *seconds, tp, sharing, machines, work.after_batch)


@lru_cache(maxsize=64)
def trainer_times(
    model: Transformer, work: TrainingWork, device: Device, most: int, step: StepTokens, by_rows: bool = False
) -> tuple[TrainerTime | None, ...]:
    """Return [most + 1] the best trainer of at most so many GPUs: more are never slower, since some may stay idle.

    Arguments as for `exactly`.
    """
    times: list[TrainerTime | None] = [None]
    for gpus in range(1, most + 1):
        one, before = exactly(model, work, device, gpus, step, by_rows), times[-1]
        times.append(one if before is None or (one is not None and one.seconds < before.seconds) else before)
    return tuple(times)


def switch_seconds(model: Transformer, work: TrainingWork, device: Device, gpus: int, parts: int) -> float:
    """Return the seconds to change from generation to training and back on shared GPUs.

    Optimizer states and masters go to host memory and come back, and each GPU's share of the new weights is gathered
    once.
    """
    states = work.trained * TRAINED_BYTES * model.parameters / parts
    between = device.link_gb_s * 1e9 / 2 if gpus <= device.per_machine else device.network_gbit_s * 1e9 / 8
    return 2 * states / (HOST_LINK_GB_S * 1e9) + model.weight_bytes / between
