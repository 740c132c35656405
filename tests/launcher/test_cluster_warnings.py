"""Keys of a cluster file, or of a run file on that cluster, that a launch does not use are told, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamrl.config.cluster import ClusterConfig
from streamrl.config.load import load_cluster
from streamrl.config.run import RunConfig
from streamrl.launcher import preflight
from streamrl.launcher.cluster_warnings import cluster_warnings, unused_here
from tests.tiny_model import save_tiny_model

ROOT = Path(__file__).parents[2]


def cluster(hardware: str, pool: dict[str, Any], trainer: dict[str, Any], **home: Any) -> ClusterConfig:
    sites = {"home": {"trainer": trainer, "port": 5600, **home}, "west": {"generation": [pool]}}
    link = {"between": ["home", "west"], "bandwidth_gbit_s": 1, "rtt_ms": 1}
    return ClusterConfig.model_validate({"hardware": hardware, "sites": sites, "links": [link]})


def test_keys_without_use_are_told() -> None:
    of_cuda = cluster("cuda", {"kv_cache_gb": 8, "gpu_memory_fraction": 0.5}, {"sharding": "hybrid", "ranks": 2})
    assert list(cluster_warnings(of_cuda)) == [
        "sites.home.trainer.sharding: hybrid is the same as full on one node",
        "sites.west.generation (regular).kv_cache_gb has no use with hardware: cuda, only with cpu",
    ]
    of_cpu = cluster("cpu", {"kv_cache_gb": 8, "gpu_memory_fraction": 0.5}, {}, agents={"workers": 2})
    assert list(cluster_warnings(of_cpu)) == [
        "sites.home.agents has no use at a site without a generation pool: agents work beside those",
        "sites.west.generation (regular).gpu_memory_fraction has no use with hardware: cpu, only with cuda",
    ]
    assert set(cluster_warnings(of_cpu)) <= set(preflight.check_files(of_cpu, RunConfig()))


def test_gpus_and_gradients_that_there_are_none_of_are_told() -> None:
    typed = {"gpu": "H100"}
    of_cpu = cluster("cpu", typed, typed | {"reduce_gradients": "step"})
    assert list(cluster_warnings(of_cpu)) == [
        "sites.home.trainer.reduce_gradients: step has no use: no other rank has gradients to sum",
        "sites.home.trainer.gpu: H100 has no use with hardware: cpu, only with cuda or in a plan",
        "sites.west.generation (regular).gpu: H100 has no use with hardware: cpu, only with cuda or in a plan",
    ]
    on_ray: dict[str, Any] = {"hardware": "cpu", "sites": {"here": {"trainer": typed, "generation": [typed]}}}
    assert len(list(cluster_warnings(ClusterConfig.model_validate(on_ray)))) == 2
    on_ray["sites"]["here"]["launch"] = {"backend": "ray"}
    assert list(cluster_warnings(ClusterConfig.model_validate(on_ray))) == []
    in_layers = {"reduce_gradients": "step", "ranks": 2, "tensor_parallel": 2}
    assert len(list(cluster_warnings(cluster("cpu", {}, in_layers)))) == 1
    assert list(cluster_warnings(cluster("cuda", typed, typed | {"reduce_gradients": "step", "ranks": 2}))) == []


def test_instances_that_cannot_be_more_or_load_in_turn_are_told() -> None:
    run = RunConfig.model_validate({"schedule": {"name": "async", "rolling": True}, "elasticity": {"enabled": True}})
    still = RunConfig.model_validate({"schedule": {"name": "async", "rolling": True}})
    elastic, rolling = unused_here(cluster("cpu", {}, {}), run)
    assert elastic.startswith("elasticity.enabled has no use: every pool has as many instances as it may have")
    assert rolling.startswith("schedule.rolling has no use: no site has several instances")
    (elastic,) = unused_here(cluster("cpu", {"replicas": 2, "min_replicas": 2}, {}), run)
    assert elastic.startswith("elasticity.enabled")
    (rolling,) = unused_here(cluster("cpu", {"replicas": 1, "max_replicas": 1}, {}), still)
    assert rolling.startswith("schedule.rolling")
    for room in ({"max_replicas": 2}, {"replicas": 2}):
        assert list(unused_here(cluster("cpu", room, {}), run)) == []
    pushed = RunConfig.model_validate({"schedule": {"name": "async", "rolling": True}, "weights": {"backend": "gloo"}})
    here = {"sites": {"home": {"trainer": {}, "generation": [{}]}}, "hardware": "cpu"}
    assert list(unused_here(ClusterConfig.model_validate(here), pushed)) == [], "told where a new file is read"


def test_keys_that_are_used_are_not_told() -> None:
    ray = {"launch": {"backend": "ray"}}
    both = cluster("cuda", {"gpu_memory_fraction": 0.5}, {"sharding": "hybrid", "ranks": 2, "nodes": 2}, **ray)
    assert list(cluster_warnings(both)) == []


def test_keys_of_a_run_that_nothing_is_sent_or_chosen_by_are_told_on_one_machine_only() -> None:
    keys = {"weights": {"encoding": "delta", "anchor_every": 3, "chunk_mb": 0.5}, "dispatch": {"price_tolerance": 0.1}}
    run = RunConfig.model_validate(keys)
    here: dict[str, Any] = {"trainer": {}, "generation": [{}]}

    def told(sites: dict[str, Any], run: RunConfig = run) -> list[str]:
        links = [{"between": ["home", name], "bandwidth_gbit_s": 1, "rtt_ms": 1} for name in list(sites)[1:]]
        values = {"hardware": "cpu", "sites": {**sites, "home": {**sites["home"], "port": 5600}}, "links": links}
        return list(unused_here(ClusterConfig.model_validate(values), run))

    *of_weights, of_price = told({"home": here})
    assert of_weights == [
        f"weights.{key}: {value} has no use on one machine, where weights are copied and nothing is sent"
        for key, value in keys["weights"].items()
    ]
    assert of_price == (
        "dispatch.price_tolerance: 0.1 has no use: one site generates, so none can be chosen for its price"
    )
    assert told({"home": here}, RunConfig()) == []
    pushed = RunConfig.model_validate({"weights": {"backend": "gloo", "chunk_mb": 0.5}})
    assert told({"home": here}, pushed) == [], "a run that an earlier version began"
    assert told({"home": here | {"launch": {"backend": "ray"}}}) == [of_price]
    assert told({"home": {"trainer": {}}, "west": {"generation": [{}]}}) == [of_price]
    assert told({"home": here, "west": {"generation": [{}]}}) == []


@pytest.mark.parametrize(("hardware", "divisions"), [("cpu", 2), ("cuda", 1)])
@pytest.mark.parametrize("profile_steps", [2, 50])
def test_a_run_too_short_for_the_choice_of_its_schedule_is_told(
    hardware: str, divisions: int, profile_steps: int
) -> None:
    sites = {"home": {"trainer": {}, "generation": [{"replicas": 2}]}}
    here = ClusterConfig.model_validate({"hardware": hardware, "sites": sites})
    profiled = divisions * (profile_steps + 1)  # each with a step for warming up

    def told(steps: int) -> list[str]:
        schedule = {"name": "auto", "profile_steps": profile_steps}
        return list(unused_here(here, RunConfig.model_validate({"steps": steps, "schedule": schedule})))

    assert told(profiled + 1) == [
        f"schedule: auto runs what it chooses from step {profiled + 2} on, and the run has {profiled + 1} steps: name "
        "a schedule, or set fewer schedule.profile_steps or more steps"
    ]
    assert told(profiled + 2) == []
    assert list(unused_here(here, RunConfig.model_validate({"steps": 1}))) == []


def test_a_launch_says_what_its_cluster_has_no_use_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"path": str(save_tiny_model(tmp_path / "model")), "max_context": 256}
    run = RunConfig.model_validate({"dispatch": {"price_tolerance": 0.1}, "model": model})
    one_generates = cluster("cpu", {}, {})
    assert set(unused_here(one_generates, run)) <= set(preflight.check_files(one_generates, run))
    monkeypatch.setattr(preflight, "refuse", lambda _: None)
    for emulate in (False, True):
        told = preflight.check(one_generates, run, tmp_path, "home", emulate)
        assert set(unused_here(one_generates, run)) <= set(told)


@pytest.mark.parametrize("path", sorted((ROOT / "cluster_configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_cluster_files_here_use_all_their_keys(path: Path) -> None:
    assert list(cluster_warnings(load_cluster(path))) == []
