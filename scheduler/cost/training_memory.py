"""Memory of FSDP training on GPUs of one type, and which layouts and micro-batches fit. Pure functions.

A rank holds 1/s of weights, gradients and optimizer; s GPUs are a shard group: all of them, or those of each machine
(hybrid sharding). While it computes it has the weights of a layer or two, and what the backward pass needs of the
micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from scheduler.cost.hardware import CPU, TENSOR_PARALLEL, Device, machines_of, tensor_parallel_degrees
from scheduler.cost.model_shapes import Transformer, undivided_heads
from scheduler.cost.trainer_work import TrainingWork

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


def key_copies(model: Transformer, layout: TrainerLayout) -> float:
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
    queries, keys = model.heads * model.head_size, key_copies(model, layout) * model.kv_heads * model.head_size
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


def micro_batch_tokens(
    model: Transformer, work: TrainingWork, device: Device, layout: TrainerLayout, longest: float
) -> float | None:
    """Return the tokens of a rank's largest micro-batch that fits; None: the longest sample does not.

    Args:
        model: one size for all roles.
        work: models that are held.
        device: the kind of GPU.
        layout: how they are spread.
        longest: tokens of the longest sample, of which ranks that share rows have their part.
    """
    tp = layout.tensor_parallel
    free = usable(device) - memory_per_gpu(model, work, layout, 0.0)
    kept, again = _activation_bytes(model, work, layout)
    head = _head_bytes(model, math.inf) / tp
    held = _held_gradient(model, longest) / tp
    part = longest / layout.sequence_parallel
    micro = min((free - head) / kept, (free - held) / (kept + again), max(MICRO_BATCH_TOKENS, part))
    return None if micro < part else micro


def smallest_trainer(
    model: Transformer, work: TrainingWork, device: Device, longest: float, shares_rows: bool = False
) -> int | None:
    """Return how many GPUs of this type hold the model and the longest sample, fully sharded; None: no number does.

    Ranks share rows only if no number holds it otherwise, or with `shares_rows` if that takes fewer.
    """
    by_layers = [(tp, 1) for tp in tensor_parallel_degrees(device, model.kv_heads)]
    by_rows = [(1, sharing) for sharing in sequence_parallel_degrees(device, model)]
    for degrees in ([*by_layers, *by_rows],) if shares_rows else (by_layers, by_rows):
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
