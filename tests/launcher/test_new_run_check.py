"""A new run whose processes would share a name, or no GPU although they should, is refused; a begun one is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.constants import default_pg_timeout

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.config.weight_sync import COLLECTIVE_S
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


def test_a_begun_run_is_refused_a_cluster_file_with_problems_that_it_has_not_run_with(tmp_path: Path) -> None:
    run = RunConfig.model_validate({"model": {"path": str(tmp_path / "none")}})
    both, sound = cluster("x-0", "rewards", "x"), cluster("x-0", "generate", "x")
    said = "would both have a process or log rewards-x-0"
    with pytest.raises(UserError, match=said):
        preflight.check_files(both, run, resumed=True, before=sound)
    assert said in preflight.check_files(both, run, resumed=True, before=both)[-1]
    for before, refused in ((sound, True), (both, False)):
        with pytest.raises(UserError) as error:  # the model is missing, too
            preflight.check(both, run, tmp_path, emulate=True, resumed=tmp_path, before=before)
        assert (said in str(error.value)) == refused


@pytest.mark.parametrize("site", ["here", "new"])
def test_a_begun_run_is_refused_a_cluster_file_with_cores_that_are_not_there(tmp_path: Path, site: str) -> None:
    run = RunConfig.model_validate({"model": {"path": str(tmp_path / "none")}})
    before = on_ray("cuda", "local")
    values = before.model_dump()
    values["sites"]["here"]["generation"][0]["cores"] = [10**6]
    pinned = ClusterConfig.model_validate(values | {"sites": {site: values["sites"]["here"]}})
    for known, refused in ((before, True), (pinned, False)):
        with pytest.raises(UserError) as error:
            preflight.check(pinned, run, tmp_path, site=site, resumed=tmp_path, before=known)
        assert ("this process may not use 1000000" in str(error.value)) == refused


@pytest.mark.parametrize(
    ("hardware", "trainer", "limits", "longest_s"),
    [
        ("cpu", {"ranks": 2}, {"training_s": 200, "checkpoint_s": 100}, 100),
        ("cuda", {"ranks": 2}, {"training_s": 200, "checkpoint_s": 1600}, 800),
        ("cuda", {"ranks": 2, "tensor_parallel": 2}, {"training_s": 1600}, 800),
        ("cuda", {"ranks": 2, "nodes": 2, "sharding": "hybrid"}, {"training_s": 1600}, 800),
        ("cuda", {"ranks": 4, "tensor_parallel": 2}, {"training_s": 2000}, 300),
        ("cuda", {"ranks": 4, "nodes": 2, "sharding": "hybrid"}, {"training_s": 2000}, 300),
        ("cpu", {"ranks": 4, "nodes": 2, "sharding": "hybrid"}, {"training_s": 20}, 900),
    ],
)
def test_a_push_ends_before_the_trainers_other_ranks_have_waited_too_long_for_it(
    hardware: str, trainer: dict[str, Any], limits: dict[str, float], longest_s: float
) -> None:
    def found(weights_s: float, backend: str = "gloo", **changes: int) -> list[str]:
        deadlines = {"checkpoint_s": 30, **limits, "weights_s": weights_s}
        run = RunConfig.model_validate({"weights": {"backend": backend}, "deadlines": deadlines})
        return list(check_new_run(on_ray(hardware, **(trainer | changes)), run))

    assert found(longest_s) == found(longest_s + 1, "stream") == []
    (problem,) = found(longest_s + 1)
    assert problem.startswith(f"deadlines.weights_s is {longest_s + 1}: with weights.backend: gloo")
    assert f"ends after {2 * longest_s} s (" in problem
    assert f"expected at most {longest_s}, or backend: stream" in problem


def test_the_limits_of_a_push_are_those_of_torch_and_its_defaults_are_taken() -> None:
    assert default_pg_timeout.total_seconds() == COLLECTIVE_S["cpu"]
    run = RunConfig.model_validate({"weights": {"backend": "nccl"}})
    for trainer in ({"ranks": 1}, {"ranks": 2}, {"ranks": 4, "tensor_parallel": 2}):
        assert list(check_new_run(on_ray("cuda", **trainer), run)) == []
