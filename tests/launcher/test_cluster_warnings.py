"""Keys of a cluster file that a launch does not use are told, and those that it uses are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamrl.config.cluster import ClusterConfig
from streamrl.config.load import load_cluster
from streamrl.config.run import RunConfig
from streamrl.launcher import preflight
from streamrl.launcher.cluster_warnings import cluster_warnings

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


def test_keys_that_are_used_are_not_told() -> None:
    ray = {"launch": {"backend": "ray"}}
    both = cluster("cuda", {"gpu_memory_fraction": 0.5}, {"sharding": "hybrid", "ranks": 2, "nodes": 2}, **ray)
    assert list(cluster_warnings(both)) == []


@pytest.mark.parametrize("path", sorted((ROOT / "cluster_configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_cluster_files_here_use_all_their_keys(path: Path) -> None:
    assert list(cluster_warnings(load_cluster(path))) == []
