"""Cost of an optimizer step: time and memory of FSDP training on GPUs of one type. Pure functions.

    compute = (products / matmul rate + attention / attention rate + bytes of activations / bandwidth) / GPUs
              / REACHED + all-reduces of tensor parallelism, or all-to-alls of sequence parallelism
    step    = max(compute, communication) + optimizer + gradients between replicas

The rates are what kernels of each type reach (`hardware.Device`), so a shape with long samples, small layers or a GPU
with much bandwidth for its compute has a utilisation of its own: a roofline (Williams et al., CACM 2009) of three kinds
of work, one after the other.

A rank holds 1/s of weights, gradients and optimizer; s GPUs are a shard group: all of them, or those of each machine
(hybrid sharding). The GPUs are spread evenly over as few machines as hold them, as the ranks of a trainer are; numbers
for which that does not come out, such as 13 on machines of 8, are left out.
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
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from scheduler.cost.hardware import CPU, TENSOR_PARALLEL, Device, machines_of, tensor_parallel_degrees
from scheduler.cost.model_shapes import Transformer, undivided_heads

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
TRAINED_BYTES = 16
"""Bytes per trained weight: fp32 master 4, AdamW's two moments 8, fp32 gradient 4 (ZeRO, arXiv 1910.02054, section 3.1,
with gradients in fp32 as `training/learner.py` reduces them).
"""
FROZEN_BYTES = 2
"""Bytes per weight of a model without gradients: bf16."""
GATHER_BYTES, REDUCE_BYTES = 2, 4
"""Bytes per weight: gathered in bf16, gradients reduced in fp32 (`training/learner.py`)."""
WHOLE_GRADIENT_SHARE = 1 / 8
"""Largest share of a device's memory that a whole fp32 gradient may take for it to be reduced once per step."""
OPTIMIZER_BYTES = 28
"""Bytes per weight that AdamW moves, counted: reads gradient, master and both moments, writes the last three, 4
each."""
NORM_BYTES, QUERY_BYTES, KEY_BYTES, MLP_BYTES = 16, 4, 4, 8
"""Bytes per token that a layer of this trainer keeps for its backward pass, counted in its graph: per hidden unit, of
two norms each the fp32 copy of the input (4), the normalised (2) and the weighted one (2); per unit of the queries, the
rotated ones and the output of attention; per unit of keys or values, both; per unit of the MLP, gate and up
projection, the activation and the product, all in bf16.
"""
COMPILED_NORM_BYTES, COMPILED_MLP_BYTES, COMPILED_GRADIENT_BYTES = 8, 4, 8
"""The same of norms and MLPs that are compiled (`training/compiled_parts.py`), counted in what they save: per hidden
unit, input and output of two norms; per unit of the MLP, gate and up projection, from which the rest is computed again.
And at a time in the backward pass per unit of the MLP: that product, its gradient, and those of both projections.
"""
KEPT_NORM_BYTES, KEPT_QUERY_BYTES, KEPT_KEY_BYTES, KEPT_MLP_BYTES = 6, 6, 4, 4
"""The same where norms and activations are computed again (`selective`): per hidden unit, the input and the outputs of
attention's and of the MLP's last product; of queries, the projection and two outputs of the kernel."""
GRADIENT_BYTES = 4
"""Bytes per token and unit, of the hidden states and of the MLP, of the gradients that a layer's backward pass has at a
time: two in bf16, counted."""
CHECKPOINT_BYTES = 2
"""Bytes per token and hidden unit of one layer that is computed again as a whole: its input in bf16."""
LOGIT_BYTES, LOGITS_AT_ONCE = 6, 2**26
"""Bytes per logit: bf16 (2) and its fp32 copy (4); and the logits that exist at once (`SLAB_BYTES` of
`training/token_logprobs.py`)."""
HEAD_GRADIENT_BYTES = 4
"""Bytes per weight of the output head of its gradient, which sums up over parts of the logits in fp32."""
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
    """Models that an algorithm trains and evaluates on the trainer's GPUs, all of one size but for `critic`."""

    trained: int = 1
    """Models with gradients: the actor, and PPO's critic."""
    forward_only: int = 0
    """Additional forward passes: log-probabilities of the reference and of the proximal copy, values of the critic."""
    frozen: int = 0
    """Models held without gradients: the reference, the proximal copy."""
    recompute: bool | Literal["selective"] = True
    """Activation checkpointing. True: one more forward pass of a trained model, much less memory; selective: without
    the products and attention, less memory (`optimizer.gradient_checkpointing`)."""
    epochs: int = 1
    """Passes over each batch."""
    mini_batches: int = 1
    """Parts of each batch, with an update of the weights for each part and pass."""
    compiled: bool = False
    """Whether norms and MLPs are compiled where they can be (`optimizer.compile`): not with `selective`, nor with
    tensor parallelism."""
    after_batch: float = 0.0
    """Share of the training that begins only once a step has all its groups (`simulation.stages.Stages`)."""
    critic: Transformer | None = None
    """Shape of a critic of another size than the policy's, one of the trained models; None: there is none of another
    size. Only `memory_per_gpu` asks."""

    @property
    def updates(self) -> int:
        """Updates of the weights per step."""
        return self.epochs * self.mini_batches

    @property
    def forwards(self) -> float:
        """Operations of a step, in forward passes."""
        return self.epochs * (self.trained * (4 if self.recompute is True else 3) + self.forward_only)


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


@dataclass(frozen=True)
class TrainerLayout:
    """How a model is spread over GPUs."""

    shard: int
    """Ranks that hold one copy of the weights together (FSDP), beside tensor parallelism."""
    tensor_parallel: int = 1
    whole_gradients: bool = False
    """Whether a rank keeps the gradients of all its layers until the step's end, to reduce them once."""
    sequence_parallel: int = 1
    """Ranks that share each row of tokens (`trainer.sequence_parallel`); they are part of the shards."""
    compiles: bool = True
    """Whether the devices are GPUs, for which parts of a model are compiled (`TrainingWork.compiled`)."""
    whole_gradients_of_critic: bool = False
    """`whole_gradients` of a critic of another size (`TrainingWork.critic`)."""


def reduces_once(weights: float, memory_bytes: float) -> bool:
    """Return whether ranks reduce their gradients once per step (`trainer.reduce_gradients: auto`).

    Args:
        weights: number of weights that a rank has gradients of, before sharding.
        memory_bytes: memory of a rank's device.
    """
    return REDUCE_BYTES * weights <= WHOLE_GRADIENT_SHARE * memory_bytes


def layout_on(
    device: Device, model: Transformer, shard: int, tensor_parallel: int = 1, sequence_parallel: int = 1
) -> TrainerLayout:
    """Return the layout that a trainer takes on devices of a kind."""
    once = shard > 1 and reduces_once(model.parameters / tensor_parallel, device.memory_gb * 1e9)
    return TrainerLayout(shard, tensor_parallel, once, sequence_parallel, device.name != CPU)


def sequence_parallel_degrees(device: Device, model: Transformer) -> list[int]:
    """Return the numbers of ranks inside a machine, 2 and more, that can share rows of tokens."""
    return [
        sharing
        for sharing in TENSOR_PARALLEL
        if model.attends_alone
        and 1 < sharing <= device.per_machine
        and not undivided_heads(model.heads, model.kv_heads, sharing)
    ]


def memory_per_gpu(model: Transformer, work: TrainingWork, layout: TrainerLayout, micro_tokens: float) -> float:
    """Return the bytes that each GPU needs.

    Args:
        model: one size for all roles, but for a critic of another size.
        work: models that are held.
        layout: how they are spread.
        micro_tokens: tokens of a rank's micro-batch, or of that of the ranks that share its rows.
    """
    if work.critic is not None:
        # computes after the policy: the weights that are gathered, and the activations, are those of the larger one
        of_policy, states = _memory_of(model, replace(work, trained=work.trained - 1), layout, micro_tokens)
        its_work = replace(work, trained=1, frozen=0)
        its_layout = replace(layout, whole_gradients=layout.whole_gradients_of_critic)
        of_critic, more = _memory_of(work.critic, its_work, its_layout, micro_tokens, predicts=False)
        return states + more + max(of_policy, of_critic)
    return sum(_memory_of(model, work, layout, micro_tokens))


def _memory_of(
    model: Transformer, work: TrainingWork, layout: TrainerLayout, micro_tokens: float, predicts: bool = True
) -> tuple[float, float]:
    """Return the bytes of models of one size: what they take while one of them computes, and what they always have.

    Without `predicts` they have no output head for tokens.
    """
    tp, parts = layout.tensor_parallel, layout.tensor_parallel * layout.shard
    states = (work.trained * TRAINED_BYTES + work.frozen * FROZEN_BYTES) * model.parameters / parts
    gathered = 2 * GATHER_BYTES * model.parameters / model.layers if layout.shard > 1 else 2.0 * model.parameters
    if layout.whole_gradients:
        states += work.trained * REDUCE_BYTES * model.parameters / tp * (1 - 1 / layout.shard)
    kept, again = _activation_bytes(model, work, layout)
    own = micro_tokens / layout.sequence_parallel
    head, held = (_head_bytes(model, own) / tp, _held_gradient(model, own) / tp) if predicts else (0.0, 0.0)
    return gathered / tp + own * kept + max(head, held + own * again), states


def _head_bytes(model: Transformer, tokens: float) -> float:
    """Return the bytes that the output head takes for a moment, when the layers' results all exist."""
    if model.vocabulary * tokens <= LOGITS_AT_ONCE:  # the logits are gone before the gradient of the weight exists
        return LOGIT_BYTES * model.vocabulary * tokens
    return HEAD_GRADIENT_BYTES * model.vocabulary * model.hidden + LOGIT_BYTES * LOGITS_AT_ONCE


def _held_gradient(model: Transformer, tokens: float) -> float:
    """Return the bytes of the head's gradient, which waits in bf16 until all layers are done."""
    return min(1.0, tokens) * GATHER_BYTES * model.vocabulary * model.hidden


def _key_copies(model: Transformer, layout: TrainerLayout) -> float:
    """Return the ranks that hold each key-value head, of those that share rows."""
    return max(1.0, layout.sequence_parallel / model.kv_heads)


def _activation_bytes(model: Transformer, work: TrainingWork, layout: TrainerLayout) -> tuple[float, float]:
    """Return the bytes of activations per token: kept for the backward pass, and of one layer's backward pass.

    Tensor parallelism splits what is between the projections, not the norms (Korthikanti et al., arXiv 2205.05198,
    table 2, without the attention matrix and without sequence parallelism). A layer's backward pass comes when the head
    is done; it has some gradients at a time, and the whole layer, if that is computed again.

    Ranks that share rows keep what attention needs by heads instead of by tokens. That is as much, but for the copies
    of key-value heads where there are fewer of these than ranks.

    Args:
        model: the model.
        work: models that are held.
        layout: how they are spread.
    """
    tp = layout.tensor_parallel
    queries, keys = model.heads * model.head_size, _key_copies(model, layout) * model.kv_heads * model.head_size
    of_norms, of_mlp, of_gradients = NORM_BYTES, MLP_BYTES, GRADIENT_BYTES
    if work.compiled and layout.compiles and tp == 1 and work.recompute != "selective":
        of_norms, of_mlp, of_gradients = COMPILED_NORM_BYTES, COMPILED_MLP_BYTES, COMPILED_GRADIENT_BYTES
    every = QUERY_BYTES * queries + KEY_BYTES * keys + of_mlp * model.intermediate
    whole = of_norms * model.hidden + every / tp
    gradients = GRADIENT_BYTES * model.hidden + of_gradients * model.intermediate / tp
    if work.recompute == "selective":
        kept = KEPT_QUERY_BYTES * queries + KEPT_KEY_BYTES * keys + KEPT_MLP_BYTES * model.intermediate
        return model.layers * (KEPT_NORM_BYTES * model.hidden + kept / tp), whole + gradients
    if work.recompute:
        return model.layers * CHECKPOINT_BYTES * model.hidden, whole + gradients
    return model.layers * whole, gradients


def usable(device: Device) -> float:
    """Return the bytes of a device that a trainer plans for."""
    return device.memory_gb * 1e9 * USABLE_MEMORY


def smallest_trainer(model: Transformer, work: TrainingWork, device: Device, longest: float) -> int | None:
    """Return how many GPUs of this type hold the model and the longest sample, fully sharded; None: no number does.

    Ranks share rows only if no number holds it otherwise.
    """
    by_layers = [(tp, 1) for tp in tensor_parallel_degrees(device, model.kv_heads)]
    by_rows = [(1, sharing) for sharing in sequence_parallel_degrees(device, model)]
    for degrees in (by_layers, by_rows):
        found = [_smallest(model, work, device, longest, *degree) for degree in degrees]
        if fitting := [gpus for gpus in found if gpus is not None]:
            return min(fitting)
    return None


def _smallest(
    model: Transformer, work: TrainingWork, device: Device, longest: float, tp: int, sharing: int
) -> int | None:
    """Return the fewest GPUs, a multiple of the degrees of tensor and sequence parallelism on each machine."""

    def fits(sets: int) -> bool:
        layout = layout_on(device, model, sets * sharing, tp, sharing)
        return memory_per_gpu(model, work, layout, longest) <= usable(device)

    if not fits(10**9):
        return None
    low = 1
    while not fits(low):
        low *= 2
    lower = low // 2
    while low - lower > 1:
        middle = (low + lower) // 2
        lower, low = (lower, middle) if fits(middle) else (middle, low)
    gpus = low * tp * sharing
    while machines_of(device, gpus, tp * sharing) is None:
        gpus += tp * sharing
    return gpus


def compute_seconds(model: Transformer, work: TrainingWork, device: Device, tokens: float, squares: float) -> float:
    """Return the seconds that one GPU would compute for all passes over samples; see the module.

    Args:
        model: one size for all roles.
        work: models that are trained and evaluated.
        device: the GPU.
        tokens: tokens of all samples together.
        squares: sum of their squared lengths.
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
    heads = 2 * model.heads + 2 * model.kv_heads * _key_copies(model, layout)
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
    free = usable(device) - memory_per_gpu(model, work, layout, 0.0)
    kept, again = _activation_bytes(model, work, layout)
    head = _head_bytes(model, math.inf) / tp
    held = _held_gradient(model, step.must_fit) / tp
    part = step.must_fit / sharing  # of the longest sample, on each rank
    micro = min((free - head) / kept, (free - held) / (kept + again), max(MICRO_BATCH_TOKENS, part))
    if micro < part:
        return None
    ranks = gpus // tp
    whole = compute_seconds(model, work, device, step.tokens, step.squares) / gpus
    longest = compute_seconds(model, work, device, step.longest, step.longest**2) if step.samples else 0.0
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
