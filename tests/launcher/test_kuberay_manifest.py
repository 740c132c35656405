"""`streamrl export --format kuberay`: manifests that hold to their schema."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path

from streamrl.config.load import load_cluster, load_run
from tests.launcher.job_export import SELECTORS, Export, one_type, two_sites, two_types

ROOT = Path(__file__).parents[2]


def test_a_manifest_has_a_group_for_each_gpu_type(export: Export) -> None:
    documents = export.kuberay(two_types(), *SELECTORS, "--memory", "500")
    assert list(documents) == ["ConfigMap", "RayJob", "NetworkPolicy"]
    spec = documents["RayJob"]["spec"]
    trains, generates = spec["rayClusterSpec"]["workerGroupSpecs"]
    counts = [(one["minReplicas"], one["replicas"], one["maxReplicas"]) for one in (trains, generates)]
    assert counts == [(2, 2, 2), (1, 3, 4)]
    assert spec["rayClusterSpec"]["enableInTreeAutoscaling"] is True
    assert spec["shutdownAfterJobFinishes"] is True
    # the form that Ray's autoscaler reads, and that bash turns into JSON
    given = generates["rayStartParams"]["resources"]
    assert json.loads(given[1:-1].replace("\\", "")) == {"H20": 8}
    shell = subprocess.run(["bash", "-c", f"printf %s {given}"], text=True, capture_output=True, check=True)
    assert json.loads(shell.stdout) == {"H20": 8}
    pod = generates["template"]["spec"]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "H20"}
    limits = pod["containers"][0]["resources"]["limits"]
    assert (limits["nvidia.com/gpu"], limits["memory"]) == ("8", "500Gi")
    head = spec["rayClusterSpec"]["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "3"
    assert "nvidia.com/gpu" not in head["template"]["spec"]["containers"][0]["resources"]["limits"]


def test_pods_get_the_files_and_the_volume(export: Export, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("name: mine\nsteps: 5\n")
    documents = export.kuberay(one_type(), "--run", str(tmp_path / "run.yaml"), "--runs-dir", "/data/runs")
    job, files = documents["RayJob"], documents["ConfigMap"]
    assert job["metadata"]["name"] == "mine-here"
    launch = "streamrl launch --cluster /etc/streamrl/cluster.yaml --run /etc/streamrl/run.yaml"
    assert job["spec"]["entrypoint"] == f"{launch} --runs-dir /data/runs --plain"
    for name, text in files["data"].items():
        (tmp_path / name).write_text(text)
    assert load_run(tmp_path / "run.yaml").steps == 5
    assert load_cluster(tmp_path / "cluster.yaml").security.keys == "/data/runs/keys"
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["enableInTreeAutoscaling"] is False and "autoscalerOptions" not in cluster
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        mounts = {one["name"]: one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
        assert mounts == {"runs": "/data/runs", "files": "/etc/streamrl"}
        claims = {one["name"]: one for one in pod["volumes"]}
        assert claims["runs"]["persistentVolumeClaim"]["claimName"] == "shared"
        assert claims["files"]["configMap"]["name"] == files["metadata"]["name"]
    resumed = export.kuberay(one_type(), "--resume", "/data/runs/mine")
    assert resumed["RayJob"]["spec"]["entrypoint"].endswith("--plain --resume /data/runs/mine")


def test_the_image_for_gpus_has_what_kuberay_calls_in_its_pods() -> None:
    image = (ROOT / "docker" / "cuda.Dockerfile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (installed,) = re.findall(r'pip install .*"\.\[(.*)\]"', image)
    needed = [line for extra in installed.split(",") for line in extras[extra]]
    assert any(line.startswith("ray[default]") for line in needed), "the job server, and the agents of its probes"
    (packages,) = re.findall(r"apt-get install (.*) \\\n", image)
    assert "wget" in packages.split(), "its probes"


def test_rays_nodes_authenticate_each_other_and_only_the_runs_pods_reach_them(export: Export) -> None:
    documents = export.kuberay(two_types(), *SELECTORS)
    cluster = documents["RayJob"]["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"} and cluster["rayVersion"] >= "2.52.0"
    policy = documents["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    pods = policy["podSelector"]["matchLabels"]
    templates = [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    assert all(pods.items() <= template["metadata"]["labels"].items() for template in templates)
    name = documents["RayJob"]["metadata"]["name"]
    ((rule),) = policy["ingress"]
    who = [one["podSelector"]["matchLabels"] for one in rule["from"]]
    assert who == [pods, {"job-name": name}, {"app.kubernetes.io/name": "kuberay-operator"}]
    assert [one for one in rule["from"] if "namespaceSelector" in one] == [rule["from"][2]]
    assert "for sites" not in documents
    text = export("kuberay", two_types(), *SELECTORS, "--image", "example.org/streamrl:1", "--volume-claim", "shared")
    assert "auth_token" not in text, "a secret is the operator's, not the file's"


def test_other_sites_reach_two_ports_of_the_head_through_the_policy(export: Export) -> None:
    documents = export.kuberay(two_sites(), "--site", "train")
    policy, head = documents["for sites"]["spec"], documents["RayJob"]["spec"]["rayClusterSpec"]["headGroupSpec"]
    assert policy["podSelector"]["matchLabels"].items() <= head["template"]["metadata"]["labels"].items()
    assert policy["ingress"] == [{"ports": [{"port": port, "protocol": "TCP"} for port in (5600, 5601)]}]


def test_other_sites_reach_the_trainers_site_only(export: Export) -> None:
    trains = export.kuberay(two_sites(), "--site", "train")
    service, head = trains["Service"]["spec"], trains["RayJob"]["spec"]["rayClusterSpec"]["headGroupSpec"]
    assert service["type"] == "LoadBalancer"
    assert [port["port"] for port in service["ports"]] == [5600, 5601]
    assert service["selector"].items() <= head["template"]["metadata"]["labels"].items()
    assert "--site train" in trains["RayJob"]["spec"]["entrypoint"]
    generates = export.kuberay(two_sites(), "--site", "west")
    assert "Service" not in generates and "--site west" in generates["RayJob"]["spec"]["entrypoint"]
