"""Rate at which replicas of a GPU type generate a batch of known lengths, for planning how many replicas to use.

A batch that starts and ends by itself is spread evenly: a replica that generates the share c of it gets c x samples
requests that stand for all lengths, the batch's longest answer among them (`Batch.usual_longest`), and takes as long as
`decode.replica_ends` says (the simulator's time). Where slots are fewer than its requests, the longest start first.
Shares of different kinds add up, so with c_k(t) the share that a replica of kind k generates by t, generating a batch
by t is a covering problem: sum_k r_k c_k(t) >= 1.

Where generation continues across steps (async), only rates matter: a replica with a requests at once makes a / tau(a)
tokens a second. Two bounds remain: a request's mean time may not exceed a step (as many run as a batch has; the other
batch that one step of staleness allows waits for training), and the longest must end within the staleness.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from scheduler.cost.decode import Floats, StepCurve, replica_ends, roofline
from scheduler.cost.hardware import CPU, Device, tensor_parallel_degrees
from scheduler.cost.model_shapes import Transformer, undivided_heads
from scheduler.cost.speculative_decoding import Speculation, speculated
from scheduler.cost.training_cost import HOST_LINK_GB_S, StepTokens

GPU_MEMORY_FRACTION = 0.90
"""Share of a GPU's memory that the engine takes: an assumption between a pool's default (0.85, `gpu_memory_fraction`)
and vLLM 0.32's default of `gpu_memory_utilization` (0.92, vllm/config/cache.py).
"""
ENGINE_BYTES = 2e9
"""Bytes per GPU for the engine's activations and CUDA graphs (assumption; no published figure was found)."""
BATCHED_TOKENS = ((160 * 2**30, 16_384), (70 * 2**30, 8_192), (0, 2_048))
"""Tokens that a step of vLLM 0.32 takes at most on a GPU of so many bytes or more (`get_batch_defaults` in
vllm/engine/arg_utils.py, for a server); on an A100 as many as on the smallest."""
STEPS_IN_FLIGHT = 2
"""Steps that vLLM 0.32 has begun at a time (asynchronous scheduling; with a drafter it has one)."""
LENGTHS = 512
"""Lengths that stand for a batch."""
GRID = 96
"""Numbers of requests for which a replica's time is computed; shares between them are interpolated."""
MOST_QUEUED, MOST_ROUNDS = 10_000, 32
"""Requests, and requests per slot, of a replica beyond both of which its time is taken to grow with their number. From
32 per slot on it does within 0.2 %, be the lengths equal or heavy-tailed."""


def spread_lengths(lengths: Sequence[float] | Floats, count: int) -> Floats:
    """Return [count] lengths that stand for equal shares of all of them, longest first: the mean of each share.

    So their mean is that of all lengths, and no rare long one is lost.
    """
    values = np.sort(np.asarray(lengths, dtype=np.float64))[::-1]
    if len(values) == count:
        return values
    sums = np.concatenate([[0.0], np.cumsum(values)])
    bounds = np.arange(count + 1) * (len(values) / count)
    means = np.diff(np.interp(bounds, np.arange(len(values) + 1), sums)) * (count / len(values))
    return np.sort(np.clip(means, values[-1], values[0]))[::-1]  # differences of sums are rounded


@dataclass(frozen=True)
class Batch:
    """Samples that one optimizer step generates and trains on."""

    lengths: tuple[float, ...]
    """Lengths of answers, longest first; each is the mean of an equal share of all of them."""
    samples: int
    prompt_tokens: float = 0.0
    """Mean prompt length."""
    longest: float = 0.0
    """Tokens of the longest answer that must fit; 0: the longest of `lengths`."""
    group: int = 1
    """Samples of a prompt, which are trained together: a group is complete with its last one."""
    staleness: int = 1
    """Steps that the samples of `async` may be old (1 in StreamRL's async, arXiv 2504.15930)."""
    speculation: Speculation | None = None
    """Speculative decoding of the replicas that generate it; None: they do not speculate."""
    environment_s: float = 0.0
    """Seconds for which an environment steps in one sample; 0: there is none."""
    environment_processes: int = 1
    """Processes of environments, each of which steps for one sample at a time."""

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) <= 0 or not np.isfinite(self.lengths).all():
            raise ValueError("a batch needs lengths, and all of them must be positive")
        if list(self.lengths) != sorted(self.lengths, reverse=True):
            raise ValueError("a batch's lengths must be sorted longest first")
        if self.samples < 1 or self.prompt_tokens < 0:
            raise ValueError(
                f"a batch needs samples >= 1 and prompt_tokens >= 0, got {self.samples}, {self.prompt_tokens}"
            )
        if self.group < 1 or self.staleness < 1:
            raise ValueError(f"a batch needs group >= 1 and staleness >= 1, got {self.group}, {self.staleness}")
        if self.environment_s < 0 or self.environment_processes < 1:
            raise ValueError(
                "a batch needs environment_s >= 0 and environment_processes >= 1, got "
                f"{self.environment_s}, {self.environment_processes}"
            )

    @classmethod
    def of(
        cls,
        lengths: Floats,
        samples: int,
        prompt_tokens: float,
        longest: float = 0.0,
        group: int = 1,
        staleness: int = 1,
    ) -> Batch:
        """Create a batch from any number of observed lengths."""
        if not len(lengths):
            raise ValueError("a batch needs at least one length")
        values = spread_lengths(lengths, LENGTHS)
        return cls(tuple(np.maximum(values, 1.0).tolist()), samples, prompt_tokens, longest, group, staleness)

    @property
    def stepping_s(self) -> float:
        """Seconds for which the environments of all samples step, if no process ever waits."""
        return self.samples * self.environment_s / self.environment_processes

    def played_s(self, generation_s: float, across_steps: bool) -> float:
        """Return the seconds until all samples are generated and played in their environments.

        A sample's steps are put together behind its last token, as in the simulation of whole steps; a sample ends
        when the share of the time has passed that its length is of the longest. From each end on, the processes have
        at least the work of all samples that end then or later.

        Args:
            generation_s: seconds to generate them, without environments.
            across_steps: whether other samples are generated before and after these.
        """
        if across_steps:
            return max(generation_s, self.stepping_s)
        lengths = np.sort(np.asarray(self.lengths))
        left = self.stepping_s * (1.0 - np.arange(len(lengths)) / len(lengths))
        busy = float((np.minimum(lengths / self.usual_longest, 1.0) * generation_s + left).max())
        return max(generation_s + self.environment_s, busy)

    @property
    def longest_answer(self) -> float:
        """Tokens of the longest answer that must fit."""
        return max(self.longest, self.lengths[0])

    @cached_property
    def usual_longest(self) -> float:
        """Tokens of the longest of the batch's answers, mean over batches.

        A batch with fewer samples than `lengths` draws some of them; one with as many has all.
        """
        count = len(self.lengths)
        if self.samples >= count:
            return self.lengths[0]
        none_longer = (1 - np.arange(count + 1) / count) ** self.samples
        longest = float((np.asarray(self.lengths) * (none_longer[:-1] - none_longer[1:])).sum())
        return max(longest, self.mean_length)  # of equal lengths, the sum is rounded to either side of their mean

    @property
    def most_tokens(self) -> float:
        """Tokens of the longest sample with its prompt."""
        return self.longest_answer + self.prompt_tokens

    @cached_property
    def mean_length(self) -> float:
        """Mean answer length in tokens."""
        return float(np.mean(self.lengths))

    def step_tokens(self, model: Transformer) -> StepTokens:
        """Return the tokens that the trainer of a model processes."""
        whole = np.asarray(self.lengths) + self.prompt_tokens
        each = self.samples / len(self.lengths)
        tokens, squares = float(whole.sum()) * each, float(model.pairs(whole).sum()) * each
        longest = self.usual_longest + self.prompt_tokens
        return StepTokens(tokens, squares, longest, self.samples, self.most_tokens)

    @property
    def running_context(self) -> float:
        """Mean tokens of context of a running request over time: half of its answer and its prompt."""
        values = np.asarray(self.lengths)
        return self.prompt_tokens + float((values * values).sum() / values.sum() / 2)

    def in_window(self, window: float) -> float:
        """Return the mean tokens of context of a running request over time that a window holds."""
        return self._over_time(lambda end: np.where(end < window, end**2 / 2, window * (end - window / 2)))

    def line_in_window(self, window: float) -> tuple[float, float]:
        """Return (a, b): of a context of c tokens, a window holds about a + b c, by least squares over time.

        Summed up over all requests, that is exact.
        """
        if self.lengths[0] + self.prompt_tokens <= window:
            return 0.0, 1.0
        held, context = self.in_window(window), self.running_context
        spread = self._over_time(lambda end: end**3 / 3) - context**2
        if spread < 1e-8 * context**2:  # all contexts are about as long, and the rest is rounding
            return held, 0.0
        product = self._over_time(lambda end: np.where(end < window, end**3 / 3, window * end**2 / 2 - window**3 / 6))
        slope = (product - held * context) / spread
        return held - slope * context, slope

    def _over_time(self, integral: Callable[[Floats], Floats]) -> float:
        """Return a mean over requests and time of what depends on the context, by its integral from 0."""
        values = np.asarray(self.lengths)
        begin = np.full_like(values, self.prompt_tokens)
        return float((integral(begin + values) - integral(begin)).sum() / values.sum())


@dataclass(frozen=True)
class ReplicaKind:
    """Replicas of one GPU type and one degree of tensor parallelism."""

    tensor_parallel: int
    slots: int
    curve: StepCurve
    batch: Batch = field(repr=False)
    _times: tuple[tuple[float, ...], ...] = field(repr=False)
    """Deadlines in seconds, ascending: first of makespans, then of rates (indexed by `steady`)."""
    _shares: tuple[tuple[float, ...], ...] = field(repr=False)

    def share(self, deadline: float, steady: bool) -> float:
        """Return the share of the batch that one replica generates by a deadline; it never falls with the deadline.

        Args:
            deadline: seconds.
            steady: generation continues across steps; otherwise the batch starts and ends by itself.
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
        """Return the seconds to load a version from host memory, generation paused."""
        return model.weight_bytes / self.tensor_parallel / (HOST_LINK_GB_S * 1e9)


def replica_degrees(model: Transformer, device: Device) -> list[int]:
    """Return the degrees of tensor parallelism of a replica inside a machine: vLLM divides query and key-value heads,
    and copies the latter where there are fewer of them than GPUs."""
    possible = tensor_parallel_degrees(device, model.heads)
    return [tp for tp in possible if not undivided_heads(model.heads, model.kv_heads, tp)]


def slots_of(model: Transformer, device: Device, tensor_parallel: int, batch: Batch, most: int | None = None) -> int:
    """Return how many requests a replica holds at once: its KV cache divided by what they cache on average.

    At most `most` (None: no such limit) and the whole batch; 0 if not even the longest request fits.
    """
    free = free_bytes(model, device, tensor_parallel)
    if free < request_bytes(model, device, tensor_parallel, batch.most_tokens):
        return 0
    mean = model.cached(batch.running_context, batch.in_window(model.window))
    held = min(batch.samples, int(free / (_token_bytes(model, tensor_parallel) * mean)))
    return max(1, held if most is None else min(held, most))


def request_bytes(model: Transformer, device: Device, tensor_parallel: int, tokens: float) -> float:
    """Return the bytes of KV cache that a request may take on all GPUs of a replica."""
    in_flight = math.inf if device.name == CPU else tokens_in_flight(device.name, device.memory_gb * 1e9)
    return _token_bytes(model, tensor_parallel) * model.most_cached(tokens, in_flight)


def _token_bytes(model: Transformer, tensor_parallel: int) -> float:
    """Return the bytes of a token that all layers cache; with more ranks than KV heads, each rank holds a copy."""
    return model.shape.kv_bytes_per_token * max(1.0, tensor_parallel / model.kv_heads)


def tokens_in_flight(gpu: str, memory_bytes: float, most_requests: int = 0) -> int:
    """Return how many tokens vLLM has in steps that are not over, at most.

    Args:
        gpu: name of the GPU.
        memory_bytes: its memory.
        most_requests: requests at a time (`max_batch`), each of which has a token in a step.
    """
    large = memory_bytes >= BATCHED_TOKENS[0][0] or "a100" not in gpu.lower()
    tokens = next(tokens for least, tokens in BATCHED_TOKENS if memory_bytes >= least and (large or not least))
    return STEPS_IN_FLIGHT * max(tokens, most_requests)


def reads_of(model: Transformer, batch: Batch) -> tuple[float, float]:
    """Return what a running request of a batch reads of its cache per step: tokens, and a share of its context.

    Without windows that is its context. With windows it grows more slowly from the window on, and a line stands for
    that. All requests of a batch together read exactly as much as it says. A short one reads less, down to 0.4 of it,
    and a long one more, up to 1.25 times: of all reading, at most 13 % is counted for other requests than it is of
    (windows of 512 to 4,096 tokens, lengths of the paper's shape of up to 5k to 40k, prompts of 512).
    """
    fixed, share = batch.line_in_window(model.window) if model.windowed else (0.0, 1.0)
    return model.seen(0.0, fixed), model.seen(1.0, share)


def free_bytes(model: Transformer, device: Device, tensor_parallel: int) -> float:
    """Return the bytes of a replica's GPUs that are free for the KV cache; negative: the weights do not fit."""
    each = device.memory_gb * 1e9 * GPU_MEMORY_FRACTION - (ENGINE_BYTES if device.memory_gb > 10 else 0.0)
    return tensor_parallel * each - model.weight_bytes


@lru_cache(maxsize=256)
def replica_kind(
    model: Transformer, device: Device, tensor_parallel: int, batch: Batch, most: int | None = None
) -> ReplicaKind | None:
    """Compute the speed of one replica; None: the model or the longest request does not fit."""
    slots = slots_of(model, device, tensor_parallel, batch, most)
    if slots < 1:
        return None
    curve = roofline(model.shape, device, tensor_parallel, reads_of(model, batch))
    if batch.speculation is not None:
        curve = speculated(curve, batch.speculation, max(2, slots))
    made = [_makespans(curve, slots, batch), _rates(curve, slots, batch)]
    return ReplicaKind(
        tensor_parallel, slots, curve, batch, tuple(times for times, _ in made), tuple(s for _, s in made)
    )


def answers_of(batch: Batch, count: int) -> Floats:
    """Return [count] lengths that stand for equal shares of a batch's answers, longest first.

    Their mean is the batch's, and none is longer than its longest one is on average. The mean of the longest share may
    be: all lengths are then moved towards the mean, in proportion.
    """
    lengths = spread_lengths(batch.lengths, count)
    mean, longest = batch.mean_length, batch.usual_longest
    if lengths[0] > longest and lengths[0] > mean:
        lengths = mean + (lengths - mean) * ((longest - mean) / (lengths[0] - mean))
    return lengths


def requests_of_share(batch: Batch, share: float) -> Floats:
    """Return lengths [n] of the requests that a replica generates of a batch, the batch's longest one first."""
    lengths = answers_of(batch, max(1, round(min(share, 1.0) * batch.samples)))
    lengths[0] = batch.usual_longest
    return lengths


def most_requests(slots: int) -> int:
    """Return how many requests of a replica's share are computed; whole rounds, as equal lengths end together."""
    return slots * max(MOST_ROUNDS, -(-MOST_QUEUED // slots))


def share_ends(curve: StepCurve, slots: int, batch: Batch, lengths: Floats) -> Floats:
    """Return [n] when each of a replica's requests ends, in seconds.

    Args:
        curve: step time of the replica.
        slots: largest number of requests at once.
        batch: what prompts the requests have.
        lengths: [n] from `requests_of_share`.
    """
    return replica_ends(lengths, curve, batch.prompt_tokens, slots, prefilled=True)


def _reading(curve: StepCurve, batch: Batch) -> float:
    """Return the seconds that context and prompts would cost one replica that did all."""
    lengths = np.asarray(batch.lengths)
    context = (batch.prompt_tokens * lengths + lengths * lengths / 2).mean()
    return batch.samples * float(curve.per_context_token * context + curve.per_prefill_token * batch.prompt_tokens)


def _makespans(curve: StepCurve, slots: int, batch: Batch) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return (deadlines, shares) of one replica where a batch starts and ends by itself.

    Larger shares than the last take longer in proportion (`ReplicaKind.share`).
    """
    counts = np.unique(np.geomspace(1, min(batch.samples, most_requests(slots)), GRID).round())
    times = [share_ends(curve, slots, batch, requests_of_share(batch, n / batch.samples)).max() for n in counts]
    return _ascending(np.asarray(times), counts / batch.samples)


def _rates(curve: StepCurve, slots: int, batch: Batch) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return (deadlines, shares) where generation continues across steps.

    With a requests at once, the batch's tokens take one replica samples x mean x tau(a) / a, and the reading of the
    context. The deadline decides how many requests at once are allowed.
    """
    sizes = np.unique(np.geomspace(1, slots, GRID).round())
    steps = curve.base(sizes)
    mean = batch.mean_length
    reading = _reading(curve, batch)
    # while a request runs, its replica reads the context of all of them
    latency = mean * steps + reading / batch.samples * sizes
    longest = batch.usual_longest / mean * latency / (1 + batch.staleness)
    alone = batch.samples * latency / sizes
    allowed = np.maximum(latency, longest)
    best = np.maximum.accumulate(1 / alone)
    # at a deadline t >= allowed, a replica generates t / alone of a batch
    times: list[float] = []
    shares: list[float] = []
    for number, begin in enumerate(allowed):
        end = allowed[number + 1] if number + 1 < len(allowed) else begin * 2
        for t in (begin, end):
            times.append(float(t))
            shares.append(float(t * best[number]))
    return _ascending(np.asarray(times), np.asarray(shares))


def _ascending(times: Floats, shares: Floats) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Sort by time, without repeated times (the largest share counts) and with shares that never fall."""
    order = np.lexsort((shares, times))
    times, shares = times[order], np.maximum.accumulate(shares[order])
    last = np.append(times[1:] > times[:-1], True)
    return tuple(times[last].tolist()), tuple(shares[last].tolist())
