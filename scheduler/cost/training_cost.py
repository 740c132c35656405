"""Cost of an optimizer step: time and memory of FSDP training on GPUs of one type. Pure functions.

    compute = operations / (GPUs x peak x utilisation)
    step    = max(compute, communication) + optimizer + gradients between replicas

A rank holds 1/s of weights, gradients and optimizer; s GPUs are a shard group, and there may be several (hybrid
sharding). Every micro-batch gathers the weights of all layers for the forward and again for the backward pass, and
scatters the gradients; these overlap with compute (FSDP prefetches the next layer), so the slower of both counts.
A trained model costs a forward pass and a backward pass of twice that, and with recomputed activations one more
forward; a model that is only evaluated costs one forward. Samples are not split: no rank is done before the longest
sample is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from scheduler.cost.hardware import Device
from scheduler.cost.model_shapes import Transformer

TRAINING_UTILISATION = 0.40
"""Share of the peak that executed operations reach: an assumption within measured values
(docs/explanation/cost_model.md).

Recomputed forward passes count as executed (hardware FLOPs utilisation; PaLM's MFU, arXiv 2204.02311 appendix B, leaves
them out), and attention counts half of the sequence. Counted so, FSDP on H100 reaches 0.50, 0.44 and 0.30 for MPT 7B at
4k, 8k and 32k tokens and 0.56 for 70B at 2k (MosaicML's llm-foundry, scripts/train/benchmarking/README.md, whose HFU
counts the whole sequence: 0.54, 0.50, 0.41, 0.57). MFU on H100: 0.38 to 0.43 for Llama 3 405B (arXiv 2407.21783,
table 4), 0.33 to 0.39 for 8B under FSDP2 (torchtitan, benchmarks/llama3_h100_202412_torchtitan.md).
"""
TRAINED_BYTES = 16
"""Bytes per trained weight: fp32 master 4, AdamW's two moments 8, fp32 gradient 4 (ZeRO, arXiv 1910.02054, section 3.1,
with gradients in fp32 as `training/learner.py` reduces them).
"""
FROZEN_BYTES = 2
"""Bytes per weight of a model without gradients: bf16."""
GATHER_BYTES, REDUCE_BYTES = 2, 4
"""Bytes per weight: gathered in bf16, gradients reduced in fp32 (`training/learner.py`)."""
OPTIMIZER_BYTES = 28
"""Bytes per weight that AdamW moves, counted: reads gradient, master and both moments, writes the last three, 4
each."""
LAYER_ACTIVATION_BYTES = 34
"""Bytes per token and hidden unit of one layer without its attention matrix (Korthikanti et al., arXiv 2205.05198)."""
CHECKPOINT_BYTES = 2
"""Bytes per token and hidden unit of one layer whose activations are recomputed: its input in bf16."""
LOGIT_BYTES, LOGIT_TOKENS = 12, 1024
"""Bytes per logit: bf16 (2), its fp32 copy (4), its gradient (4) and the bf16 one (2), counted; and the number of
tokens whose logits exist at once (assumption: the loss is computed in chunks).
"""
MICRO_BATCH_TOKENS = 32_768
"""Largest number of tokens of a rank's micro-batch (assumption), unless the longest sample has more: beyond some 10^4,
larger ones do not fill the device better.
"""
USABLE_MEMORY = 0.90
"""Share of a device's memory that a trainer plans for (assumption: the rest is CUDA context, NCCL, fragmentation)."""
HOST_LINK_GB_S = 25.0
"""Rate from device to host memory, each way: 80 % (assumption) of the 32 GB/s of PCIe gen 4 x16, half of the 64 GB/s
for both directions in the L40S's table (scheduler/cost/hardware.py). Gen 5 machines (H100 and later) have twice that.
"""


@dataclass(frozen=True)
class TrainingWork:
    """Models that an algorithm trains and evaluates on the trainer's GPUs, all of one size."""

    trained: int = 1
    """Models with gradients: the actor, and PPO's critic."""
    forward_only: int = 0
    """Additional forward passes: log-probabilities of the reference, values of the critic."""
    frozen: int = 0
    """Models held without gradients: the reference."""
    recompute: bool = True
    """Activation checkpointing: one more forward pass of a trained model, much less memory."""

    @property
    def forwards(self) -> float:
        """Operations of a step, in forward passes."""
        return self.trained * (4 if self.recompute else 3) + self.forward_only


PPO = TrainingWork(trained=2, forward_only=2, frozen=1)
"""Actor and critic are trained; reference and critic are evaluated once (old log-probabilities are the generator's)."""
GRPO = TrainingWork()


@dataclass(frozen=True)
class StepTokens:
    """Tokens that one optimizer step trains on."""

    tokens: float
    """Tokens of prompts and answers together."""
    squares: float
    """Sum of the samples' squared lengths."""
    longest: float
    """Tokens of the longest sample that must fit."""
    samples: int


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

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return max(self.compute_s, self.communication_s) + self.optimizer_s


def memory_per_gpu(model: Transformer, work: TrainingWork, shard: int, micro_tokens: float) -> float:
    """Return the bytes that each of `shard` GPUs needs.

    Args:
        model: one size for all roles.
        work: models that are held.
        shard: GPUs that hold one copy together.
        micro_tokens: tokens of a rank's micro-batch.
    """
    states = (work.trained * TRAINED_BYTES + work.frozen * FROZEN_BYTES) * model.parameters / shard
    gathered = 2 * GATHER_BYTES * model.parameters / model.layers if shard > 1 else 2.0 * model.parameters
    head = LOGIT_BYTES * model.vocabulary * min(micro_tokens, LOGIT_TOKENS)
    return states + gathered + head + micro_tokens * _activation_bytes(model, work)


def _activation_bytes(model: Transformer, work: TrainingWork) -> float:
    """Return the bytes of activations per token of a micro-batch."""
    if work.recompute:
        return model.hidden * (model.layers * CHECKPOINT_BYTES + LAYER_ACTIVATION_BYTES)
    return model.hidden * model.layers * LAYER_ACTIVATION_BYTES


def usable(device: Device) -> float:
    """Return the bytes of a device that a trainer plans for."""
    return device.memory_gb * 1e9 * USABLE_MEMORY


def smallest_trainer(model: Transformer, work: TrainingWork, device: Device, longest: float) -> int | None:
    """Return how many GPUs of this type hold the model and the longest sample, fully sharded; None: no number does."""
    fixed = memory_per_gpu(model, work, 10**9, longest)
    if fixed >= usable(device):
        return None
    low = 1
    while memory_per_gpu(model, work, low, longest) > usable(device):
        low *= 2
    lower = low // 2
    while low - lower > 1:
        middle = (low + lower) // 2
        if memory_per_gpu(model, work, middle, longest) > usable(device):
            lower = middle
        else:
            low = middle
    return low


def _shards(gpus: int, machine: int) -> list[int]:
    """Return the sizes of shard groups that divide the GPUs and align with machine boundaries."""
    return [
        size
        for size in range(1, gpus + 1)
        if gpus % size == 0 and (size == gpus or machine % size == 0 or size % machine == 0)
    ]


def exactly(model: Transformer, work: TrainingWork, device: Device, gpus: int, step: StepTokens) -> TrainerTime | None:
    """Return the time of a step on all of these GPUs with the best shard group; None: it does not fit into memory."""
    peak = device.bf16_tflops * 1e12 * TRAINING_UTILISATION
    network = device.network_gbit_s * 1e9 / 8
    flops = work.forwards * model.forward_flops(step.tokens, step.squares)
    longest = work.forwards * model.forward_flops(step.longest, step.longest**2)
    compute = max(flops / gpus, longest if step.samples else 0.0) / peak
    best: TrainerTime | None = None
    for shard in _shards(gpus, device.per_machine):
        free = usable(device) - memory_per_gpu(model, work, shard, 0.0)
        head = LOGIT_BYTES * model.vocabulary * LOGIT_TOKENS
        micro = min((free - head) / _activation_bytes(model, work), max(MICRO_BATCH_TOKENS, step.longest))
        if micro < step.longest:
            continue
        rounds = max(1, math.ceil(step.tokens / gpus / micro))
        between = device.link_gb_s * 1e9 / 2 if shard <= device.per_machine else network
        per_weight = work.trained * (2 * GATHER_BYTES + REDUCE_BYTES) + work.forward_only * GATHER_BYTES
        moved = rounds * per_weight * model.parameters * (shard - 1) / shard
        optimizer = work.trained * OPTIMIZER_BYTES * model.parameters / shard / (device.memory_bandwidth_gb_s * 1e9)
        replicas = gpus // shard
        if replicas > 1:
            crossing = network if gpus > device.per_machine else device.link_gb_s * 1e9 / 2
            share = 2 * (replicas - 1) / replicas * REDUCE_BYTES * model.parameters / shard
            optimizer += work.trained * share / crossing
        one = TrainerTime(gpus, shard, compute, moved / between, optimizer)
        if best is None or one.seconds < best.seconds:
            best = one
    return best


@lru_cache(maxsize=64)
def trainer_times(
    model: Transformer, work: TrainingWork, device: Device, most: int, step: StepTokens
) -> tuple[TrainerTime | None, ...]:
    """Return [most + 1] the best trainer of at most so many GPUs: more are never slower, since some may stay idle."""
    times: list[TrainerTime | None] = [None]
    for gpus in range(1, most + 1):
        one, before = exactly(model, work, device, gpus, step), times[-1]
        times.append(one if before is None or (one is not None and one.seconds < before.seconds) else before)
    return tuple(times)


def switch_seconds(model: Transformer, work: TrainingWork, device: Device, gpus: int, shard: int) -> float:
    """Return the seconds to change from generation to training and back on shared GPUs.

    Optimizer states and masters go to host memory and come back, and each GPU's share of the new weights is gathered
    once.
    """
    states = work.trained * TRAINED_BYTES * model.parameters / shard
    between = device.link_gb_s * 1e9 / 2 if gpus <= device.per_machine else device.network_gbit_s * 1e9 / 8
    return 2 * states / (HOST_LINK_GB_S * 1e9) + model.weight_bytes / between
