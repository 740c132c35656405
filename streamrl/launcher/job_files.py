"""Job files for a site whose processes Ray places: a batch script for Slurm, a manifest for KubeRay.

Both start a Ray cluster of the nodes that the site needs, then `streamrl launch` beside Ray's head. Every node declares
its GPU type to Ray as a resource of that name, which `launcher/ray_backend.py` requests: Ray detects few types itself.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

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
IDLE_S = 900
"""Seconds until KubeRay's autoscaler removes an idle node; some images take longer to pull than its default of 60 s."""
FILES = "/etc/streamrl"
"""Folder of the cluster file and run file in a pod."""
HEAD_LABEL = "streamrl/head"
RUN_LABEL = "streamrl/run"
OPERATOR = {"app.kubernetes.io/name": "kuberay-operator"}
"""Labels of KubeRay's operator, which asks Ray's head how the job is."""
FIRST_WITH_TOKEN = "2.52.0"
"""Ray's first version with token authentication; KubeRay 1.5.1 is the first to set it up."""


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


@dataclass(frozen=True)
class SlurmOptions:
    """Options of a Slurm batch script; mappings are keyed by GPU type, 'head', or '' for all others."""

    partitions: Mapping[str, str] = field(default_factory=dict)
    gres: Mapping[str, str] = field(default_factory=dict)
    """Slurm's names of GPU types."""
    account: str = ""
    time: str = "24:00:00"
    setup: Sequence[str] = ()
    """Shell lines that run first."""
    shared_head: bool = False
    """Whether Ray's head shares the first GPU node instead of having a node of its own."""


@dataclass(frozen=True)
class KubeOptions:
    """Options of a KubeRay manifest."""

    image: str
    claim: str
    """Name of the volume claim that all pods mount at the runs folder."""
    files: Mapping[str, str]
    """Texts of the files mounted at `FILES`, by name."""
    resume: str = ""
    """Folder of the run to resume; '': a new run."""
    selectors: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Labels of the nodes that have a GPU type, by type."""
    ports: Mapping[str, int] = field(default_factory=dict)
    """Ports that other sites connect to, by name."""
    ray_version: str = FIRST_WITH_TOKEN
    """Version of Ray in the image."""


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
    rewards = sum(spec.threads for spec in specs if spec.role == "rewards")
    placed = [spec for spec in specs if spec.role == "trainer"] + possible_instances(cluster, run, site, Path())
    room = gpus_per_node if cuda else cpus_per_node or CPUS_OF_A_NODE
    for spec in placed:
        _check_size(spec, room, cuda)
    pools = cluster.sites[site].generation
    counts = {pool.name: (pool.replicas, pool.min_replicas, pool.most_replicas) for pool in pools}
    groups = [NodeGroup(HEAD, "cpu", 0, rewards + CONTROL_CPUS, rewards, 1, 1, 1)]
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


BODY = r"""
set -e
{setup}
set +e -u -o pipefail
limit_s=${{STREAMRL_START_S:-600}}
head_node=$(scontrol show hostnames "${head_nodes}" | head -n 1)
for head_ip in ${{STREAMRL_HEAD_IP:-}} $(hostname --ip-address) $(hostname -I); do
    case $head_ip in 127.* | *:*) ;; *) break ;; esac
done
address=$head_ip:$((20000 + SLURM_JOB_ID % 5000))
export RAY_ADDRESS=$address RAY_TMPDIR=/tmp/streamrl-$SLURM_JOB_ID
# without its token, whoever reaches a node could run commands as this user (all nodes mount this folder)
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={runs_dir}/.ray-token-$SLURM_JOB_ID
steps=() launch=""
stop() {{
    local code=$?
    trap - EXIT
    trap '' INT TERM
    if [ -n "$launch" ] && kill -TERM "$launch" 2>/dev/null; then wait "$launch"; fi
    [ -z "$(jobs -r)" ] || kill -TERM "${{steps[@]}}" 2>/dev/null
    for _ in {{1..30}}; do [ -z "$(jobs -r)" ] || sleep 1; done
    [ -z "$(jobs -r)" ] || kill -KILL "${{steps[@]}}" 2>/dev/null
    rm -f "$RAY_AUTH_TOKEN_PATH"
    exit "$code"
}}
fail() {{ echo "error: $*" >&2; exit 1; }}
trap stop EXIT
trap 'exit 143' INT TERM
step() {{
    srun --overlap --mem=0 --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --wait=0 --no-kill "$@" &
    steps+=($!)
}}
wait_for() {{
    local what=$1 until=$((SECONDS + limit_s)) pid
    while ! "$2"; do
        for pid in "${{steps[@]}}"; do
            kill -0 "$pid" 2>/dev/null || fail "a node's Ray has ended before there was $what; its reason is above"
        done
        [ "$SECONDS" -lt "$until" ] || fail "no $what within $limit_s s (STREAMRL_START_S)"
        sleep 2
    done
}}
head_answers() {{ ray status --address="$address" >/dev/null 2>&1; }}
all_there() {{
    python3 -c 'import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
sys.exit(sum(node["Alive"] for node in ray.nodes()) < {count})' "$address" >/dev/null 2>&1
}}
(umask 077 && mkdir -p {runs_dir} && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$RAY_AUTH_TOKEN_PATH") ||
    fail "cannot write Ray's token to $RAY_AUTH_TOKEN_PATH"
echo "Ray: head on $head_node ($address), {count} nodes in all"
{head}
wait_for "an answer of Ray's head" head_answers
{workers}
wait_for "Ray on {count} nodes" all_there

command=({command})
[ -z "${{STREAMRL_RESUME:-}}" ] || command=({resume} "$STREAMRL_RESUME")
trap 'kill -TERM "$launch" 2>/dev/null' INT TERM
"${{command[@]}}" &
launch=$!
wait "$launch"
code=$?
while kill -0 "$launch" 2>/dev/null; do wait "$launch"; code=$?; done
launch=""
echo "streamrl launch: exit code $code; to go on: STREAMRL_RESUME={runs_dir}/RUN sbatch SCRIPT"
exit "$code"
"""


def slurm_script(job: Job, groups: Sequence[NodeGroup], options: SlurmOptions) -> str:
    """Write a batch script; node groups, the head first, become components of a heterogeneous job.

    Pools get room for their `max_replicas`. The job's paths are the same on all nodes.
    """
    if options.shared_head:
        head, first, *further = groups
        groups = [replace(first, cpus=first.cpus + head.cpus, ray_cpus=first.ray_cpus + head.ray_cpus), *further]
    several, types = len(groups) > 1, len({group.gpu for group in groups if group.gpus})
    components, starts = [], []
    for number, group in enumerate(groups):
        where = group.name if group.name == HEAD else group.gpu
        kind = options.gres.get(group.gpu, group.gpu.lower() if types > 1 else "")
        gpus = [f"--gpus-per-node={kind + ':' if kind else ''}{group.gpus}"] if group.gpus else []
        memory = job.head_memory_gib if where == HEAD else job.memory_gib
        partition = options.partitions.get(where, options.partitions.get("", ""))
        wanted = [
            *([f"--partition={partition}"] if partition else []),
            *([f"--account={options.account}"] if options.account else []),
            *[f"--time={options.time}", f"--nodes={group.most}", "--ntasks-per-node=1"],
            *[f"--cpus-per-task={group.cpus}", f"--mem={memory}G" if memory else "--mem=0", "--no-kill", *gpus],
        ]
        what = (
            "Ray's head, controller and service" if where == HEAD else f"nodes for {group.gpu}, {group.gpus} GPUs each"
        )
        components.append("\n".join([f"# {what}", *(f"#SBATCH {one}" for one in wanted)]))
        words = ["step", *([f"--het-group={number}"] if several else []), f"--cpus-per-task={group.cpus}", *gpus]
        given = ["--block", f"--num-cpus={group.ray_cpus}", f"--num-gpus={group.gpus}"]
        given += [f"--resources={json.dumps(group.resources)}"] if group.resources else []
        starts.append((shlex.join(words), shlex.join(given)))
    workers = []
    for number, (step, ray) in enumerate(starts):
        if count := groups[number].most - (number == 0):
            others = "" if number else ' --exclude="$head_node"'
            workers.append(f'{step} --nodes={count} --ntasks={count}{others} ray start --address="$address" {ray}')
    step, ray = starts[0]
    body = BODY.format(
        setup="\n".join(options.setup) or ":",
        head_nodes="SLURM_JOB_NODELIST" + ("_HET_GROUP_0" if several else ""),
        count=sum(group.most for group in groups),
        head=f'{step} --nodes=1 --ntasks=1 --nodelist="$head_node" ray start --head --node-ip-address="$head_ip" '
        f'--port="${{address##*:}}" --ray-client-server-port=$((25000 + SLURM_JOB_ID % 5000)) '
        f"--include-dashboard=false --disable-usage-stats {ray}",
        workers="\n".join(workers) or ":",
        command=shlex.join(job.command()),
        resume=shlex.join(job.command("RUN")[:-1]),
        runs_dir=job.runs_dir,
    )
    top = f"""#!/bin/bash
# {job.name}: start it with `sbatch SCRIPT`. After the time limit go on with:
#   STREAMRL_RESUME={job.runs_dir}/RUN sbatch SCRIPT
#SBATCH --job-name={job.name}
#SBATCH --output=%x-%j.log
#SBATCH --signal=B:TERM@120
"""
    return top + "\n#SBATCH hetjob\n".join(components) + "\n" + body


def kuberay_manifest(job: Job, groups: Sequence[NodeGroup], options: KubeOptions) -> list[dict[str, Any]]:
    """Build a manifest: the files, the RayJob and, if other sites connect to this one, a Service.

    Node groups come with the head first. The job's paths are those in the pods.
    """
    head, *others = groups
    workers = []
    for group in others:
        params = {"num-cpus": str(group.ray_cpus), "num-gpus": str(group.gpus)}
        if group.resources:  # through a shell; KubeRay's autoscaler expects exactly this quoting
            params["resources"] = json.dumps(json.dumps(group.resources))
        counts = {"replicas": group.nodes, "minReplicas": group.least, "maxReplicas": group.most}
        template = _pod(job, group, options, "ray-worker")
        workers.append({"groupName": group.name, **counts, "rayStartParams": params, "template": template})
    params = {"dashboard-host": "0.0.0.0", "num-cpus": str(head.ray_cpus), "num-gpus": "0"}
    cluster: dict[str, Any] = {
        "headGroupSpec": {"rayStartParams": params, "template": _pod(job, head, options, "ray-head")},
        "workerGroupSpecs": workers,
        "enableInTreeAutoscaling": any(group.most > group.nodes for group in others),
        "rayVersion": options.ray_version,
        "authOptions": {"mode": "token"},  # the operator makes a Secret and hands it to every pod of Ray's
    }
    cluster |= {"autoscalerOptions": {"idleTimeoutSeconds": IDLE_S}} if cluster["enableInTreeAutoscaling"] else {}
    spec = {
        "entrypoint": shlex.join(job.command(options.resume)),
        "submissionMode": "K8sJobMode",
        "shutdownAfterJobFinishes": True,
        "backoffLimit": 0,
        "rayClusterSpec": cluster,
    }
    documents = [
        _document("v1", "ConfigMap", f"{job.name}-files", data=dict(options.files)),
        _document("ray.io/v1", "RayJob", job.name, spec=spec),
        *_network_policies(job, options),
    ]
    if options.ports:
        ports = [{"name": name, "port": n, "targetPort": n, "protocol": "TCP"} for name, n in options.ports.items()]
        service = {"type": "LoadBalancer", "selector": {HEAD_LABEL: job.name}, "ports": ports}
        documents.append(_document("v1", "Service", f"{job.name}-sites", spec=service))
    return documents


def _network_policies(job: Job, options: KubeOptions) -> list[dict[str, Any]]:
    """Let only the run's own pods, the pod that submits it and KubeRay's operator reach the run's pods.

    Other sites may reach the ports of the head that they connect to, whose connections are authenticated by their keys.
    """
    own = [
        {"podSelector": {"matchLabels": {RUN_LABEL: job.name}}},
        {"podSelector": {"matchLabels": {"job-name": job.name}}},  # Kubernetes' label of the submitter
        {"namespaceSelector": {}, "podSelector": {"matchLabels": OPERATOR}},
    ]
    wanted: list[tuple[str, dict[str, str], dict[str, Any]]] = [(job.name, {RUN_LABEL: job.name}, {"from": own})]
    if options.ports:
        ports = [{"port": number, "protocol": "TCP"} for number in options.ports.values()]
        wanted.append((f"{job.name}-sites", {HEAD_LABEL: job.name}, {"ports": ports}))
    return [
        _document(
            *("networking.k8s.io/v1", "NetworkPolicy", name),
            spec={"podSelector": {"matchLabels": labels}, "policyTypes": ["Ingress"], "ingress": [rule]},
        )
        for name, labels, rule in wanted
    ]


def _document(version: str, kind: str, name: str, **content: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **content}


def _pod(job: Job, group: NodeGroup, options: KubeOptions, name: str) -> dict[str, Any]:
    memory = job.head_memory_gib if group.name == HEAD else job.memory_gib
    amounts = {"cpu": str(group.cpus)}
    amounts |= {"memory": f"{memory}Gi"} if memory else {}
    amounts |= {"nvidia.com/gpu": str(group.gpus)} if group.gpus else {}
    mounts = [{"name": "runs", "mountPath": job.runs_dir}, {"name": "files", "mountPath": FILES}]
    resources = {"limits": amounts, "requests": dict(amounts)}
    container = {"name": name, "image": options.image, "resources": resources, "volumeMounts": mounts}
    spec: dict[str, Any] = {
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": options.claim}},
            {"name": "files", "configMap": {"name": f"{job.name}-files"}},
        ],
    }
    if group.gpus:
        spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    if selector := options.selectors.get(group.gpu):
        spec["nodeSelector"] = dict(selector)
    labels = {RUN_LABEL: job.name} | ({HEAD_LABEL: job.name} if group.name == HEAD else {})
    return {"metadata": {"labels": labels}, "spec": spec}
