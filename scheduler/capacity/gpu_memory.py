"""Memory of one GPU of a run, phase by phase, and the smallest change of a run that does not fit.

    trains      states, gathered weights and activations of the trainer, and what a sleeping engine leaves behind
    generates   the engine's share of the GPU: weights, activations, KV cache
    starts      that share as a whole, and what an offloaded trainer leaves behind

With GPUs of their own, each phase has its GPU to itself. Under `colocated` both have the same one, in turns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

from scheduler.cost.generation_cost import ENGINE_BYTES
from scheduler.cost.model_shapes import Transformer, undivided_heads
from scheduler.cost.trainer_work import TrainingWork
from scheduler.cost.training_memory import USABLE_MEMORY, TrainerLayout, memory_per_gpu, reduces_once

GIB = 2**30
CONTEXT_BYTES = 1.0 * GIB
"""Bytes that an offloaded trainer keeps: CUDA context, loaded kernels, NCCL, cuBLAS (assumption: nobody has measured it
here; a bare context takes some 0.5 GiB)."""
ASLEEP_BYTES = 2.0 * GIB
"""Bytes that a sleeping engine keeps: context, NCCL, CUDA graphs that its pool does not hold (assumption, as above)."""
FRACTION_STEP = 0.01
MICRO_STEP = 256
"""Tokens by which `batch.micro_batch_tokens` is made smaller."""
MOST_GPUS = 64
"""Largest number of GPUs that a proposal asks for."""
MOST_SHARING = 8
"""Largest number of ranks that a proposal lets share rows: the GPUs of a usual machine, between which the exchanges of
every layer are fast."""


@dataclass(frozen=True)
class MemoryShape:
    """All settings of a run that decide how much memory its GPUs need."""

    model: Transformer
    work: TrainingWork
    micro_tokens: int
    """`batch.micro_batch_tokens`."""
    longest: int
    """Tokens of the longest sample, prompt included (`model.max_context`)."""
    ranks: int
    tensor_parallel: int
    """GPUs over which the trainer splits each layer."""
    gpus_per_replica: int
    fraction: float
    """Share of the GPU that the engine takes (`gpu_memory_fraction`)."""
    shared: bool
    """Whether trainer and engine take turns on one GPU."""
    trainer_gpu_bytes: float
    """Memory of a GPU of the trainer; inf: it is elsewhere, and not asked about."""
    engine_gpu_bytes: float
    """Memory of a GPU of an instance; inf, without turns: it is elsewhere, and not asked about."""
    sequence_parallel: int = 1
    """GPUs of the trainer that share each row of tokens."""
    nodes: int = 1
    """Machines over which `ranks` are spread."""
    in_flight: int = 0
    """Tokens of vLLM's steps that are not over (`generation_cost.tokens_in_flight`), which a window keeps as well."""
    reduction: Literal["auto", "step", "micro_batch"] = "auto"
    """How often the trainer's ranks sum their gradients (`trainer.reduce_gradients`)."""

    @property
    def whole_gradients(self) -> bool:
        """Whether each rank of the trainer keeps the gradients of all its layers, as `training/learner.py` decides."""
        return self._keeps_gradients_of(self.model)

    @property
    def whole_gradients_of_critic(self) -> bool:
        """The same of a critic of another size."""
        return self.work.critic is not None and self._keeps_gradients_of(self.work.critic)

    def _keeps_gradients_of(self, model: Transformer) -> bool:
        if self.reduction == "auto":
            return reduces_once(model.parameters / self.tensor_parallel, self.trainer_gpu_bytes)
        return self.reduction == "step"

    @property
    def consistent(self) -> bool:
        """Whether the trainer's ranks can be divided like this."""
        sharing, trained = self.sequence_parallel, [self.model, *([self.work.critic] if self.work.critic else [])]
        one_way = sharing == 1 or (self.tensor_parallel == 1 and all(one.attends_alone for one in trained))
        divided = not any(undivided_heads(one.heads, one.kv_heads, sharing) for one in trained)
        return one_way and self.ranks // self.nodes % sharing == 0 and divided


@dataclass(frozen=True)
class MemoryPhase:
    """Bytes of a GPU while it trains or generates."""

    name: str
    parts: tuple[tuple[str, float], ...]
    """(What, bytes) of all that has to fit."""
    limit: float
    """Bytes into which it has to fit."""
    rest: str = ""
    """What takes the bytes that are left; '': nothing."""

    @property
    def over(self) -> float:
        """Bytes by which the phase exceeds its limit; 0 or less: it fits."""
        return sum(size for _, size in self.parts) - self.limit

    @property
    def words(self) -> str:
        """The parts, the limit, and whether they fit."""
        parts = [f"{what} {size / GIB:.1f}" for what, size in self.parts]
        if self.over <= 0 and self.rest:
            parts.append(f"{self.rest} {-self.over / GIB:.1f}")
        verdict = f"{self.over / GIB:.1f} GiB too much" if self.over > 0 else "fits"
        return f"{' + '.join(parts)} of {self.limit / GIB:.1f} GiB, {verdict}"

    def __str__(self) -> str:
        return f"{self.name}: {self.words}"


def phases(shape: MemoryShape) -> tuple[MemoryPhase, ...]:
    """Return the phases of the trainer's GPUs and of an instance's; of both together if they share their GPUs."""
    tp, sharing = shape.tensor_parallel, shape.sequence_parallel
    of_critic = shape.whole_gradients_of_critic
    layout = TrainerLayout(max(1, shape.ranks // tp), tp, shape.whole_gradients, sharing, True, of_critic)
    states = memory_per_gpu(shape.model, shape.work, layout, 0.0)
    tokens = max(shape.micro_tokens, shape.longest)
    activations = memory_per_gpu(shape.model, shape.work, layout, tokens) - states
    asleep = (("asleep engine", ASLEEP_BYTES),) if shape.shared else ()
    trains = MemoryPhase(
        "while training",
        (("states and weights", states), (_share(tokens, sharing), activations), *asleep),
        USABLE_MEMORY * shape.trainer_gpu_bytes,
    )
    copies = max(1.0, shape.gpus_per_replica / shape.model.kv_heads)  # more ranks than KV heads hold copies of them
    kept = shape.model.most_cached(shape.longest, shape.in_flight)
    request = shape.model.shape.kv_bytes_per_token * kept * copies / shape.gpus_per_replica
    engine = (
        ("weights", shape.model.weight_bytes / shape.gpus_per_replica),
        ("engine", ENGINE_BYTES),
        (f"KV cache of {shape.longest} tokens", request),
    )
    generates = MemoryPhase("while generating", engine, shape.fraction * shape.engine_gpu_bytes, "more KV cache")
    if not shape.shared:
        return tuple(phase for phase in (trains, generates) if math.isfinite(phase.limit))
    together = MemoryPhase(
        "as vLLM starts",
        (("engine's share", shape.fraction * shape.engine_gpu_bytes), ("offloaded trainer", CONTEXT_BYTES)),
        shape.engine_gpu_bytes,
    )
    return trains, generates, together


def _share(tokens: int, sharing: int) -> str:
    return f"{tokens} tokens" + (f" shared by {sharing} GPUs" if sharing > 1 else "")


def fits(shape: MemoryShape) -> bool:
    """Return whether every phase fits, and ranks can be divided like this."""
    return shape.consistent and all(phase.over <= 0 for phase in phases(shape))


def smallest_change(shape: MemoryShape) -> str:
    """Return the smallest change of a shape that fits, in keys of the run and the cluster file; '': none that is known.

    Changes of one key come before those of two. Of the former, cheap ones come first: smaller micro-batches, gradients
    that each of them reduces, recomputation and rows that ranks share cost time, GPUs cost money, a shorter context
    changes what is learned.
    """
    singles = list(_changes(shape))
    for words, change in singles:
        if fits(replace(shape, **change)):
            return words
    for (words, one), (more, other) in combinations(singles, 2):
        if not one.keys() & other.keys() and fits(replace(shape, **one | other)):
            return f"{words} and {more}"
    return ""


def _changes(shape: MemoryShape) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (words, changed fields), small changes before large ones."""
    for steps in range(1, 100):
        for fraction in (shape.fraction + steps * FRACTION_STEP, shape.fraction - steps * FRACTION_STEP):
            if 0.1 <= fraction <= 0.95:
                yield f"gpu_memory_fraction: {fraction:.2f}", {"fraction": round(fraction, 2)}
    micro = shape.micro_tokens
    if micro > shape.longest:
        while (micro := max(shape.longest, micro - MICRO_STEP)) > shape.longest:
            yield f"batch.micro_batch_tokens: {micro}", {"micro_tokens": micro}
        yield f"batch.micro_batch_tokens: {micro}", {"micro_tokens": micro}
    if (shape.whole_gradients or shape.whole_gradients_of_critic) and shape.ranks > shape.tensor_parallel:
        yield "trainer.reduce_gradients: micro_batch", {"reduction": "micro_batch"}
    if not shape.work.recompute:
        yield "optimizer.gradient_checkpointing: selective", {"work": replace(shape.work, recompute="selective")}
    if shape.work.recompute is not True:
        yield "optimizer.gradient_checkpointing: true", {"work": replace(shape.work, recompute=True)}
    each = shape.gpus_per_replica
    while (each := 2 * each) <= 8 and not undivided_heads(shape.model.heads, shape.model.kv_heads, each):
        yield f"gpus_per_replica: {each}", {"gpus_per_replica": each}
    shared = range(2 * shape.sequence_parallel, MOST_SHARING + 1, shape.sequence_parallel)  # 3 ranks for 9 heads
    for sharing in shared:
        yield f"trainer.sequence_parallel: {sharing}", {"sequence_parallel": sharing}
    for ranks in _doubled(shape.ranks, MOST_GPUS):
        yield f"trainer.ranks: {ranks}", {"ranks": ranks}
    for ranks in _doubled(shape.ranks, MOST_GPUS):  # one change, as a single rank has nobody to share rows with
        for sharing in shared:
            words = f"trainer.ranks: {ranks} with trainer.sequence_parallel: {sharing}"
            yield words, {"ranks": ranks, "sequence_parallel": sharing}
    longest = shape.longest
    while (longest := longest // 2) >= 256:
        yield f"model.max_context: {longest}", {"longest": longest}


def _doubled(count: int, most: int) -> list[int]:
    """Return 2, 4, 8, .. times a number, up to `most`."""
    found = []
    while (count := 2 * count) <= most:
        found.append(count)
    return found
