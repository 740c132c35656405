"""The manifest that runs a job on Kubernetes with KubeRay: a RayJob, its files, and who may reach its pods."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamrl.launcher.job_nodes import HEAD, Job, NodeGroup

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
