"""What an autoscaler of Ray goes by: an instance without a node is a demand, and leaves its node idle when it ends.

The test takes the autoscaler's place and adds the node. Ray's provider of nodes for its own tests is not used here: on
a busy machine its nodes are ended as "launch failed", or start over and over.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.autoscaler.v2.schema import ClusterStatus
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.cluster_utils import Cluster

from streamrl.config.cluster import ClusterConfig
from streamrl.launcher.ray_backend import RaySite
from streamrl.runtime.process_plan import ProcessSpec
from tests.ray_nodes import Nodes
from tests.waiting import wait_for

LIMIT_S = 120.0


@pytest.fixture
def head() -> Iterator[Cluster]:
    """A cluster that is one node with CPUs only."""
    made = Nodes(num_cpus=2)
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def demands(status: ClusterStatus) -> list[dict[str, float]]:
    """Resources of the processes that wait for a node."""
    return [one.bundle for demand in status.resource_demands.ray_task_actor_demand for one in demand.bundles_by_count]


def idle(status: ClusterStatus) -> bool:
    """Whether the added node is there and has nothing to do."""
    return any("fast" in {use.resource_name for use in node.resource_usage.usage} for node in status.idle_nodes)


@pytest.mark.timeout(500)
def test_an_instance_asks_for_a_node_by_its_resources_and_leaves_it_idle(tmp_path: Path, head: Cluster) -> None:
    launch = {"backend": "ray", "address": head.address}
    site = {"trainer": {}, "generation": [{"gpu": "fast"}], "launch": launch}
    here = RaySite(ClusterConfig.model_validate({"hardware": "cpu", "sites": {"here": site}}), "here", tmp_path)
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    spec = ProcessSpec("here-regular-0", "instance", "here", "regular", command, gpu="fast")

    def status() -> ClusterStatus:
        return get_cluster_status(head.address)

    process = here.start(spec, tmp_path, False, {}, 1)
    assert process.node == "waits for a node with 1 CPU + 1 fast"
    wait_for(lambda: demands(status()) == [{"CPU": 1.0, "fast": 1.0}], LIMIT_S, tell=status)
    head.add_node(resources={"fast": 1}, num_cpus=2)
    wait_for(lambda: process.pid != 0, LIMIT_S, tell=status)
    wait_for(lambda: not demands(status()) and not idle(status()), LIMIT_S, tell=status)
    assert process.exit_code is None
    process.kill()
    wait_for(lambda: idle(status()), LIMIT_S, tell=status)
    # what prefers nodes without GPUs is a demand of its resources alone, which any node may meet
    spec = ProcessSpec("rewards-here", "rewards", "here", None, command, threads=3)
    process = here.start(spec, tmp_path, False, {}, 1)
    wait_for(lambda: demands(status()) == [{"CPU": 3.0}], LIMIT_S, tell=status)
    head.add_node(resources={"fast": 1}, num_cpus=3)
    wait_for(lambda: process.pid != 0, LIMIT_S, tell=status)
    process.kill()
