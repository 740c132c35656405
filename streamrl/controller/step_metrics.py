"""The metrics row of a step. Pure: no I/O and no clock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from streamrl.config.run import RunConfig
from streamrl.controller.environment_time import environment_time
from streamrl.controller.length_predictor import StepLengths
from streamrl.controller.spending import Costs
from streamrl.controller.step_batch import StepBatch
from streamrl.controller.step_times import Interval, Traffic
from streamrl.protocol.controller_trainer import StepDone
from streamrl.rollouts.advantage import effective_sample_size
from streamrl.rollouts.canary import mismatch_warning
from streamrl.rollouts.length_audit import StepAudit
from streamrl.rollouts.trajectory import MOST_METRICS, EpisodeStep
from streamrl.rollouts.types import Group, IntArray, Sample, Scored
from streamrl.run_dir.metrics import MetricsRow

LEAST_VARIANCE = 1e-10
"""Variance of the returns, as a share of their mean square, below which it may be rounding in 32 bits."""


def step_metrics(
    batch: StepBatch,
    times: Interval,
    result: StepDone,
    traffic: Traffic,
    prompts_too_long: int,
    memory_gb: float | None,
    predictions: StepLengths,
    audit: StepAudit,
    deferred: int = 0,
    costs: Costs | None = None,
    peak_tflops: float | None = None,
    mismatch_bound: float | None = None,
) -> MetricsRow:
    """Return the metrics row of a finished step.

    Args:
        batch: the step's batch, complete and trained.
        times: the step's times.
        result: the trainer's answer to the optimizer step.
        traffic: traffic with sites during the step.
        prompts_too_long: number of prompts skipped since the start.
        memory_gb: memory of all processes now, GiB.
        predictions: how the step's output lengths compare with what was predicted.
        audit: the length audit of the step.
        deferred: number of samples deferred to a later round.
        costs: cost of the step; None: the cluster file has no prices.
        peak_tflops: dense bf16 peak of all ranks together, TFLOP/s; None: unknown.
        mismatch_bound: largest trainer-generator mismatch expected, nats; None: not known yet.
    """
    groups = batch.groups_trained
    generated = [m.sample for g in groups for m in g.members()]
    survivors = [m.sample for g in groups for m in g.survivors()]
    judged = [m for g in (*groups, *batch.groups_never_trained) for m in g.members()]
    rewards = np.array([reward for g in groups for reward in g.rewards()])
    stats = _totals(batch)
    staleness_mean, staleness_max = _staleness(batch.step, survivors)
    environments = environment_time(_episodes(groups))
    return MetricsRow(
        step=batch.step,
        time=times.ended,
        **_of_times(times, len(survivors), sum(m.sample.output_length for m in judged)),
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std()),
        reward_by_task=_by_task(groups, Group.rewards),
        **_of_objective(stats, batch.earlier_normalizer + batch.normalizer, batch.run),
        grad_norm=result.grad_norm,
        critic_grad_norm=result.critic_grad_norm,
        learning_rate=result.learning_rate,
        **_of_speed(stats, times, peak_tflops),
        **_of_lengths(np.array([s.output_length for s in generated])),
        output_length_by_task=_by_task(groups, lambda group: [float(m.sample.output_length) for m in group.members()]),
        truncated_fraction=float(np.mean([s.finish_reason == "length" for s in generated])),
        length_audit=audit,
        length_bias_warning=audit.warning,
        **_drafts(generated, batch.run),
        staleness_mean=staleness_mean,
        staleness_max=staleness_max,
        mismatch_warning=mismatch_warning(first_mismatch(batch), staleness_max, mismatch_bound),
        weight_version=batch.step,
        weight_publications=len(times.syncs),
        weight_bytes_sent=traffic.nbytes,
        weight_transfer_s=traffic.seconds,
        **_of_costs(costs, len(survivors)),
        groups_total=len(groups),
        groups_no_gradient=batch.no_gradient,
        groups_dropped=len(batch.groups_never_trained),
        groups_not_finite=len(batch.not_finite),
        groups_void=sum(map(batch.too_few_survivors, batch.dropped)),
        samples_total=len(survivors),
        samples_left_out=len(survivors) - sum(len(batch.counted(group)) for group in groups),
        **_of_void(judged),
        samples_parked=deferred,
        prompts_too_long=prompts_too_long,
        agent_metrics_by_task=_agent_metrics(groups),
        environment_s=environments.stepped_s if environments else None,
        environment_hidden_fraction=environments.hidden_fraction if environments else None,
        process_memory_gb=memory_gb,
        step_skipped=result.skipped,
        step_refused=batch.refusal,
        optimizer_updates=batch.update + (not result.skipped),
        **_of_predictions(predictions),
    )


def _totals(batch: StepBatch) -> defaultdict[str, float]:
    """Return the statistics of all updates, micro-batches and ranks together: sums, or maxima (`_max`)."""
    totals: defaultdict[str, float] = defaultdict(float)
    for micro in (*batch.earlier_stats, *batch.stats):
        for key, value in micro.items():
            totals[key] = max(totals[key], value) if key.endswith("_max") else totals[key] + value
    return totals


def _staleness(step: int, samples: Iterable[Sample]) -> tuple[float | None, float | None]:
    """Return by how many versions the sampled tokens are older than the weights of the step: mean and maximum.

    None: no token was sampled, as in episodes that ended before they called the model.
    """
    versions = np.concatenate([sample.sampled_versions for sample in samples])
    if not versions.size:
        return None, None
    staleness = (step - 1) - versions
    return float(staleness.mean()), float(staleness.max())


def _by_task(groups: Iterable[Group], values: Callable[[Group], list[float]]) -> dict[str, float | None]:
    """Return the mean of the groups' values for each task."""
    of_task: dict[str, list[float]] = {}
    for group in groups:
        of_task.setdefault(group.task, []).extend(values(group))
    return {task: float(np.mean(of_task[task])) for task in sorted(of_task)}


def _of_times(times: Interval, samples: int, tokens: int) -> dict[str, Any]:
    """Return the figures of a step's times; none of one in which the clock was set."""
    if not times.seconds:
        return {}
    return {
        "step_time_s": times.seconds,
        "generate_time_s": times.generate_s,
        "train_time_s": times.train_s,
        "instances": times.instances,
        "bubble_fraction_generation": times.generation_bubble,
        "bubble_fraction_training": times.training_bubble,
        "samples_per_s": samples / times.seconds,
        "tokens_per_s": tokens / times.seconds,
        "weight_sync_exposed_s": times.exposed_sync_s,
    }


def _of_speed(stats: Mapping[str, float], times: Interval, peak_tflops: float | None) -> dict[str, Any]:
    """Return how fast the trainer computed; None where the time, the operations or the peak is not known."""
    tflops = stats["flops"] / times.learn_s / 1e12 if stats["flops"] and times.learn_s else None
    return {
        "train_tokens_per_s": stats["row_tokens"] / times.learn_s if times.learn_s else None,
        "train_tflops": tflops,
        "mfu": tflops / peak_tflops if tflops and peak_tflops else None,
    }


def _of_costs(costs: Costs | None, samples: int) -> dict[str, Any]:
    """Return what the step cost; no figure without prices."""
    if costs is None:
        return {"usd": None, "usd_by_process": {}, "usd_per_1k_samples": None}
    usd = sum(sum(of_site.values()) for of_site in costs.values())
    return {"usd": usd, "usd_by_process": costs, "usd_per_1k_samples": 1000 * usd / samples}


def _of_void(judged: Collection[Scored]) -> dict[str, Any]:
    """Return how many of the judged samples are void, and why."""
    causes = Counter(one.void.cause for one in judged if one.void)
    return {
        "samples_judged": len(judged),
        "samples_void": causes.total(),
        "void_rate": causes.total() / len(judged),
        "void_rate_by_cause": {cause.value: count / len(judged) for cause, count in sorted(causes.items())},
    }


def _of_predictions(predictions: StepLengths) -> dict[str, Any]:
    """Return how good the predicted lengths were, and what dispatch gained by them."""
    measured, saving = predictions.measured, predictions.saving
    return {
        "ranker_recall_at_20": measured.recall_at_20 if measured else None,
        "ranker_kendall_tau": measured.kendall_tau if measured else None,
        "ranker_refit_s": predictions.refit_s,
        "dispatch_by_prediction": predictions.dispatched_by,
        "dispatch_saved": saving.saved if saving else None,
        "dispatch_captured": saving.captured if saving else None,
    }


def _of_lengths(lengths: IntArray) -> dict[str, Any]:
    """Return the figures of output lengths, in tokens."""
    return {
        "output_length_mean": float(lengths.mean()),
        "output_length_p50": float(np.percentile(lengths, 50)),
        "output_length_p90": float(np.percentile(lengths, 90)),
        "output_length_max": float(lengths.max()),
    }


def _of_objective(stats: Mapping[str, float], normalizer: float, run: RunConfig) -> dict[str, Any]:
    """Return the figures of the objective: loss, log-probabilities, weights, values.

    Args:
        stats: sums and maxima over the step's micro-batches; 0 for a key that none of them has.
        normalizer: what the loss is divided by.
        run: the run.
    """
    tokens = stats["tokens"]
    has_critic = run.algorithm.advantage == "gae"

    def per_token(key: str, count: float = tokens) -> float | None:
        return stats[key] / count if count else None

    def effective(total: str, squares: str, count: float) -> float | None:
        return effective_sample_size(stats[total], stats[squares], int(count)) if tokens else None

    return {
        "loss": stats["loss_sum"] / normalizer,
        "entropy": per_token("entropy_sum", stats["entropy_tokens"]),
        "logprob_gap_mean": per_token("mismatch_sum"),
        "importance_ratio_max": stats["ratio_max"] if tokens else None,
        "importance_ratio_mean": per_token("ratio_sum"),
        "ess_token": effective("weight_sum", "weight_sq_sum", tokens),
        "ess_sequence": effective("seq_weight_sum", "seq_weight_sq_sum", stats["sequences"]),
        "masked_fraction": per_token("masked"),
        "clip_fraction": per_token("clipped"),
        "outside_truncation_fraction": per_token("outside") if run.sampling.truncates else None,
        "truncated_weight_fraction": per_token("truncated"),
        "kl_mean": per_token("kl_sum") if run.algorithm.needs_reference else None,
        "tokens_trained": int(tokens),
        "value_loss": stats["value_loss_sum"] / normalizer if has_critic else None,
        "value_clip_fraction": per_token("value_clipped") if has_critic else None,
        "explained_variance": _explained_variance(stats) if has_critic else None,
    }


def first_mismatch(batch: StepBatch) -> float | None:
    """Return the mean |difference| of log-probabilities in the step's first update, nats; None: it had no tokens.

    Later updates begin with weights that the step itself has moved.
    """
    first = batch.first_stats if batch.update else batch.stats
    tokens = sum(micro["tokens"] for micro in first)
    return sum(micro["mismatch_sum"] for micro in first) / tokens if tokens else None


def _episodes(groups: Iterable[Group]) -> Iterator[list[EpisodeStep]]:
    """Yield what each episode of the groups did."""
    for group in groups:
        for member in group.survivors():
            if (trajectory := member.sample.trajectory) is not None:
                yield trajectory.steps


def _agent_metrics(groups: Iterable[Group]) -> dict[str, dict[str, float | None]]:
    """Return the means of the numbers that agents returned, by task and name; each over the survivors that have it."""
    found: dict[str, dict[str, list[float]]] = {}
    for group in groups:
        for member in group.survivors():
            if (trajectory := member.sample.trajectory) is None:
                continue
            for name, value in trajectory.metrics.items():
                found.setdefault(group.task, {}).setdefault(name, []).append(value)
    return {
        task: {name: float(np.mean(found[task][name])) for name in sorted(found[task])[:MOST_METRICS]}
        for task in sorted(found)
    }


def _explained_variance(stats: Mapping[str, float]) -> float | None:
    """Return 1 - Var(return - value) / Var(return) over the batch's tokens; the error's mean is taken as 0.

    None: the returns are equal, as far as their rounding lets one say.
    """
    tokens = stats["tokens"]
    if not tokens:
        return None
    mean_square = stats["return_sq_sum"] / tokens
    variance = mean_square - (stats["return_sum"] / tokens) ** 2
    known = variance > LEAST_VARIANCE * mean_square
    return 1.0 - stats["value_sq_error_sum"] / tokens / variance if known else None


def _drafts(generated: Sequence[Sample], run: RunConfig) -> dict[str, Any]:
    """Return the figures of speculative decoding over samples; none without it."""
    if run.speculation.method == "none":
        return {}
    drafted, accepted = Counter[str](), Counter[str]()
    for sample in generated:
        drafted[sample.route] += sample.drafted_tokens
        accepted[sample.route] += sample.accepted_tokens
    return {
        "drafted_tokens": drafted.total(),
        "accepted_tokens": accepted.total(),
        "accepted_by_route": {
            route: accepted[route] / count if count else None for route, count in sorted(drafted.items())
        },
    }
