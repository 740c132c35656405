"""A run file that trains, but perhaps not as its author expects, is told so before the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamrl.config.load import load_cluster, load_run
from streamrl.config.run import RunConfig
from streamrl.launcher import preflight
from streamrl.launcher.run_warnings import run_warnings

ROOT = Path(__file__).parents[2]
RLOO = {"name": "rloo"}
PROXIMAL = {"name": "grpo", "off_policy": {"ratio_to": "proximal"}}
CORRECTED: list[dict[str, Any]] = [
    {"name": "rloo", "off_policy": {"correction": "truncate"}},
    {"name": "grpo", "off_policy": {"ratio_to": "proximal", "correction": "truncate"}},
    {"name": "grpo"},
]
STALE: list[tuple[dict[str, Any], str]] = [
    ({"name": "async", "max_staleness": 4}, "async"),
    ({"name": "one_step_off"}, "one_step_off"),
    ({"name": "auto"}, "auto"),
    ({"name": "stream", "rounds": {"kind": "partial_rollouts", "round_tokens": 16}}, "stream with rounds"),
    ({"name": "sync", "rounds": {"kind": "tail_batching", "max_age": 2}}, "sync with rounds"),
]


def warnings(**keys: Any) -> list[str]:
    return list(run_warnings(RunConfig.model_validate(keys)))


@pytest.mark.parametrize(("schedule", "named"), STALE, ids=[named for _, named in STALE])
def test_a_loss_that_takes_old_samples_for_new_ones_is_told(schedule: dict[str, Any], named: str) -> None:
    (warning,) = warnings(schedule=schedule, algorithm=RLOO)
    assert warning.startswith(f"schedule {named} may train on samples of older weights, and algorithm.surrogate: rein")
    assert "off_policy.correction: truncate weighs" in warning
    (warning,) = warnings(schedule=schedule, algorithm=PROXIMAL)
    assert "off_policy.ratio_to: proximal without a correction" in warning and "or ratio_to: generator, w" in warning
    for algorithm in CORRECTED:
        assert warnings(schedule=schedule, algorithm=algorithm) == []


def test_samples_of_the_last_published_weights_are_no_older_ones() -> None:
    for name in ("stream", "sync", "colocated"):
        assert warnings(schedule={"name": name}, algorithm=RLOO) == []
        assert warnings(schedule={"name": name, "sync_every": 4}, algorithm=PROXIMAL) == []
    several: dict[str, Any] = {"name": "async", "sync_every": 3}
    assert warnings(schedule=several | {"max_staleness": 2}, algorithm=PROXIMAL) == []
    assert len(warnings(schedule=several | {"max_staleness": 3}, algorithm=PROXIMAL)) == 1


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_loss_that_takes_samples_of_8_bit_weights_for_the_trainers_is_told(kind: str) -> None:
    sent = {"generation_dtype": kind}
    (warning,) = warnings(weights=sent, algorithm=RLOO)
    assert warning.startswith(f"weights.generation_dtype: {kind} samples from weights that are not quite")
    assert "algorithm.surrogate: reinforce without a correction" in warning
    (warning,) = warnings(weights=sent, algorithm=PROXIMAL)
    assert "off_policy.ratio_to: proximal without a correction" in warning
    for algorithm in CORRECTED:
        assert warnings(weights=sent, algorithm=algorithm) == []
    assert warnings(weights={"generation_dtype": "same"}, algorithm=RLOO) == []


def test_a_learning_rate_that_is_never_reached_is_told() -> None:
    assert warnings(steps=20, optimizer={"warmup_steps": 21}) == [
        "optimizer.lr is never reached: optimizer.warmup_steps is 21, and the run has 20 steps"
    ]
    assert warnings(steps=20, optimizer={"warmup_steps": 20}) == []
    (warning,) = warnings(steps=20, optimizer={"warmup_steps": 20, "decay": "cosine"})
    assert warning.startswith("optimizer.decay: cosine never begins")
    assert warnings(steps=20, optimizer={"warmup_steps": 19, "decay": "cosine"}) == []
    (warning,) = warnings(steps=1, optimizer={"decay": "linear"})
    assert warning == "optimizer.decay: linear never begins: the run has a single update, with optimizer.lr"
    assert warnings(steps=1, schedule={"name": "sync"}, batch={"mini_batches": 2}, optimizer={"decay": "linear"}) == []
    (warning,) = warnings(steps=20, algorithm={"name": "ppo", "critic": {"warmup_steps": 30}})
    assert warning.startswith("algorithm.critic.lr is never reached: algorithm.critic.warmup_steps is 30")


def test_weights_that_are_never_published_are_told() -> None:
    for schedule in ({"name": "stream"}, {"name": "async", "max_staleness": 20}):
        assert warnings(steps=20, schedule={**schedule, "sync_every": 20}) == []
        (warning,) = warnings(steps=20, schedule={**schedule, "sync_every": 21})
        assert warning.startswith("schedule.sync_every is 21, and the run has 20 steps: all of them train on")


def test_a_number_of_drafted_tokens_without_a_drafter_is_told() -> None:
    (warning,) = warnings(speculation={"most_tokens": 4})
    assert warning.startswith("speculation.most_tokens is 4, and nothing is drafted with method: none")
    for speculation in ({}, {"most_tokens": 8}, {"method": "auto", "most_tokens": 4}):
        assert warnings(speculation=speculation) == []


def test_the_plan_of_several_sites_says_it_as_well() -> None:
    cluster = load_cluster(ROOT / "cluster_configs/heterogeneous.yaml")
    run = load_run(None, ["schedule={name: async}", "algorithm={name: rloo}"])
    assert any("takes them for new ones" in warning for warning in preflight.check_files(cluster, run))
