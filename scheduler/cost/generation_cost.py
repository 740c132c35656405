"""How fast replicas of a GPU type generate a batch of known lengths, for planning how many of them to use.

Requests spread evenly over like replicas are a fluid: while A of the batch still run on r replicas, each decodes A / r
of them, and a step takes tau(A / r); what exceeds the slots waits, at the pace of full batches. With L_1 >= L_2 >= ...

    makespan(r) = sum_j (g(j / r) - g((j - 1) / r)) L_j + context / r,   g(x) = tau(min(x, slots)) x / min(x, slots).

A share f of the batch, drawn evenly from all lengths, takes r replicas as long as the whole takes r / f. So under a
deadline t a replica of kind k is good for a share c_k(t) = 1 / (replicas that generate all of it in t), shares of
different kinds add up, and what generates a batch by t is a covering problem: sum_k r_k c_k(t) >= 1.

Where generation goes on across steps (async), only rates matter: a replica with a requests at once makes a / tau(a)
tokens a second. Two bounds stay: a request's mean time may not exceed a step (as many run as a batch has; the other
batch that one step of staleness allows waits for training), and the longest must end within the staleness.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from scheduler.cost.decode import Floats, StepCurve, roofline
from scheduler.cost.hardware import Device
from scheduler.cost.model_shapes import Transformer
from scheduler.cost.training_cost import HOST_LINK_GB_S, StepTokens

GPU_MEMORY_FRACTION = 0.90
"""Share of a GPU's memory that the engine takes: assumption between what a pool asks for where its file says nothing
(0.85, `gpu_memory_fraction`) and vLLM 0.32's default of `gpu_memory_utilization` (0.92, vllm/config/cache.py)."""
ENGINE_BYTES = 2e9
"""Of a GPU, for the engine's activations and CUDA graphs (assumption, no published figure was found)."""
MOST_SLOTS = 256
"""Sequences decoded together at most, where nothing else is said: vLLM 0.32's default of `max_num_seqs` for an A100 and
for GPUs below 70 GiB (vllm/engine/arg_utils.py). Larger ones get 1,024 there; one value for all is an assumption."""
LENGTHS = 512
"""Quantiles of the lengths that the fluid is computed on."""
GRID = 96
"""Numbers of replicas at which a makespan is computed; between them it is interpolated on logarithms."""
TENSOR_PARALLEL = (1, 2, 4, 8)
"""Degrees that are tried: the divisors of a machine of 8."""
STALENESS = 1
"""Steps that async samples may be old (StreamRL's async, arXiv 2504.15930)."""


@dataclass(frozen=True)
class Batch:
    """What one optimizer step generates and trains on."""

    lengths: tuple[float, ...]
    """Quantiles of the answers' lengths, longest first; each stands for as many samples."""
    samples: int
    prompt_tokens: float = 0.0
    """Mean."""
    longest: float = 0.0
    """Tokens of the longest answer that must fit; 0: of the longest length."""

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) <= 0 or not np.isfinite(self.lengths).all():
            raise ValueError("a batch needs lengths, all of them positive")
        if list(self.lengths) != sorted(self.lengths, reverse=True):
            raise ValueError("a batch's lengths come longest first")
        if self.samples < 1 or self.prompt_tokens < 0:
            raise ValueError(f"a batch needs samples and no negative prompts: {self.samples}, {self.prompt_tokens}")

    @classmethod
    def of(cls, lengths: Floats, samples: int, prompt_tokens: float, longest: float = 0.0) -> Batch:
        """From a sample of lengths, of any size."""
        count = min(samples, LENGTHS)
        if not len(lengths):
            raise ValueError("no lengths are given")
        values = np.quantile(lengths, 1 - (np.arange(count) + 0.5) / count)
        return cls(tuple(np.maximum(values, 1.0).tolist()), samples, prompt_tokens, longest)

    @property
    def most_tokens(self) -> float:
        """Of a sample with its prompt."""
        return max(self.longest, self.lengths[0]) + self.prompt_tokens

    @property
    def mean_length(self) -> float:
        return float(np.mean(self.lengths))

    @property
    def step_tokens(self) -> StepTokens:
        """What is trained on."""
        whole = np.asarray(self.lengths) + self.prompt_tokens
        each = self.samples / len(self.lengths)
        return StepTokens(
            float(whole.sum()) * each, float((whole * whole).sum()) * each, self.most_tokens, self.samples
        )

    @property
    def running_context(self) -> float:
        """Tokens of context that a running request has on average over time: half of its answer and its prompt."""
        values = np.asarray(self.lengths)
        return self.prompt_tokens + float((values * values).sum() / values.sum() / 2)


@dataclass(frozen=True)
class ReplicaKind:
    """Replicas of one GPU type and one degree of tensor parallelism."""

    device: Device
    tensor_parallel: int
    slots: int
    curve: StepCurve
    batch: Batch = field(repr=False)
    _times: tuple[tuple[float, ...], ...] = field(repr=False)
    """For makespans and for rates: deadlines, ascending; shares that one replica is good for (0 before the first)."""
    _shares: tuple[tuple[float, ...], ...] = field(repr=False)

    def share(self, deadline: float, steady: bool) -> float:
        """Share of the batch that one replica generates by a deadline; never falls with it.

        Args:
            deadline: seconds.
            steady: generation goes on across steps; else the batch starts and ends by itself.
        """
        times, shares = self._times[steady], self._shares[steady]
        number = bisect_right(times, deadline)
        if number == 0:
            return 0.0
        if number == len(times):
            return shares[-1] * deadline / times[-1]
        before, after = times[number - 1], times[number]
        part = (deadline - before) / (after - before)
        return shares[number - 1] + part * (shares[number] - shares[number - 1])

    def load_seconds(self, model: Transformer) -> float:
        """To load a version from host memory, generation paused."""
        return model.weight_bytes / self.tensor_parallel / (HOST_LINK_GB_S * 1e9)


def slots_of(model: Transformer, device: Device, tensor_parallel: int, batch: Batch, most: int = MOST_SLOTS) -> int:
    """Requests that a replica holds at once: its KV cache by their mean context; 0: not even the longest one fits."""
    free = free_bytes(model, device, tensor_parallel)
    # with more ranks than KV heads, each rank holds a copy
    per_token = model.shape.kv_bytes_per_token * max(1.0, tensor_parallel / model.kv_heads)
    if free < per_token * batch.most_tokens:
        return 0
    return max(1, min(most, int(free / (per_token * batch.running_context))))


def free_bytes(model: Transformer, device: Device, tensor_parallel: int) -> float:
    """Of a replica's GPUs together, for the KV cache; negative: the weights do not fit."""
    each = device.memory_gb * 1e9 * GPU_MEMORY_FRACTION - (ENGINE_BYTES if device.memory_gb > 10 else 0.0)
    return tensor_parallel * each - model.weight_bytes


def degrees(model: Transformer, device: Device) -> list[int]:
    """Tensor-parallel degrees that split the heads and stay inside a machine."""
    return [tp for tp in TENSOR_PARALLEL if tp <= device.per_machine and model.heads % tp == 0]


@lru_cache(maxsize=256)
def replica_kind(
    model: Transformer, device: Device, tensor_parallel: int, batch: Batch, most: int = MOST_SLOTS
) -> ReplicaKind | None:
    """What one replica does; None: model or longest request do not fit."""
    slots = slots_of(model, device, tensor_parallel, batch, most)
    if slots < 1:
        return None
    curve = roofline(model.shape, device, tensor_parallel, max(2, slots))
    made = [_makespans(curve, slots, batch), _rates(curve, slots, batch)]
    return ReplicaKind(
        device, tensor_parallel, slots, curve, batch, tuple(times for times, _ in made), tuple(s for _, s in made)
    )


def makespans(curve: StepCurve, slots: int, batch: Batch, replicas: Floats) -> Floats:
    """[n] seconds in which so many replicas (also fractions) generate the batch; see the module."""
    lengths = np.asarray(batch.lengths)
    each = batch.samples / len(lengths)
    alive = np.arange(len(lengths) + 1) * each / replicas[:, None]
    running = np.minimum(alive, slots)
    cost = curve.base(running) + np.maximum(alive - slots, 0.0) * float(curve.base(slots)) / slots
    return np.diff(cost, axis=1) @ lengths + _reading(curve, batch) / replicas


def _reading(curve: StepCurve, batch: Batch) -> float:
    """Seconds that context and prompts cost, if one replica did all."""
    lengths = np.asarray(batch.lengths)
    context = (batch.prompt_tokens * lengths + lengths * lengths / 2).mean()
    return batch.samples * float(curve.per_context_token * context + curve.per_prefill_token * batch.prompt_tokens)


def _makespans(curve: StepCurve, slots: int, batch: Batch) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(deadlines, shares). Beyond one request per replica more replicas do not help."""
    replicas = np.geomspace(batch.samples, min(0.05, batch.samples / slots / 8), GRID)
    times = makespans(curve, slots, batch, replicas)
    return _ascending(times, 1 / replicas)


def _rates(curve: StepCurve, slots: int, batch: Batch) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(deadlines, shares) where generation goes on: with a requests at once, the batch's tokens take one replica
    samples x mean x tau(a) / a, and the reading. The deadline decides how many requests at once are allowed."""
    sizes = np.unique(np.geomspace(1, slots, GRID).round())
    steps = curve.base(sizes)
    mean = batch.mean_length
    reading = _reading(curve, batch)
    # while a request runs, its replica reads for all of them
    latency = mean * steps + reading / batch.samples * sizes
    longest = batch.lengths[0] / mean * latency / (1 + STALENESS)
    alone = batch.samples * latency / sizes
    allowed = np.maximum(latency, longest)
    best = np.maximum.accumulate(1 / alone)
    # at a deadline t >= allowed, a replica makes t / alone of a batch
    times: list[float] = []
    shares: list[float] = []
    for number, begin in enumerate(allowed):
        end = allowed[number + 1] if number + 1 < len(allowed) else begin * 2
        for t in (begin, end):
            times.append(float(t))
            shares.append(float(t * best[number]))
    return _ascending(np.asarray(times), np.asarray(shares))


def _ascending(times: Floats, shares: Floats) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Without repeated times (the largest share counts) and never falling."""
    order = np.lexsort((shares, times))
    times, shares = times[order], np.maximum.accumulate(shares[order])
    last = np.append(times[1:] > times[:-1], True)
    return tuple(times[last].tolist()), tuple(shares[last].tolist())


def finish_profile(kind: ReplicaKind, replicas: float, batch: Batch) -> Floats:
    """[lengths] when each quantile's samples end, shortest first, as shares of the makespan."""
    lengths = np.asarray(batch.lengths)
    each = batch.samples / len(lengths)
    alive = np.arange(1, len(lengths) + 1) * each / replicas
    running = np.minimum(alive, kind.slots)
    pace = kind.curve.base(running) * np.maximum(alive / kind.slots, 1.0)
    gaps = lengths - np.append(lengths[1:], 0.0)
    ends = np.cumsum((pace * gaps)[::-1])
    return ends / ends[-1]
