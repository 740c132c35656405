"""Ray's own autoscaler gets a node for an instance that has none, and gives it back when the instance has ended."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from streamrl.config.cluster import ClusterConfig
from streamrl.launcher.ray_backend import RaySite
from streamrl.runtime.process_plan import ProcessSpec
from tests.marks import MARK, mark_of
from tests.waiting import scaled, wait_for

LIMIT_S = 120.0


def autoscaling(gcs_address: str) -> dict[str, object]:
    """A head with CPUs only; nodes with the resource 'fast' come when they are asked for, as processes of this machine
    (Ray's provider for its own tests), and go when nothing has run there for three seconds."""
    empty = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands")
    empty += ("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude")
    types = {
        "head": {"resources": {"CPU": 2}, "node_config": {}, "max_workers": 0},
        "fast": {"resources": {"CPU": 2, "fast": 1}, "node_config": {}, "min_workers": 0, "max_workers": 1},
    }
    return {
        "cluster_name": "test",
        "max_workers": 1,
        "idle_timeout_minutes": 0.05,
        "upscaling_speed": 1.0,
        "provider": {"type": "fake_multinode", "gcs_address": gcs_address},
        "available_node_types": types,
        "head_node_type": "head",
        "auth": {"ssh_user": "nobody"},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        "rsync_filter": [],
    } | {key: [] for key in empty}


@pytest.fixture
def head(tmp_path: Path) -> Iterator[str]:
    """Its address."""
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        port = probe.getsockname()[1]
    address = f"{ray.util.get_node_ip_address()}:{port}"
    settings = tmp_path / "autoscaling.json"
    folder = tempfile.mkdtemp(prefix="ray-")  # a short path: the system bounds those of Ray's sockets in it
    settings.write_text(json.dumps(autoscaling(address)))
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", f"--port={port}", "--num-cpus=2"]
    command += ["--include-dashboard=false", f"--autoscaling-config={settings}", f"--temp-dir={folder}"]
    env = os.environ | {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    before = {process.pid for process in psutil.process_iter()}
    try:
        subprocess.run(command, env=env, check=True, timeout=scaled(LIMIT_S), stdout=subprocess.DEVNULL)
        yield address
    finally:
        ray.shutdown()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                environment = Path(f"/proc/{process.pid}/environ").read_bytes()
                if process.pid not in before and mark_of(environment) == os.environ[MARK]:
                    process.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.timeout(500)
def test_a_node_comes_for_an_instance_and_goes_with_it(tmp_path: Path, head: str) -> None:
    site = {"trainer": {}, "generation": [{"gpu": "fast"}], "launch": {"backend": "ray", "address": head}}
    cluster = ClusterConfig.model_validate({"hardware": "cpu", "sites": {"here": site}})
    here = RaySite(cluster, "here", tmp_path)
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    spec = ProcessSpec("here-regular-0", "instance", "here", "regular", command, gpu="fast")

    def nodes() -> int:
        return sum(node["Alive"] and "fast" in node["Resources"] for node in ray.nodes())

    assert nodes() == 0
    process = here.start(spec, tmp_path, False, {}, 1)
    assert process.node == "waits for a node with 1 CPU + 1 fast"
    wait_for(lambda: process.pid != 0, LIMIT_S)
    assert nodes() > 0 and process.exit_code is None
    process.kill()
    wait_for(lambda: nodes() == 0, LIMIT_S)
