"""From what happened in a step to its metrics row: pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamrl.control.batch import Batch
from streamrl.control.lengths import StepLengths
from streamrl.observe.metrics import MetricsRow

Span = tuple[float, float]


@dataclass(frozen=True)
class StepTimes:
    """When things happened in a step (unix seconds)."""

    started: float
    """End of the previous step."""
    ended: float
    """All instances serve the new weights."""
    optimizer_ended: float
    """The optimizer step was done; from here on generation waits for weights."""
    trainer_spans: list[Span]
    """When the trainer computed: micro-batches, optimizer step, making weights."""


def covered(spans: Iterable[Span], start: float, end: float) -> float:
    """Seconds of [start, end] in at least one span."""
    total, reached = 0.0, start
    for left, right in sorted(spans):
        left, right = max(left, reached), min(right, end)
        if right > left:
            total += right - left
            reached = right
    return total


def step_metrics(
    batch: Batch,
    times: StepTimes,
    instances: list[str],
    result: dict[str, Any],
    weight_bytes: int,
    prompts_too_long: int,
    has_reference: bool,
    memory_gb: float | None,
    predictions: StepLengths,
) -> MetricsRow:
    """The row of a finished step.

    Args:
        batch: the step's batch, complete and trained.
        times: when things happened.
        instances: names of all instances (idle ones count as bubbles).
        result: the optimizer step's `grad_norm` and `learning_rate`.
        weight_bytes: bytes sent over links for the new version.
        prompts_too_long: prompts skipped since the start.
        has_reference: there is a KL term.
        memory_gb: memory of all processes now, GiB.
        predictions: how the step's output lengths compare with what was predicted.
    """
    scored = [m for g in batch.groups.values() for m in g.members()]
    samples = [m.sample for m in scored]
    lengths = np.array([s.output_length for s in samples])
    rewards = np.array([m.reward for m in scored])
    duration = times.ended - times.started
    busy: dict[str, list[Span]] = {name: [] for name in instances}
    for s in samples:
        busy.setdefault(s.instance, []).append((s.t_dispatched, s.t_finished))
    by_instance = [covered(spans, times.started, times.ended) for spans in busy.values()]
    training = covered(times.trainer_spans, times.started, times.ended)
    stats: dict[str, float] = defaultdict(float)
    for micro in batch.stats:
        for key, value in micro.items():
            stats[key] = max(stats[key], value) if key == "ratio_max" else stats[key] + value
    tokens = stats["tokens"]
    staleness = (batch.step - 1) - np.concatenate([s.token_versions for s in samples])

    def per_token(key: str, count: float) -> float | None:
        return stats[key] / count if count else None

    def by_task(values: np.ndarray) -> dict[str, float | None]:
        tasks = np.array([g.task for g in batch.groups.values() for _ in g.members()])
        return {str(task): float(values[tasks == task].mean()) for task in sorted(set(tasks))}

    return MetricsRow(
        step=batch.step,
        time=times.ended,
        step_time_s=duration,
        generate_time_s=covered([span for spans in busy.values() for span in spans], times.started, times.ended),
        train_time_s=training,
        bubble_fraction_generation=1.0 - float(np.mean(by_instance)) / duration,
        bubble_fraction_training=1.0 - training / duration,
        samples_per_s=len(samples) / duration,
        tokens_per_s=float(lengths.sum()) / duration,
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std()),
        loss=stats["loss_sum"] / batch.loss_tokens,
        grad_norm=result["grad_norm"],
        entropy=per_token("entropy_sum", stats["entropy_tokens"]),
        output_length_mean=float(lengths.mean()),
        output_length_p50=float(np.percentile(lengths, 50)),
        output_length_p90=float(np.percentile(lengths, 90)),
        output_length_max=float(lengths.max()),
        staleness_mean=float(staleness.mean()),
        staleness_max=float(staleness.max()),
        logprob_gap_mean=per_token("gap_sum", tokens),
        importance_ratio_max=stats["ratio_max"] if tokens else None,
        weight_version=batch.step,
        weight_bytes_sent=weight_bytes,
        weight_sync_exposed_s=times.ended - times.optimizer_ended,
        groups_total=len(batch.groups),
        groups_no_gradient=batch.no_gradient,
        samples_total=len(samples),
        reward_errors=sum(m.error is not None for m in scored),
        prompts_too_long=prompts_too_long,
        truncated_fraction=float(np.mean([s.finish_reason == "length" for s in samples])),
        learning_rate=result["learning_rate"],
        clip_fraction=per_token("clipped", tokens),
        kl_mean=per_token("kl_sum", tokens) if has_reference else None,
        tokens_trained=int(tokens),
        reward_by_task=by_task(rewards),
        output_length_by_task=by_task(lengths),
        process_memory_gb=memory_gb,
        ranker_recall_at_20=predictions.measured.recall_at_20 if predictions.measured else None,
        ranker_kendall_tau=predictions.measured.kendall_tau if predictions.measured else None,
        dispatch_by_prediction=any(group.forecast is not None for group in batch.groups.values()),
        dispatch_saved=predictions.saving.saved if predictions.saving else None,
        dispatch_captured=predictions.saving.captured if predictions.saving else None,
    )
