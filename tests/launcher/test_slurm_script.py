"""`streamrl export --format slurm`: scripts that run, against stubs of Slurm and Ray."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.job_export import Export, one_type, two_types
from tests.waiting import scaled, wait_for

SBATCH = {
    *("job-name", "output", "signal", "partition", "account", "time", "nodes", "ntasks-per-node", "cpus-per-task"),
    *("mem", "no-kill", "no-requeue", "gpus-per-node"),
}
"""Options of sbatch that a script may use."""


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
    assert all("no-requeue" in part for part in parts), "a job that begins again would begin a new run"
    assert {part["ntasks-per-node"] for part in parts} == {"1"}
    first = script.index("scontrol")
    assert "#SBATCH" not in script[first:]
    assert f"#   STREAMRL_RESUME={Path('runs').resolve()}/RUN sbatch SCRIPT" in script[:first]


@pytest.mark.parametrize("gpu", ["RTX 4090", "nvidia:h20"])
def test_a_type_that_slurm_cannot_read_needs_a_name(export: Export, gpu: str) -> None:
    values = two_types()
    for pool in values["sites"]["here"]["generation"]:
        pool["gpu"] = gpu
    code, _, error = export.tried("slurm", values)
    assert code == 2 and f"GPU type {gpu!r}: " in error and f"--gres '{gpu}=NAME'" in error
    parts = components(export("slurm", values, "--gres", f"{gpu}=other"))
    assert [part.get("gpus-per-node") for part in parts] == [None, "h800:8", "other:8"]
    values["sites"]["here"]["trainer"]["gpu"] = gpu  # the only type, which Slurm need not know
    assert components(export("slurm", values))[1]["gpus-per-node"] == "8"


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
    passed = '[ "$(wc -l <"$STUBS/nodes")" -lt 3 ] || SECONDS=$((SECONDS + 45))'  # the head and two steps have begun
    script = script.replace("all_there() {", f"all_there() {{\n{passed}")
    job = Started(tmp_path, script, STREAMRL_START_S="90")
    code, error = job.end()
    assert code == 1 and "no Ray on 7 nodes within 90 s" in error
    assert job.calls().count("ended workers") == 2 and "ended head" in job.calls()


def test_a_failed_setup_line_starts_nothing(export: Export, tmp_path: Path) -> None:
    job = Started(tmp_path, export("slurm", two_types(), "--setup", "source nowhere/bin/activate"))
    assert job.end()[0] != 0 and job.calls() == []


# KubeRay
