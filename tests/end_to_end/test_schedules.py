"""Whole runs under the other schedules: real vLLM, real trainer, real processes, a tiny model."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import psutil

from streamrl.generation.instance.eight_bits import device_lacks
from streamrl.machine.cpu import this_cpu
from streamrl.rollouts.ledger import Ledger
from streamrl.run_dir.evaluations import read_evaluations
from streamrl.run_dir.metrics import MetricsRow, read_metrics
from streamrl.run_dir.status import read_status
from streamrl.runtime.warden import ENDS_WITHIN_S
from tests.end_to_end.project import Project, trained_rows, wait_for
from tests.waiting import scaled

SUMS = [{"kind": "reasoning_gym", "name": "chain_sum", "config": {"max_terms": 2}, "answer": "full"}]
EASY = [{"kind": "file", "name": "own", "path": "prompts.jsonl", "reward": "own_rewards:reward"}]
"""With rewards that differ from sample to sample."""
LOADED = re.compile(r"version (\d+) \(\w+\) is loaded by here-regular-0")
"""What a trainer says that pushes weights."""


def easy_prompts(project: Project) -> None:
    """None of them crashes or hangs."""
    (project.folder / "prompts.jsonl").write_text(
        "\n".join(f'{{"prompt": "say {n}", "answer": ""}}' for n in range(99))
    )


def rows_by_step(run_dir: Path) -> dict[int, list[dict[str, object]]]:
    found = defaultdict(list)
    for row in trained_rows(run_dir):
        if row["t_trained"] is not None:
            found[int(row["step"])].append(row)  # type: ignore[call-overload]
    return found


def assert_whole_batches(run_dir: Path, steps: int, bound: int) -> list[MetricsRow]:
    """Every step has trained 6 whole groups of 3, no sample twice, none staler than the bound."""
    by_step = rows_by_step(run_dir)
    assert sorted(by_step) == list(range(1, steps + 1))
    ids = [row["sample_id"] for rows in by_step.values() for row in rows]
    assert len(ids) == len(set(ids)) == 18 * steps
    for step, rows in by_step.items():
        assert len({row["group_id"] for row in rows}) == 6
        for row in rows:
            assert 0 <= step - 1 - min(row["weight_versions"]) <= bound  # type: ignore[call-overload]
    ledger = Ledger(run_dir / "ledger.sqlite")
    assert ledger.trained_ids() == sorted(map(str, ids))
    metrics = read_metrics(run_dir / "metrics.jsonl")
    assert [row.step for row in metrics] == list(range(1, steps + 1))
    return metrics


def test_an_async_run_that_is_killed_goes_on_with_what_was_under_way_and_evaluates(tmp_path: Path) -> None:
    """It generates in int8 where this CPU has kernels for it."""
    project = Project(tmp_path)
    compute = "same" if device_lacks("int8", project.dtype, this_cpu()) else "int8"
    easy_prompts(project)
    changes = {
        "steps": 6,
        "tasks": EASY,
        "schedule": {"name": "async", "max_staleness": 2, "rolling": True, "on_update": "abort_and_requeue"},
        "evaluation": {"every": 2, "prompts": 3, "samples": 2, "tasks": SUMS},
        "model": {"path": str(tmp_path / "model"), "max_context": 160},
        "sampling": {"max_tokens": 48},
        "algorithm": {"name": "grpo", "off_policy": {"ratio_to": "proximal", "correction": "truncate", "high": 2.0}},
        "generation": {"compute": compute},
    }
    process = project.start(**changes)
    run_dir = project.run_dir()
    recorded = run_dir / "evaluations.jsonl"
    # the evaluation of version 0 is not repeated after a checkpoint
    wait_for(
        lambda: (run_dir / "checkpoints" / "step_2").exists() and 0 in [row.step for row in read_evaluations(recorded)],
        400,
        process,
    )
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    psutil.wait_procs(family, timeout=scaled(ENDS_WITHIN_S))
    project.launch("--resume", str(run_dir))
    metrics = assert_whole_batches(run_dir, 6, bound=2)
    assert Ledger(run_dir / "ledger.sqlite").counts() == {"trained": 6 * 18}  # nothing is left open
    indices = {int(str(row["group_id"])) for rows in rows_by_step(run_dir).values() for row in rows}
    assert indices == set(range(36))  # no prompt skipped, none repeated
    assert max(row.staleness_max or 0 for row in metrics) >= 1
    assert all(0 < (row.ess_token or 1) <= 1 for row in metrics)
    status = read_status(run_dir)
    assert status.roles["here-regular-0"].dtype == (project.dtype if compute == "same" else compute)
    assert status.verified.comparisons >= 4 and not status.verified.mismatch and status.refused == {}
    evaluations = read_evaluations(recorded)
    assert [row.step for row in evaluations if row.step in (0, 6)] == [0, 6]
    assert all(row.overall.samples == 9 for row in evaluations)
    audits = [row.length_audit for row in metrics if row.length_audit is not None]
    assert sum(sum(audit.trained) for audit in audits) == 6 * 18
    assert not any(row.length_bias_warning for row in metrics)


def test_ppo_on_devices_that_are_shared_in_turns_and_two_steps_per_publication(tmp_path: Path) -> None:
    project = Project(tmp_path, tail=False)
    easy_prompts(project)
    project.launch(
        tasks=EASY,
        steps=4,
        schedule={"name": "colocated", "sync_every": 2},
        algorithm={
            "name": "ppo",
            "critic": {"lr": 1e-3, "value_clip": 1e-4},
            "whiten_advantages": True,
            "kl": {"coef": 0.01},
        },
        batch={"prompts_per_step": 6, "samples_per_prompt": 3, "micro_batch_tokens": 128, "epochs": 2},
        checkpoint={"every": 2},
    )
    metrics = assert_whole_batches(project.run_dir(), 4, bound=1)
    assert [row.staleness_max for row in metrics] == [0, 1, 0, 1]  # the second step of each publication
    assert all(row.value_loss is not None and row.critic_grad_norm and row.kl_mean is not None for row in metrics)
    assert all(0 < (row.value_clip_fraction or 0) <= 0.5 for row in metrics)  # in the second of two passes only
    ended = {row.step: row.time for row in metrics}
    for step, rows in rows_by_step(project.run_dir()).items():  # those of both steps before the first one's update
        assert max(float(str(row["t_finished"])) for row in rows) < ended[step if step % 2 else step - 1]


def test_partial_rollouts_and_dynamic_sampling_account_for_every_sample(tmp_path: Path) -> None:
    """The model is a mixture of experts whose trainer replays the generator's, also for answers in several parts.

    Its weights go through memory that trainer and instance share.
    """
    project = Project(tmp_path, tail=False, mixture=True)
    easy_prompts(project)
    project.launch(
        tasks=EASY,
        steps=6,  # in one or two a parked sample may end before newer weights are there
        # several times the batchers' slots: when a step has its groups, others have produced only a part
        schedule={
            "name": "stream",
            "rounds": {"kind": "partial_rollouts", "round_tokens": 60, "over_issue": 3, "max_age": 3},
        },
        model={"path": str(tmp_path / "model"), "max_context": 160},
        sampling={"max_tokens": 110},
        algorithm={"name": "dapo", "overlong": None, "entropy_coef": 0.001, "router_replay": True},
        batch={"prompts_per_step": 6, "samples_per_prompt": 3, "micro_batch_tokens": 128, "epochs": 2},
        weights={"backend": "ipc"},
    )
    run_dir = project.run_dir()
    metrics = assert_whole_batches(run_dir, 6, bound=3)
    counts = Ledger(run_dir / "ledger.sqlite").counts()
    assert counts["trained"] == 108  # once, whatever the number of passes
    assert [row.optimizer_updates for row in metrics] == [2] * 6
    assert counts.get("dropped", 0) == 3 * sum(row.groups_dropped or 0 for row in metrics)
    assert sum(row.samples_parked or 0 for row in metrics) > 0
    lengths = [row["output_length"] for rows in rows_by_step(run_dir).values() for row in rows]
    assert max(lengths) == 110  # parked, and gone on to its end
    versions = [set(row["weight_versions"]) for rows in rows_by_step(run_dir).values() for row in rows]  # type: ignore[call-overload]
    assert any(len(some) > 1 for some in versions)
    # the worker refuses a version whose hash is not that of what was sent
    assert set(LOADED.findall((run_dir / "logs" / "trainer.log").read_text())) == set("0123456")
    verified = read_status(run_dir).verified
    assert verified.versions >= 5 and not verified.mismatch


def test_auto_profiles_decides_and_says_why(tmp_path: Path) -> None:
    project = Project(tmp_path, tail=False)
    easy_prompts(project)
    output = project.launch(tasks=EASY, steps=9, schedule={"name": "auto", "profile_steps": 1}, checkpoint={"every": 9})
    run_dir = project.run_dir()
    assert_whole_batches(run_dir, 9, bound=1)
    assert "profiling under colocated" in output and "profiling under stream" in output
    note = read_status(run_dir).schedule_note
    assert "predicted" in note and "against" in note
    chosen = read_status(run_dir).schedule
    assert chosen.startswith("auto: ")
    output = project.launch("--resume", str(run_dir), "--steps", "11")
    assert read_status(run_dir).step == 11 and "profiling" not in output
    assert (read_status(run_dir).schedule, read_status(run_dir).schedule_note) == (chosen, note)
