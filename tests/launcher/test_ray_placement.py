"""What Ray places finds a free node although another one is busy, and the wait for the trainer's nodes can be ended."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from streamrl.config.cluster import ClusterConfig
from streamrl.errors import RunFailed
from streamrl.launcher.ray_backend import RaySite
from streamrl.runtime.process_plan import ProcessSpec, Role
from tests.ray_nodes import Nodes
from tests.waiting import wait_for

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A node of two CPUs, and one of four with a GPU."""
    made = Nodes(num_cpus=2, object_store_memory=100 << 20)
    try:
        made.add_node(num_cpus=4, num_gpus=1, object_store_memory=100 << 20)
        yield made
    finally:
        made.shutdown()


@pytest.fixture
def site(tmp_path: Path, cluster: Cluster) -> Iterator[RaySite]:
    """A site on the cluster, on which nothing runs."""
    here = {"trainer": {}, "generation": [{}], "launch": {"backend": "ray", "address": cluster.address}}
    made = RaySite(ClusterConfig.model_validate({"hardware": "cpu", "sites": {"here": here}}), "here", tmp_path)
    try:
        wait_for(lambda: ray.available_resources().get("CPU") == 6, LIMIT_S, tell=ray.available_resources)
        yield made
    finally:
        made.close()


def spec(role: Role, threads: int) -> ProcessSpec:
    return ProcessSpec(
        role, role, "here", None, [sys.executable, "-c", "import time; time.sleep(600)"], threads=threads
    )


@pytest.mark.timeout(500)
def test_rewards_and_agents_do_not_wait_for_a_busy_node(tmp_path: Path, site: RaySite) -> None:
    # at once, so that Ray may not know yet that the first one takes all of the node without GPUs
    started = [
        site.start(spec(role, threads), tmp_path, False, {}, 1) for role, threads in (("rewards", 2), ("agents", 1))
    ]
    wait_for(lambda: all(process.pid for process in started), LIMIT_S, tell=lambda: [one.node for one in started])
    later = site.start(spec("agents", 2), tmp_path, False, {}, 2)
    wait_for(lambda: later.pid != 0, LIMIT_S, tell=lambda: later.node)
    for process in (*started, later):
        process.kill()


@pytest.mark.timeout(500)
def test_rewards_leave_the_node_with_gpus_to_others_if_there_is_another(tmp_path: Path, site: RaySite) -> None:
    rewards = [site.start(replace(spec("rewards", 1), name=f"rewards-{n}"), tmp_path, False, {}, 1) for n in range(2)]
    wait_for(lambda: all(process.pid for process in rewards), LIMIT_S, tell=lambda: [one.node for one in rewards])
    other = site.start(spec("instance", 4), tmp_path, False, {}, 1)  # as many as the node with GPUs has
    wait_for(lambda: other.pid != 0, LIMIT_S, tell=lambda: other.node)
    for process in (*rewards, other):
        process.kill()


@pytest.mark.timeout(500)
def test_the_wait_for_nodes_of_the_trainer_ends_when_the_user_stops_the_run(site: RaySite) -> None:
    calls = []

    def check_stop() -> None:
        calls.append(len(calls))
        if len(calls) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        site.place_trainer([spec("trainer", 64)], 3600.0, check_stop)
    with pytest.raises(RunFailed, match=r"^Ray has no room for the trainer: it needs 64 CPU within 0 s; free: "):
        site.place_trainer([spec("trainer", 64)], 0.0, lambda: None)
    assert site.place_trainer([spec("trainer", 3)], 600.0, lambda: None)[0] == site.host
