"""Cores and memory of a machine that must suffice for a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.errors import UserError
from streamrl.launcher import capacity_check, preflight
from streamrl.machine.own_share import usable_cores
from tests.launcher.test_preflight import GIB, cluster, make_model


def pinned(**values: object) -> ClusterConfig:
    pool = {"name": "one", "cores": [1, 2]}
    trainer, agents = {"cores": [0, 4, 5]}, {"cores": [6]}
    sites = {
        "here": {"trainer": trainer, "generation": [pool, {"name": "two"}], "agents": agents, "port": 5600} | values,
        "west": {"generation": [{"name": "three", "cores": [7]}]},
    }
    link = {"between": ["here", "west"], "bandwidth_gbit_s": 1, "rtt_ms": 1}
    return ClusterConfig.model_validate({"hardware": "cpu", "sites": sites, "links": [link]})


def test_cores_that_may_not_be_used_are_told_with_those_that_may() -> None:
    run, others = RunConfig(), "or no such key"
    of_pool = (
        f"sites.here.generation (one).cores: this process may not use 2; expected some of the CPU cores 0, 1, {others}"
    )
    of_trainer = (
        f"sites.here.trainer.cores: this process may not use 4, 5; expected some of the CPU cores 0, 1, {others}"
    )
    assert list(capacity_check.check_cores(pinned(), run, {1, 0}, "here")) == [of_pool, of_trainer]
    assert list(capacity_check.check_cores(pinned(), run, {0, 1, 2, 4, 5}, "here")) == []
    (west,) = capacity_check.check_cores(pinned(), run, {0, 1}, "west")
    assert west.startswith("sites.west.generation (three).cores: this process may not use 7;")
    assert list(capacity_check.check_cores(pinned(), run, {0, 1})) == [of_pool, of_trainer, west]
    on_gpus = pinned().model_copy(update={"hardware": "cuda"})  # processes beside GPUs are pinned as well
    assert list(capacity_check.check_cores(on_gpus, run, {0, 1})) == [of_pool, of_trainer, west]


def test_cores_of_agents_count_where_there_are_some() -> None:
    run = RunConfig.model_validate({"tasks": [{"kind": "agent", "name": "a", "run": "m:f", "items": "m:g"}]})
    (problem,) = capacity_check.check_cores(pinned(), run, set(range(6)), "here")
    assert problem.startswith("sites.here.agents.cores: this process may not use 6; ")
    assert list(capacity_check.check_cores(pinned(), RunConfig(), set(range(6)), "here")) == []
    assert list(capacity_check.check_cores(pinned(generation=[]), run, set(range(6)), "here")) == []


def test_cores_of_other_machines_are_not_judged_here() -> None:
    on_ray = pinned(launch={"backend": "ray"})
    (west,) = capacity_check.check_cores(on_ray, RunConfig(), {0})
    assert west.startswith("sites.west.")


def test_cores_are_checked_before_a_run(tmp_path: Path) -> None:
    asked = cluster(cores=[10**6])
    usable = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
    with pytest.raises(UserError) as refused:
        preflight.check(asked, make_model(tmp_path / "m"), tmp_path)
    assert f"cores: this process may not use 1000000; expected some of the CPU cores {usable}, or" in str(refused.value)
    assert usable_cores() == len(os.sched_getaffinity(0))


def test_a_run_on_gpus_that_began_with_some_cores_that_are_not_there_goes_on(tmp_path: Path) -> None:
    said = "sites.here.generation (regular).cores: this process may not use 1000000; "
    for hardware, resumed, told in (("cuda", None, True), ("cuda", tmp_path, False), ("cpu", tmp_path, True)):
        with pytest.raises(UserError) as refused:  # there is no tokenizer either
            preflight.check(cluster(hardware, cores=[0, 10**6]), make_model(tmp_path / "m"), tmp_path, resumed=resumed)
        assert (said in str(refused.value)) == told


def test_computing_threads_far_above_the_cores_are_warned_of() -> None:
    eight = cluster(threads=1)  # 2 ranks of 3, 2 instances of 1
    assert capacity_check.thread_warnings(eight, RunConfig(), cores=4) == []
    assert (
        "8 computing threads, this machine has 3 cores"
        in capacity_check.thread_warnings(eight, RunConfig(), cores=3)[0]
    )


def test_more_processes_and_threads_than_may_be_started_are_warned_of() -> None:
    one = cluster(threads=3)
    (warning,) = capacity_check.task_warnings(one, RunConfig(), 5)
    needed = int(warning.split()[3])
    assert needed > 2 * 3 + 2 * 3 and "5 more may be started here: raise the limit on processes" in warning
    assert capacity_check.task_warnings(one, RunConfig(), needed) == []
    assert capacity_check.task_warnings(one, RunConfig(), needed - 1) != []


def test_instances_that_would_share_the_memory_of_one_numa_node_are_warned_of() -> None:
    free, pinned = cluster(), cluster(cores=[0, 1])
    (warning,) = capacity_check.numa_warnings(free, 2)
    assert "has 2 NUMA nodes, and the instances of regular would all" in warning
    assert capacity_check.numa_warnings(free, 1) == []
    assert capacity_check.numa_warnings(pinned, 2) == []
    assert capacity_check.numa_warnings(cluster("cuda"), 2) == []
    assert capacity_check.numa_nodes() >= 1


@pytest.mark.parametrize("weights", [1, 2])
def test_memory_counts_the_trainer_and_every_instance(weights: int, tmp_path: Path) -> None:
    run = make_model(tmp_path / "m", megabytes=1024 * weights)
    one = cluster(kv_cache_gb=1.5)
    # trainer: 10 copies and 2 processes; two instances: weights, a second copy of one GiB at most, cache, process each
    needed = (10 * weights + 2 + 2 * (weights + 1 + 1.5 + 1)) * GIB
    assert capacity_check.memory_warnings(one, run, needed) == []
    (warning,) = capacity_check.memory_warnings(one, run, needed - 0.1 * GIB)
    total = {1: "21.0", 2: "33.0"}[weights]
    assert f"about {total} GiB of memory, {needed / GIB - 0.1:.1f} GiB are free, 0.1 GiB are missing" in warning


@pytest.mark.parametrize(("own", "critic"), [(None, 1), (4, 4), (0.5, 0.5)])
def test_memory_counts_a_critic_with_its_own_size(own: float | None, critic: float, tmp_path: Path) -> None:
    values = make_model(tmp_path / "m", megabytes=1024).model_dump()
    path = {} if own is None else {"path": make_model(tmp_path / "critic", megabytes=int(1024 * own)).model.path}
    run = RunConfig.model_validate(values | {"algorithm": {"name": "ppo", "critic": path}})
    in_ram = cluster(kv_cache_gb=1.5)
    needed = (10 * (1 + critic) + 2 + 2 * (1 + 1 + 1.5 + 1)) * GIB
    assert capacity_check.memory_warnings(in_ram, run, needed) == []
    assert capacity_check.memory_warnings(in_ram, run, needed - 0.1 * GIB) != []
    on_gpu = ClusterConfig.model_validate({"hardware": "cuda", "sites": {"here": {"trainer": {}, "generation": [{}]}}})
    loading = (2 * max(1, critic) + 1) * GIB
    assert capacity_check.memory_warnings(on_gpu, run, loading) == []
    assert capacity_check.memory_warnings(on_gpu, run, loading - 0.1 * GIB) != []


@pytest.mark.parametrize(
    ("schedule", "ranks", "config", "needed"),  # GiB: model or state, processes
    [
        ("stream", 1, {}, 2 + 1),
        ("stream", 2, {}, 2),  # each reads its slices to its GPU
        ("colocated", 4, {}, 6 + 4),
        ("stream", 2, {"quantization_config": {}}, 2 * 2 + 2),
        ("colocated", 2, {"quantization_config": {}}, 6 + 2),
        ("colocated", 4, {"quantization_config": {}}, 4 * 2 + 4),
    ],
)
def test_host_memory_counts_the_trainer_that_loads_or_waits_in_it(
    schedule: str, ranks: int, config: dict[str, object], needed: int, tmp_path: Path
) -> None:
    run = make_model(tmp_path / "m", megabytes=1024, **config)
    values = run.model_dump() | {"schedule": {"name": schedule}}
    run = RunConfig.model_validate(values)
    site = {"trainer": {"ranks": ranks}, "generation": [{}]}
    on_gpus = ClusterConfig.model_validate({"hardware": "cuda", "sites": {"here": site}})
    assert capacity_check.memory_warnings(on_gpus, run, needed * GIB) == []
    (warning,) = capacity_check.memory_warnings(on_gpus, run, (needed - 0.1) * GIB)
    assert f"about {needed:.1f} GiB of host memory, {needed - 0.1:.1f} GiB are free, 0.1 GiB are missing" in warning
    alone = capacity_check.memory_warnings(on_gpus.model_copy(update={"hardware": "cuda", "sites": {}}), run, 0.0)
    assert alone == []  # no trainer here


def test_more_connections_than_the_machine_allows_files_are_told_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, run = cluster(replicas=4, max_replicas=1000), RunConfig()
    assert list(capacity_check.check_open_files(asked, run, 1256)) == []
    (problem,) = capacity_check.check_open_files(asked, run, 1255)
    assert problem.startswith(
        "sites.here.generation: its service has connections with 1000 instances and needs 1256 open files, this "
        "machine allows a process 1255: raise its hard limit (`ulimit -Hn`, "
    )
    several = pinned(trainer={"ranks": 400})
    (problem,) = capacity_check.check_open_files(several, run, 600)
    assert problem.startswith("sites.here: the controller has connections with 403 processes and needs 659 open files")
    assert list(capacity_check.check_open_files(several, run, 600, "west")) == []
    monkeypatch.setattr(preflight, "most_open_files", lambda: 1024)
    with pytest.raises(UserError, match="needs 1256 open files, this machine allows a process 1024"):
        preflight.check(asked, make_model(tmp_path / "m"), tmp_path)
