"""A new run whose processes would share a name, or no GPU although they should, is refused; a begun one is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.errors import UserError
from streamrl.launcher import preflight
from streamrl.launcher.new_run_check import check_new_run

IN_TURNS = RunConfig.model_validate({"schedule": {"name": "colocated"}})
AGENTS = RunConfig.model_validate({"tasks": [{"kind": "agent", "name": "a", "path": "x.jsonl", "run": "a:play"}]})


def cluster(home: str, site: str, pool: str) -> ClusterConfig:
    sites = {home: {"trainer": {}, "port": 5600, "rewards": {}}, site: {"generation": [{"name": pool}]}}
    link = {"between": [home, site], "bandwidth_gbit_s": 1, "rtt_ms": 1}
    return ClusterConfig.model_validate({"hardware": "cpu", "sites": sites, "links": [link]})


def on_ray(
    hardware: str, backend: str = "ray", pool: str = "regular", name: str = "here", **trainer: Any
) -> ClusterConfig:
    site = {"launch": {"backend": backend}, "trainer": trainer, "generation": [{"name": pool, "max_replicas": 2}]}
    return ClusterConfig.model_validate({"hardware": hardware, "sites": {name: site}})


def test_processes_and_logs_with_one_name_are_refused() -> None:
    (problem,) = check_new_run(cluster("x-0", "rewards", "x"), RunConfig())
    assert problem == (
        "sites.x-0 (rewards) and sites.rewards.generation (x) would both have a process or log rewards-x-0: expected "
        "different names; rename one of these sites or pools"
    )
    (problem,) = check_new_run(on_ray("cpu", name="trainer", pool="node", ranks=2, nodes=2), RunConfig())
    assert "(trainer) and sites.trainer.generation (node) would both have a process or log trainer-node-1" in problem


@pytest.mark.parametrize(
    "names", [("home", "rewards", "x"), ("rewards", "service", "agents"), ("trainer", "x", "trainer")]
)
def test_other_names_are_taken(names: tuple[str, str, str]) -> None:
    assert list(check_new_run(cluster(*names), AGENTS)) == []


def test_turns_on_gpus_need_trainer_and_instances_on_one_machine() -> None:
    (problem,) = check_new_run(on_ray("cuda"), IN_TURNS)
    assert problem.startswith("schedule: colocated gives the same GPUs to generation and training, and Ray gives")
    assert "sites.here.launch.backend: local" in problem
    for others in (on_ray("cuda", "local"), on_ray("cpu")):
        assert list(check_new_run(others, IN_TURNS)) == []
    assert list(check_new_run(on_ray("cuda"), RunConfig())) == []


def test_a_run_that_has_begun_is_only_warned(tmp_path: Path) -> None:
    run = RunConfig.model_validate({"model": {"path": str(tmp_path / "none")}})
    both = cluster("x-0", "rewards", "x")
    said = "would both have a process or log rewards-x-0"
    with pytest.raises(UserError, match=said):
        preflight.check_files(both, run)
    assert said in preflight.check_files(both, run, resumed=True)[-1]
    for resumed, refused in ((None, True), (tmp_path, False)):
        with pytest.raises(UserError) as error:  # the model is missing, too
            preflight.check(both, run, tmp_path, emulate=True, resumed=resumed)
        assert (said in str(error.value)) == refused
