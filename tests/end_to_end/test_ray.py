"""A whole run over the nodes of a real Ray cluster on this machine: placed, killed with a node, and finished."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlparse

import psutil
import pytest
import ray
import yaml
from ray._private.authentication_test_utils import reset_auth_token_state
from ray.cluster_utils import Cluster

from streamrl.rollouts.ledger import Ledger
from streamrl.run_dir.instance_files import read_started
from streamrl.run_dir.metrics import read_metrics
from streamrl.run_dir.status import read_status
from streamrl.runtime.process_context import Addresses
from streamrl.runtime.processes import is_alive
from streamrl.runtime.warden import ENDS_WITHIN_S
from tests.end_to_end.project import Project, trained_rows, wait_for
from tests.environments.own_environment import install
from tests.ray_nodes import Nodes
from tests.security.shown_secrets import shown_secrets
from tests.security.sockets_of import family, listeners, mechanism, reachable
from tests.waiting import finish, scaled

STEPS = 6
EASY = [{"kind": "reasoning_gym", "name": "chain_sum", "config": {"max_terms": 2}, "answer": "full"}]


ONE = ({"name": "regular"},)
WIDE = ({"name": "regular", "gpu": "large"}, {"name": "wide", "gpus_per_replica": 2, "nodes": 2})
"""One instance beside the trainer, and one over both of the 'fast' nodes."""


def on_ray(project: Project, address: str, pools: Sequence[dict[str, object]] = ONE, **trainer: object) -> list[str]:
    """The project's cluster, its processes on Ray: trainer ranks on one or two nodes, instances where 'fast' is."""
    pool = {"gpu": "fast", "threads": 1, "max_batch": 8, "kv_cache_gb": 0.05}
    site = {
        "launch": {"backend": "ray", "address": address},
        "trainer": {"ranks": 2, "threads": 1, "gpu": "large", **trainer},
        "generation": [pool | one for one in pools],
        "rewards": {"workers": 1},
    }
    (project.folder / "ray.yaml").write_text(yaml.safe_dump({"hardware": "cpu", "sites": {"here": site}}))
    return ["--cluster", "ray.yaml"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes for the trainer, of which one is the head, and two for instances.

    Its processes demand Ray's token of each other, and of launchers.
    """
    folder = tmp_path_factory.mktemp("ray")
    (folder / "token").write_text(secrets.token_hex(32))
    (folder / "token").chmod(0o600)
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("RAY_AUTH_MODE", "token")
        changed.setenv("RAY_AUTH_TOKEN_PATH", str(folder / "token"))
        reset_auth_token_state()  # another test's cluster may have had none
        yield from nodes()
    reset_auth_token_state()


def nodes() -> Iterator[Cluster]:
    """The cluster while it lives."""
    made = Nodes(num_cpus=4, resources={"large": 2})
    try:
        for resources in ({"large": 2}, {"fast": 2}, {"fast": 2}):
            made.add_node(resources=resources, num_cpus=4)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.mark.timeout(1200)
def test_a_run_on_ray_survives_the_loss_of_a_node_with_every_sample_trained_once(
    tmp_path: Path, cluster: Cluster
) -> None:
    project = Project(tmp_path, warm=False)  # Ray reads whether it needs a token when it is loaded
    played = {"kind": "agent", "name": "played", "environment": {"name": str(install(tmp_path).folder), "processes": 1}}
    run = {"model": {"path": str(tmp_path / "model"), "max_context": 512}, "sampling": {"max_tokens": 200}}
    changes = run | {
        "tasks": [*EASY, played],
        "steps": STEPS,
        "schedule": {"name": "async"},
        "recovery": {"pause_s": 0.5},
    }
    changes |= {"deadlines": {"startup_s": 900}}
    options = on_ray(project, cluster.address, WIDE, nodes=2, sharding="hybrid")
    process = project.start(*options, **changes)
    run_dir = project.run_dir()
    metrics = run_dir / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and bool(read_metrics(metrics)), 400, process)
    started = {one.name: one for one in read_started(run_dir)}
    placed = {"trainer", "trainer-node-1", "here-regular-0", "here-wide-0", "rewards-here", "agents-here"}
    assert placed <= started.keys() and all(started[name].node for name in placed)
    assert not started["controller"].node and not started["service-here"].node  # beside the launcher
    wait_for(lambda: (read_status(run_dir).roles["here-wide-0"].running or 0) > 0, 240, process)
    check_doors(run_dir, second_part(tmp_path, "here-wide-0"))
    lost = next(node for node in cluster.list_all_nodes() if is_of(second_part(tmp_path, "here-wide-0"), node))
    cluster.remove_node(lost, allow_graceful=False)
    wait_for(lambda: read_status(run_dir).roles["here-wide-0"].state in ("dead", "starting"), 120, process)
    cluster.add_node(resources={"fast": 2}, num_cpus=4)  # a replaced node
    output = finish(process, 280, project.logs)
    assert process.returncode == 0, output + project.logs()
    rows = [row for row in trained_rows(run_dir) if row["t_trained"] is not None]
    of_rows = [str(row["sample_id"]) for row in rows]
    assert len(of_rows) == len(set(of_rows))  # an episode may have several
    ids = {str(row["trajectory_id"]) for row in rows}
    assert len(ids) == 18 * STEPS
    assert sorted(ids) == Ledger(run_dir / "ledger.sqlite").trained_ids()
    assert {row["reward"] for row in rows if row["task"] == "played"} <= {0.5, 1.0}
    assert any(row.agent_metrics_by_task.get("played", {}).get("environment_steps") for row in read_metrics(metrics))
    wait_for(lambda: not any(is_alive(one.pid) for one in started.values()), ENDS_WITHIN_S)
    there = lambda: [p.info["name"] for p in psutil.process_iter(["name", "cwd"]) if p.info["cwd"] == str(tmp_path)]  # noqa: E731
    wait_for(lambda: not there(), ENDS_WITHIN_S, tell=there)


def check_doors(run_dir: Path, second: int) -> None:
    """Check where the run's processes listen, and that nothing shows their secret key.

    Torch and vLLM authenticate nothing between the nodes of one process (docs/explanation/security.md); the launcher's
    own ports are Ray's, whose token protects them.

    Args:
        run_dir: the run's folder.
        second: id of the process of the wide instance on its second node.
    """
    addresses = Addresses.load(run_dir)
    hubs = {urlparse(one).port for one in (addresses.controller, addresses.publisher, *addresses.services.values())}
    found = set()
    for one in read_started(run_dir):
        spread = one.role == "trainer" or one.name == "here-wide-0"
        for listener in listeners(family(one.pid) + (family(second) if spread else [])):
            if listener.port in hubs:
                assert mechanism(listener, scaled(10)) == "CURVE", (one.name, listener)
                found.add(listener.port)
            else:
                assert spread or not reachable([listener.address]), (one.name, listener)
    assert found == hubs
    assert shown_secrets(run_dir, "here") == []


def second_part(folder: Path, instance: str) -> int:
    """Id of the process of an instance on its second node, in a project's folder."""
    for process in psutil.process_iter(["cmdline", "cwd"]):
        words = process.info["cmdline"] or []
        if process.info["cwd"] == str(folder) and instance in words and words[words.index("--node") + 1] == "1":
            return process.pid
    raise AssertionError(f"{instance} has no second part")


def is_of(pid: int, node: object) -> bool:
    """Whether a process descends from a node's raylet."""
    raylets = {process.process.pid for process in node.all_processes["raylet"]}  # type: ignore[attr-defined]
    return any(parent.pid in raylets for parent in psutil.Process(pid).parents())


@pytest.mark.timeout(1200)
def test_the_same_run_under_ray_and_local_trains_the_same_samples_with_the_same_losses(
    tmp_path: Path, cluster: Cluster
) -> None:
    found = {}
    for name in ("local", "ray"):
        folder = tmp_path / name
        folder.mkdir()
        project = Project(folder, warm=False)  # also the local one, whose processes begin as a user's do
        options = on_ray(project, cluster.address, nodes=2)
        if name == "local":
            text = (folder / "ray.yaml").read_text().replace("backend: ray", "backend: local")
            (folder / "ray.yaml").write_text(text.replace("nodes: 2", "nodes: 1"))
        changes = {
            "tasks": EASY,
            "steps": 2,
            "schedule": {"name": "sync"},
            "deadlines": {"startup_s": 900},
            "model": {"path": str(tmp_path / "model"), "max_context": 96, "dtype": "float32"},
        }
        if not (tmp_path / "model").exists():
            (folder / "model").rename(tmp_path / "model")
        project.launch(*options, **changes)
        metrics = read_metrics(project.run_dir() / "metrics.jsonl")
        rows = {str(row["sample_id"]): list(row["completion_tokens"]) for row in trained_rows(project.run_dir())}  # type: ignore[call-overload]
        found[name] = rows, [row.loss for row in metrics]
    (rows, losses), (theirs, others) = found["local"], found["ray"]
    assert rows == theirs
    assert others == pytest.approx(losses, rel=1e-5, abs=1e-7)


@pytest.mark.timeout(400)
def test_what_ray_cannot_do_is_told_before_anything_starts(tmp_path: Path, cluster: Cluster) -> None:
    project = Project(tmp_path, warm=False)
    options = on_ray(project, cluster.address, ranks=8, nodes=2)
    assert "sites.here: 8 large asked for, 4 in Ray" in project.launch(*options, code=2)
    options = on_ray(project, "127.0.0.1:1")
    assert "sites.here.launch.address: no Ray cluster at '127.0.0.1:1'" in project.launch(*options, code=2)
    process = project.start(*on_ray(project, cluster.address, nodes=2))
    run_dir = project.run_dir()
    wait_for(lambda: bool(list(tmp_path.glob("runs/*/processes.json"))), 120, process)
    process.send_signal(signal.SIGINT)
    finish(process, 20)
    assert run_dir.exists()


LAUNCHER = """
import os, sys, time
from pathlib import Path
from streamrl.config.cluster import ClusterConfig
from streamrl.runtime.process_plan import ProcessSpec
from streamrl.launcher.ray_backend import RaySite

site = {"trainer": {}, "generation": [{"gpu": "fast"}], "launch": {"backend": "ray", "address": sys.argv[1]}}
here = RaySite(ClusterConfig.model_validate({"hardware": "cpu", "sites": {"here": site}}), "here", Path("."))
spec = ProcessSpec("here-wide-0", "instance", "here", "wide", [sys.executable, "role.py"], gpu="fast", nodes=2, ranks=2)
process = here.start(spec, Path("."), False, {}, 1)
while True:
    time.sleep(1000)
"""
ROLE = """
import os, signal, subprocess, sys, time
from pathlib import Path
from streamrl.launcher.entry_point import end_with_starter

signal.signal(signal.SIGTERM, signal.SIG_IGN)
end_with_starter()
engine = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
Path(f"{os.getpid()}.new").write_text(str(engine.pid))
Path(f"{os.getpid()}.new").rename(f"{os.getpid()}.role")
while True:
    time.sleep(1000)
"""
"""An instance that is deaf to what it is told, as one is while vLLM starts."""


@pytest.mark.parametrize("victim", ["launcher", "actors", "raylets"])
def test_an_instance_over_two_nodes_ends_with_what_started_it(tmp_path: Path, cluster: Cluster, victim: str) -> None:
    (tmp_path / "role.py").write_text(ROLE)
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    root = str(Path(__file__).parents[2])
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "launcher.py", cluster.address]
        launcher = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        told = lambda: list(tmp_path.glob("*.role"))  # noqa: E731
        wait_for(lambda: len(told()) == 2, 120, tell=(tmp_path / "log").read_text)
        roles = [int(path.stem) for path in told()]
        actors = [psutil.Process(pid).ppid() for pid in roles]
        family = [*roles, *(int(path.read_text()) for path in told())]
        nodes = [node for node in cluster.list_all_nodes() if any(is_of(pid, node) for pid in roles)]
        assert len(nodes) == 2 and all(map(is_alive, family))
        if victim == "raylets":
            for node in nodes:
                cluster.remove_node(node, allow_graceful=False)
                cluster.add_node(resources={"fast": 2}, num_cpus=4)
        for pid in {"launcher": [launcher.pid], "actors": actors, "raylets": []}[victim]:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not any(map(is_alive, family)), ENDS_WITHIN_S, tell=lambda: [is_alive(pid) for pid in family])
    finally:
        launcher.kill()
        launcher.wait()
