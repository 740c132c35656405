"""Nodes that a site needs whose processes Ray places, and the job to run on them.

The job files, a batch script for Slurm (`slurm.py`) and a manifest for KubeRay (`kuberay.py`), start a Ray cluster of
these nodes, then `streamrl launch` beside Ray's head. Every node declares its GPU type to Ray as a resource of that
name, which `launcher/ray_backend.py` requests: Ray detects few types itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.errors import UserError
from streamrl.runtime.process_plan import ProcessSpec, plan_processes, possible_instances

HEAD = "head"
CONTROL_CPUS = 4
"""CPU cores of the head node for what Ray does not place: controller, service, launcher and Ray's own processes."""
CPUS_PER_GPU = 4
"""Fewest CPU cores per GPU; the cluster file's `threads` counts computation only, not tokenizing, transport and weight
loading."""
CPUS_OF_A_NODE = 16
"""Default size of a node in CPU cores (hardware: cpu)."""


@dataclass(frozen=True)
class NodeGroup:
    """Nodes of one kind."""

    name: str
    """'head', or the GPU type in characters that Kubernetes accepts."""
    gpu: str
    """GPU type as in the cluster file, or 'cpu'."""
    gpus: int
    cpus: int
    ray_cpus: int
    """CPU cores of a node that Ray may assign."""
    nodes: int
    """Nodes at the start of a run; `least` and `most` are those for the pools' `min_replicas` and `max_replicas`."""
    least: int
    most: int

    @property
    def resources(self) -> dict[str, int]:
        """Resources that each node declares to Ray, besides CPUs and GPUs."""
        return {} if self.gpu == "cpu" else {self.gpu: self.gpus or self.ray_cpus}


@dataclass(frozen=True)
class Job:
    """The `streamrl launch` that a job runs."""

    name: str
    cluster_file: str
    run_file: str | None
    runs_dir: str
    site: str | None = None
    """Site to launch, in a cluster of several."""
    memory_gib: int = 0
    """Memory of each node except the head, in GiB; 0: all of a Slurm node, no limit for a pod."""
    head_memory_gib: int = 32

    def command(self, resume: str = "") -> list[str]:
        """Return the command line for a new run, or for one resumed from the folder `resume`."""
        words = ["streamrl", "launch", "--cluster", self.cluster_file]
        words += [] if self.site is None else ["--site", self.site]
        if resume:
            return [*words, "--plain", "--resume", resume]
        words += [] if self.run_file is None else ["--run", self.run_file]
        return [*words, "--runs-dir", self.runs_dir, "--plain"]


def node_groups(
    cluster: ClusterConfig, run: RunConfig, site: str, gpus_per_node: int = 8, cpus_per_node: int = 0
) -> list[NodeGroup]:
    """List the nodes that a site needs: one for Ray's head, then those of each GPU type, the trainer's first.

    Args:
        cpus_per_node: CPU cores of each node except the head; 0: as many as its processes need.

    Raises:
        UserError: Ray does not place the site's processes, a GPU type is missing, or a process is larger than a node.
    """
    launch, cuda = cluster.sites[site].launch, cluster.hardware == "cuda"
    if not cluster.sites[site].on_ray or launch.address != "auto":
        raise UserError(
            f"sites.{site}.launch is {{backend: {launch.backend}, address: {launch.address}}}: the job starts a Ray "
            "cluster of its own, which has to place the site's processes; write launch: {backend: ray, address: auto}"
        )
    specs = plan_processes(cluster, run, Path(), [site])
    beside = sum(spec.threads for spec in specs if spec.role in ("rewards", "agents"))
    placed = [spec for spec in specs if spec.role == "trainer"] + possible_instances(cluster, run, site, Path())
    room = gpus_per_node if cuda else cpus_per_node or CPUS_OF_A_NODE
    for spec in placed:
        _check_size(spec, room, cuda)
    pools = cluster.sites[site].generation
    counts = {pool.name: (pool.replicas, pool.min_replicas, pool.most_replicas) for pool in pools}
    groups = [NodeGroup(HEAD, "cpu", 0, beside + CONTROL_CPUS, beside, 1, 1, 1)]
    for gpu in dict.fromkeys(spec.gpu for spec in placed):
        here = [spec for spec in placed if spec.gpu == gpu]
        nodes, least, most = (
            _nodes([s for s in here if s.pool is None or s.index < counts[s.pool][n]], room, cuda) for n in range(3)
        )
        size = min(room, sum(_size(spec, cuda) for spec in here))  # the parts of one instance are on different nodes
        cpus = _cpus(here, size, cpus_per_node) if cuda else size
        name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") or "nodes"
        while name in {group.name for group in groups}:
            name += "-other"
        gpus = size if cuda else 0
        groups.append(NodeGroup(name, gpu, gpus, cpus, cpus, nodes, min(least, nodes), max(most, nodes)))
    return groups


def _size(spec: ProcessSpec, cuda: bool) -> int:
    """Return what a process takes of each of its nodes: GPUs, or CPU cores."""
    return (len(spec.gpu_ids) if cuda else spec.threads * spec.ranks) // spec.nodes


def _check_size(spec: ProcessSpec, room: int, cuda: bool) -> None:
    """Check that a process fits on a node.

    Raises:
        UserError: it has no GPU type, or no node can hold it.
    """
    key = f"sites.{spec.site}." + ("trainer" if spec.pool is None else f"generation ({spec.pool})")
    if cuda and spec.gpu == "cpu":
        raise UserError(f"{key}.gpu is 'cpu' with hardware: cuda; expected the GPU type, such as H100")
    if (size := _size(spec, cuda)) > room:
        what, option = ("GPUs", "--gpus-per-node") if cuda else ("CPU cores", "--cpus-per-node")
        least = math.ceil(size * spec.nodes / room)
        hint = f"expected nodes: {least} or more, which {'its ranks are' if spec.pool is None else 'it is'} spread over"
        raise UserError(f"{key} needs {size} {what} on one node, which has {room} ({option}); {hint}")


def _nodes(specs: Sequence[ProcessSpec], room: int, cuda: bool) -> int:
    """Return the number of nodes that hold these processes."""
    sizes = [_size(spec, cuda) for spec in specs for _ in range(spec.nodes)]
    return max(_bins(sizes, room), *(spec.nodes for spec in specs), 0)


def _bins(sizes: Iterable[int], room: int) -> int:
    """Return the number of nodes for processes of these sizes, placing the largest first."""
    free: list[int] = []
    for size in sorted(sizes, reverse=True):
        at = next((number for number, left in enumerate(free) if left >= size), None)
        if at is None:
            free.append(room - size)
        else:
            free[at] -= size
    return len(free)


def _cpus(specs: Sequence[ProcessSpec], gpus: int, wanted: int) -> int:
    """Return the CPU cores of a node with this many GPUs, enough for any of the processes.

    Raises:
        UserError: the requested cores are too few.
    """
    needed = math.ceil(max(spec.threads * spec.ranks * gpus / len(spec.gpu_ids) for spec in specs))
    if wanted and wanted < needed:
        raise UserError(
            f"--cpus-per-node {wanted}: a node with {gpus} {specs[0].gpu} needs {needed}, by the cluster file's threads"
        )
    return wanted or max(needed, CPUS_PER_GPU * gpus)
