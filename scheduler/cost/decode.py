"""Generation time: step time by batch size, and the exact time of an instance that decodes a set of requests.

    tau(b, c) = base(b) + per_context_token * c        seconds per decode step at batch b, c tokens of context in all

`base` comes from measurements (calibration) or from a roofline. Every running request gets one token per step. So an
instance that starts with lengths L_1 >= L_2 >= ... >= L_n and takes no further requests needs

    T = sum_j tau(j) (L_j - L_(j+1)) = sum_j (tau(j) - tau(j - 1)) L_j,     L_(n+1) = 0, tau(0) = 0:

the j-th longest request costs its length times the *marginal* step time of the j-th batch slot. Context adds
per_context_token * sum_i (P_i L_i + L_i^2 / 2), P_i the prompt's tokens, in any order.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler.cost.hardware import Device
from scheduler.cost.step_measurement import describe_fall, steepest_fall

Floats = npt.NDArray[np.float64]

MOST_POINTS = 1_000
"""Most batch sizes of a calibration: measurements have some dozens, and no other site's may keep its reader busy."""


@dataclass(frozen=True)
class StepCurve:
    """Step time of one instance by batch size."""

    batches: tuple[int, ...]
    """Batch sizes of the points, ascending."""
    seconds: tuple[float, ...]
    """base(b) at each batch size."""
    per_context_token: float = 0.0
    """Seconds per step and token of context (prompt and generated, over the whole batch)."""
    per_prefill_token: float = 0.0
    """Seconds per prefilled prompt token."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hash, computed once: step times are looked up by curve at every placement among unequal instances."""
        return hash((self.batches, self.seconds, self.per_context_token, self.per_prefill_token))

    def __post_init__(self) -> None:
        if not self.batches or len(self.batches) != len(self.seconds):
            raise ValueError(f"a step curve needs as many times as batches, got {len(self.seconds)}, {self.batches}")
        if list(self.batches) != sorted(set(self.batches)) or self.batches[0] < 1:
            raise ValueError(f"a step curve's batch sizes must ascend from 1 or more, got {self.batches}")
        if not all(np.isfinite(value) and value > 0 for value in self.seconds):
            raise ValueError(f"a step curve's times must be positive, got {self.seconds}")
        if any(later < earlier for earlier, later in itertools.pairwise(self.seconds)):
            raise ValueError(f"a step curve's times must not fall with the batch (see `measured`), got {self.seconds}")
        if not all(np.isfinite(rate) and rate >= 0 for rate in (self.per_context_token, self.per_prefill_token)):
            raise ValueError("a step curve's time per context or prefill token must not be negative")

    @classmethod
    def measured(
        cls, points: dict[int, float], per_context_token: float = 0.0, per_prefill_token: float = 0.0
    ) -> StepCurve:
        """Fit a curve through measured points.

        Where noise makes a larger batch look faster, both get their mean (pool adjacent violators): more work never
        makes a step faster.
        """
        sizes = sorted(points)
        blocks: list[tuple[float, int]] = []
        for size in sizes:
            blocks.append((points[size], 1))
            while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
                (right, m), (left, n) = blocks.pop(), blocks.pop()
                blocks.append(((left * n + right * m) / (n + m), n + m))
        values = [value for value, count in blocks for _ in range(count)]
        return cls(tuple(sizes), tuple(values), per_context_token, per_prefill_token)

    @classmethod
    def mean(cls, curves: Sequence[StepCurve]) -> StepCurve:
        """Average several measurements of the same kind of instance, at every batch size that one of them has.

        Raises:
            ValueError: there is no curve.
        """
        if not curves:
            raise ValueError("there is no step curve to average")
        sizes = sorted({size for curve in curves for size in curve.batches})
        points = {size: float(np.mean([curve.base(size) for curve in curves])) for size in sizes}
        context = float(np.mean([curve.per_context_token for curve in curves]))
        return cls.measured(points, context, float(np.mean([curve.per_prefill_token for curve in curves])))

    def to_json(self) -> dict[str, Any]:
        """Return the contents of a calibration file, as `from_json` reads them."""
        points = {str(batch): seconds for batch, seconds in zip(self.batches, self.seconds, strict=True)}
        return {
            "step_seconds": points,
            "per_context_token": self.per_context_token,
            "per_prefill_token": self.per_prefill_token,
        }

    @classmethod
    def from_json(cls, values: Any) -> StepCurve:
        """Read a calibration; other keys are ignored, and a file without the times per token leaves them out.

        Raises:
            ValueError: a key is missing or has a wrong value, there are more than `MOST_POINTS` batch sizes, or step
                times fall with the batch beyond noise; the message names the key.
        """
        points = values.get("step_seconds") if isinstance(values, dict) else None
        if not isinstance(points, dict) or not points:
            raise ValueError('expected "step_seconds" with seconds by batch size, like {"1": 0.02, "32": 0.08}')
        if len(points) > MOST_POINTS:
            raise ValueError(f'"step_seconds" has {len(points):,} batch sizes; expected at most {MOST_POINTS:,}')
        try:
            measured = {int(batch): float(seconds) for batch, seconds in points.items()}
            rates = [float(values.get(key, 0.0)) for key in ("per_context_token", "per_prefill_token")]
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"a calibration holds numbers: {error}") from error
        if all(seconds > 0 for seconds in measured.values()) and (fall := steepest_fall(measured)) is not None:
            raise ValueError(
                f'"step_seconds": {describe_fall(measured, *fall)}; expected times that do not fall with the batch, '
                "measured while the machine does nothing else"
            )
        return cls.measured(measured, *rates)

    def step(self, batch: npt.ArrayLike, context: npt.ArrayLike) -> Floats:
        """Return tau(batch, context) in seconds; `context`: tokens of context of the whole batch."""
        return self.base(batch) + self.per_context_token * np.asarray(context, dtype=np.float64)

    @cached_property
    def _slope(self) -> float:
        """Seconds per request beyond the last point: the slope of the last segment."""
        if len(self.batches) == 1:
            return self.seconds[0] / self.batches[0]
        return (self.seconds[-1] - self.seconds[-2]) / (self.batches[-1] - self.batches[-2])

    @cached_property
    def _points(self) -> tuple[Floats, Floats]:
        return np.asarray(self.batches, dtype=np.float64), np.asarray(self.seconds)

    def base(self, batch: npt.ArrayLike) -> Floats:
        """Return base(b), also for fractional batches, in seconds.

        Linear between the points, constant below the first, with the last segment's slope above; 0 for an empty batch.
        """
        b = np.asarray(batch, dtype=np.float64)
        inside = np.interp(b, *self._points)
        beyond = np.maximum(b - self.batches[-1], 0.0) * self._slope
        return np.where(b > 0, inside + beyond, 0.0)

    def table(self, largest: int) -> Floats:
        """Return base(0), base(1) .. base(largest): [largest + 1]."""
        return self.base(np.arange(largest + 1))

    def scaled(self, factor: float) -> StepCurve:
        """Return a curve on which every step takes `factor` times as long."""
        return StepCurve(
            self.batches,
            tuple(value * factor for value in self.seconds),
            self.per_context_token * factor,
            self.per_prefill_token * factor,
        )


PAPER_7B_H800 = StepCurve(
    (1, 8, 16, 32, 64, 128, 256, 512), (8.4e-3, 9e-3, 9.5e-3, 10.3e-3, 11.7e-3, 15.3e-3, 21e-3, 37e-3)
)
"""Per-token latency of a 7B model on an H800 with vLLM (StreamRL, arXiv 2504.15930, PTL row)."""


UNKNOWN_CURVE = StepCurve((1, 2), (1.0, 1.05))
"""Stand-in for an instance whose step time was not measured: small batches are hardly faster (memory-bound)."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes that determine what a decode step moves and computes."""

    parameters: float
    """Number of weights that every token is multiplied with: all but the embedding's lookup."""
    layers: int
    kv_width: int
    """Numbers in keys and values per token and layer (2 x KV heads x head size)."""
    hidden: int
    kv_heads: int
    bytes_per_number: float = 2.0
    head: float = 0.0
    """Number of weights of the output head, of `parameters`."""

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of KV cache per token of context."""
        return self.layers * self.kv_width * self.bytes_per_number


QWEN_7B = ModelShape(7.07e9, 28, 2 * 4 * 128, 3584, 4, head=0.545e9)
"""Qwen2.5-7B (its config.json), without its embedding."""

MEMORY_EFFICIENCY = 0.8
"""Share of peak bandwidth that decode kernels reach: an assumption within measured values
(docs/explanation/cost_model.md)."""
COMPUTE_EFFICIENCY = 0.6
"""Share of the peak matrix rate that decode's thin products reach: an assumption (docs/explanation/cost_model.md)."""
STEP_OVERHEAD_S = 3e-3
"""Seconds of scheduling, sampling and kernel launches per engine step: an assumption
(docs/explanation/cost_model.md)."""
ALLREDUCE_LATENCY_S = 12e-6
"""Start-up seconds of one all-reduce inside a machine: an assumption (docs/explanation/cost_model.md)."""


def roofline(
    model: ModelShape, device: Device, tensor_parallel: int = 1, reads: tuple[float, float] = (0.0, 1.0)
) -> StepCurve:
    """Compute a step curve from peak rates, which is exact at every batch size, however large.

    A step reads all weights once and computes 2 operations per weight and request; the slower of both counts. KV reads
    add to it. The output head is computed for tokens that predict, so not for those of a prompt. Tensor parallelism
    divides all of these and adds two all-reduces per layer; of more ranks than KV heads, several hold and read the same
    head.

    Source: the roofline model (Williams et al., CACM 2009) on a decoder's weights, KV cache and products.

    Args:
        model: sizes of the model.
        device: the kind of GPU.
        tensor_parallel: GPUs of an instance.
        reads: what a request reads of its cache per step, as tokens in all layers: so many, and this share of its
            context (`generation_cost.reads_of`).
    """
    bandwidth = device.memory_bandwidth_gb_s * 1e9 * MEMORY_EFFICIENCY * tensor_parallel
    compute = device.bf16_tflops * 1e12 * COMPUTE_EFFICIENCY * tensor_parallel
    kink = max(1, int(model.bytes_per_number * compute / (2.0 * bandwidth)))  # from there on, products take longer
    sizes = sorted({1, kink, kink + 1, 2 * (kink + 1)})  # straight lines between, and the last one goes on
    copies = max(1.0, tensor_parallel / model.kv_heads)
    per_token_read = model.kv_bytes_per_token * copies / bandwidth
    fixed, of_context = reads
    seconds = []
    for batch in sizes:
        step = max(model.parameters * model.bytes_per_number / bandwidth, 2.0 * model.parameters * batch / compute)
        if tensor_parallel > 1:
            share = 2.0 * (tensor_parallel - 1) / tensor_parallel
            moved = share * batch * model.hidden * model.bytes_per_number / (device.link_gb_s * 1e9 / 2)
            step += 2 * model.layers * (ALLREDUCE_LATENCY_S + moved)
        seconds.append(step + STEP_OVERHEAD_S + per_token_read * fixed * batch)
    return StepCurve(
        tuple(sizes),
        tuple(seconds),
        per_context_token=per_token_read * of_context,
        per_prefill_token=2.0 * (model.parameters - model.head) / compute,
    )


def replica_time(
    lengths: npt.ArrayLike, curve: StepCurve, prompts: npt.ArrayLike = 0.0, slots: int | None = None
) -> float:
    """Return the seconds until one instance has finished requests; see `replica_ends`, prompts not prefilled."""
    return float(replica_ends(lengths, curve, prompts, slots).max(initial=0.0))


def replica_ends(
    lengths: npt.ArrayLike,
    curve: StepCurve,
    prompts: npt.ArrayLike = 0.0,
    slots: int | None = None,
    prefilled: bool = False,
) -> Floats:
    """Return [n] when each request of one instance ends, in seconds: the times of the simulator, without its events.

    Requests start in the given order, as slots get free.

    Args:
        lengths: [n] tokens to generate.
        curve: step time of the instance.
        prompts: [n] or one number: tokens of context that each request begins with.
        slots: largest number of requests at once; None: all of them.
        prefilled: whether each prompt is prefilled when its request starts, which stalls the instance.

    Raises:
        ValueError: `slots` is below 1.
    """
    tokens = np.asarray(lengths, dtype=np.float64)
    count = len(tokens)
    if slots is not None and slots < 1:
        raise ValueError(f"an instance needs at least one slot, got {slots}")
    begun = np.broadcast_to(np.asarray(prompts, dtype=np.float64), (count,))
    stalls = begun * (curve.per_prefill_token if prefilled else 0.0)
    if slots is not None and count > slots:
        return _ends_with_refills(tokens.tolist(), curve, begun.tolist(), slots, stalls.tolist())
    order = np.argsort(tokens, kind="stable")
    until = tokens[order]
    steps = np.diff(until, prepend=0.0)
    running = np.arange(count, 0, -1)
    context = np.cumsum(begun[order][::-1])[::-1] + running * (until - steps)
    seconds = steps * curve.table(count)[running] + curve.per_context_token * steps * (context + running * steps / 2)
    ends = np.empty(count)
    ends[order] = np.cumsum(seconds) + stalls.sum()
    return ends


def _ends_with_refills(
    lengths: Sequence[float], curve: StepCurve, prompts: Sequence[float], slots: int, stalls: Sequence[float]
) -> Floats:
    """Return [n] the ends of requests of which some wait for a slot; arguments as for `replica_ends`."""
    tau, extra = curve.table(slots).tolist(), curve.per_context_token
    running: list[tuple[float, int]] = []  # (decode step at which it ends, request)
    ends = [0.0] * len(lengths)
    step = now = context = 0.0
    for number, length in enumerate(lengths):
        if len(running) < slots:
            now += stalls[number]
            context += prompts[number]
            heapq.heappush(running, (step + length, number))
            continue
        until, ended = running[0]  # written out here as well: this is where plans of large batches spend their time
        steps = until - step
        now += steps * tau[slots] + extra * steps * (context + slots * steps / 2)
        context += slots * steps - prompts[ended] - lengths[ended]
        step, ends[ended] = until, now
        now += stalls[number]
        context += prompts[number]
        heapq.heapreplace(running, (until + length, number))
    while running:
        batch = len(running)
        until, ended = heapq.heappop(running)
        steps = until - step
        now += steps * tau[batch] + extra * steps * (context + batch * steps / 2)
        context += batch * steps - prompts[ended] - lengths[ended]
        step, ends[ended] = until, now
    return np.asarray(ends)
