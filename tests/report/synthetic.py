"""Builds a synthetic run folder: every number in it is made here, so that tests know what must be shown."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from streamrl.controller.length_counts import length_counts
from streamrl.rollouts.length_audit import LengthAudit, StepAudit
from streamrl.run_dir.evaluations import EvaluationRow, Scores
from streamrl.run_dir.jsonl import RowWriter
from streamrl.run_dir.metrics import MetricsRow
from streamrl.run_dir.status import write_status
from streamrl.run_dir.trace import TraceWriter
from streamrl.run_dir.trace_spans import TraceSpans

START = 1_700_000_000.0
STEP_S = 18.0
INSTANCES = ("here-regular-0", "here-regular-1")
TASKS = ("chain_sum", "letter_counting")
RunMaker = Callable[..., Path]


def make_row(step: int, **changes: Any) -> MetricsRow:
    """A metrics row with every figure; reward 0.1 at step 1 and 0.05 more with each step."""
    reward = 0.05 + 0.05 * step
    values: dict[str, Any] = {
        "step": step,
        "time": START + 30 + STEP_S * step,
        "step_time_s": STEP_S + 0.1 * (step % 3),
        "generate_time_s": 9.1,
        "train_time_s": 12.4,
        "bubble_fraction_generation": 0.45,
        "bubble_fraction_training": 0.25,
        "samples_per_s": 3.5,
        "tokens_per_s": 140.0,
        "reward_mean": reward,
        "reward_std": 0.3,
        "loss": 0.012 / step,
        "grad_norm": 1.5 + 0.1 * step,
        "entropy": 1.2 - 0.02 * step,
        "output_length_mean": 31.0,
        "output_length_p50": 23.0,
        "output_length_p90": 90.0,
        "output_length_max": 96.0,
        "staleness_mean": 0.0,
        "staleness_max": 0.0,
        "logprob_gap_mean": 0.008,
        "importance_ratio_max": 1.3,
        "importance_ratio_mean": 1.0,
        "ess_token": 1.0,
        "ess_sequence": 0.9995,
        "masked_fraction": 0.0,
        "truncated_weight_fraction": 0.01,
        "groups_dropped": 0,
        "samples_parked": 3,
        "weight_publications": 1,
        "weight_version": step,
        "weight_bytes_sent": 2 * 269_000_000,
        "weight_sync_exposed_s": 0.7,
        "ranker_recall_at_20": 0.55,
        "ranker_kendall_tau": 0.4,
        "dispatch_by_prediction": True,
        "dispatch_saved": 0.08,
        "dispatch_captured": 0.8,
        "groups_total": 8,
        "groups_no_gradient": 2,
        "samples_total": 64,
        "samples_judged": 67,
        "samples_void": 3,
        "void_rate": 3 / 67,
        "void_rate_by_cause": {"crash": 1 / 67, "timeout": 2 / 67},
        "groups_void": 0,
        "prompts_too_long": 0,
        "truncated_fraction": 0.25,
        "learning_rate": 5e-6,
        "clip_fraction": 0.001,
        "tokens_trained": 1984,
        "reward_by_task": {TASKS[0]: reward + 0.05, TASKS[1]: reward - 0.05},
        "output_length_by_task": {TASKS[0]: 20.0, TASKS[1]: 42.0},
        "environment_s": 2.0,
        "environment_hidden_fraction": 0.75,
        "process_memory_gb": 7.5 + 0.1 * step,
    }
    return MetricsRow(**(values | changes))


def audit_of(step: int = 1, dropped: int = 0, limit: int = 96, limited: bool = True) -> StepAudit:
    """The audit of a step with 64 samples in 64 groups, of which the first `dropped` are too stale."""
    audit, chance = LengthAudit(limit, limited=limited), random.Random(step)
    for index in range(64):
        name, length = f"g{index}", min(limit, int(chance.lognormvariate(3.4, 0.7)) + 1)
        audit.issued(step, name, 1)
        audit.finished(f"{name}.000", name, length)
        if index < dropped:
            audit.dropped(step, name, [length], "too stale")
        else:
            audit.trained(step, name, [length])
    return audit.end_step(step)


def make_evaluation(step: int, greedy: float) -> EvaluationRow:
    """An evaluation of a version with a greedy reward; pass@1 is 0.05 below it and pass@4 0.2 above."""

    def scores(reward: float, prompts: int) -> Scores:
        return Scores(
            prompts=prompts,
            samples=5 * prompts,
            reward_greedy=reward,
            pass_greedy=reward,
            reward_sampled=reward - 0.05,
            pass_at=[reward - 0.05, reward, reward + 0.1, reward + 0.2],
            length_mean=30.0,
            rewards_void=0,
        )

    return EvaluationRow(
        step=step,
        time=START + 40 + STEP_S * step,
        seconds=7.5,
        overall=scores(greedy, 64),
        by_task={TASKS[0]: scores(greedy + 0.02, 32), TASKS[1]: scores(greedy - 0.02, 32)},
        other_version_share=0.0,
    )


def write_evaluations(run_dir: Path, steps: int) -> None:
    """Versions 0, 4, 8, ...; the best greedy reward is 0.4 at version 8 (or the last one)."""
    with RowWriter(run_dir / "evaluations.jsonl", EvaluationRow) as evaluations:
        for step in range(0, steps + 1, 4):
            evaluations.append(make_evaluation(step, 0.1 + 0.0375 * step - (0.27 if step > 8 else 0.0)))


def make_status(step: int, steps: int, now: float, **changes: Any) -> dict[str, Any]:
    """A status of a run whose last update was at `now`."""
    roles: dict[str, Any] = {
        "controller": {
            "role": "controller",
            "state": "running",
            "detail": "",
            "since": START,
            "memory_gb": 0.2,
        },
        "trainer": {
            "role": "trainer",
            "state": "running",
            "detail": "micro-batch 3 of 8",
            "since": START + 20,
        },
        "service-here": {"role": "service", "state": "running", "detail": "", "since": START + 5},
        "rewards-here": {"role": "rewards", "state": "running", "detail": "", "since": START + 4},
    }
    for index, name in enumerate(INSTANCES):
        roles[name] = {
            "role": "instance",
            "state": "running",
            "detail": "[decoding]",
            "since": START + 25,
            "memory_gb": 2.1,
            "running": 12 + index,
            "waiting": 3,
            "tokens_per_s": 411.0,
            "weight_version": step,
        }
    status: dict[str, Any] = {
        "run": "demo",
        "state": "running",
        "step": step,
        "steps": steps,
        "started_at": START,
        "updated_at": now,
        "eta_s": 310.0,
        "schedule": "stream",
        "model": "smollm2-135m",
        "hardware": "cpu",
        "roles": roles,
        "progress": {
            "groups_total": 8,
            "groups_complete": 3,
            "samples_total": 64,
            "samples_finished": 40,
            "samples_trained": 24,
            "tokens_generated": 1240,
            **length_counts([5, 6, 7, 8, 23, 23, 24, 96], np.zeros(0, np.int64)),
        },
        "latest": None,
        "waits": [],
        "error": None,
    }
    return status | changes


def write_rollouts(run_dir: Path, steps: int) -> None:
    """One Parquet file per step with 8 groups of 8 samples in the contract's columns."""
    folder = run_dir / "rollouts"
    folder.mkdir(exist_ok=True)
    chance = random.Random(7)
    for step in range(1, steps + 1):
        records = []
        for group in range(8):
            task = TASKS[group % 2]
            for member in range(8):
                length = min(96, int(chance.lognormvariate(3.0 + group % 2, 0.6)) + 1)
                time = START + 30 + STEP_S * (step - 1) + 9 * length / 96
                records.append(
                    {
                        "sample_id": f"s{step}-{group}-{member}",
                        "group_id": f"s{step}-{group}",
                        "prompt_id": f"{task}:{step * 8 + group}",
                        "task": task,
                        "epoch": 0,
                        "step": step,
                        "prompt": f"What is <{group}> + {member}?",
                        "prompt_tokens": [1, 2, 3],
                        "completion_tokens": [4] * length,
                        "output_length": length,
                        "finish_reason": "length" if length == 96 else "stop",
                        "reward": 1.0 if chance.random() < 0.05 + 0.05 * step else 0.0,
                        "advantage": 0.0,
                        "weight_versions": [step - 1],
                        "site": "here",
                        "instance": INSTANCES[member % 2],
                        "pool": "regular",
                        "route": "tail" if group % 2 else "regular",
                        "predicted_rank": group / 7,  # a column of earlier versions' files
                        "predicted_length": 25.0 + 35.0 * (group % 2),
                        "t_queued": time - 1,
                        "t_finished": time,
                        "reward_error": "Timeout: no answer in 20 s\nmore" if (group, member) == (0, 0) else None,
                    }
                )
        pq.write_table(pa.Table.from_pylist(records), folder / f"step_{step:06d}.parquet")


def write_trace(run_dir: Path, steps: int) -> None:
    """Samples of 1 to 9 s on two instances, and a trainer that works on groups and then steps."""
    chance = random.Random(3)
    with TraceWriter(run_dir / "trace.json") as trace:
        for step in range(1, steps + 1):
            begin = START + 30 + STEP_S * (step - 1)
            for index in range(64):
                length = min(9.0, 1 + chance.lognormvariate(0.7, 0.7))
                trace.async_span(INSTANCES[index % 2], "sample", begin, begin + length, f"s{step}-{index}")
            for group in range(8):
                start = begin + 3 + 1.5 * group
                trace.span("trainer", "micro-batch", start, start + 1.4, group=group)
            trace.span("trainer", "optimizer step", begin + 15.2, begin + 16.4)
            trace.span("trainer", "publish weights", begin + 16.4, begin + 17.6)


def spans_of(path: Path) -> TraceSpans:
    """The finished spans of a trace."""
    spans = TraceSpans(path)
    spans.look()
    return spans


def write_run(
    run_dir: Path,
    steps: int,
    rollouts: bool = True,
    trace: bool = True,
    evaluations: bool = True,
    audit: StepAudit | None = None,
    **status: Any,
) -> None:
    """A whole run folder; `status`: keys of status.json that differ from `make_status`."""
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("run:\n  model:\n    path: smollm2-135m # <resolved>\n")
    with RowWriter(run_dir / "metrics.jsonl", MetricsRow) as metrics:
        for step in range(1, steps + 1):
            metrics.append(make_row(step, length_audit=audit or audit_of(step)))
    if evaluations and steps:
        write_evaluations(run_dir, steps)
    write_status(run_dir, make_status(steps, 20, START + 40 + STEP_S * steps, **status))
    if rollouts:
        write_rollouts(run_dir, max(1, steps))
    if trace:
        write_trace(run_dir, max(1, steps))
