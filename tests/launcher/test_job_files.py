"""`streamrl export`: counts of nodes, and one message on bad input."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.errors import UserError
from streamrl.launcher.job_nodes import node_groups
from tests.launcher.job_export import RAY, Export, one_type, two_sites, two_types


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
        (
            "slurm",
            one_type(),
            ("--time", "24"),
            r"--time 24: Slurm reads 24 minutes; expected hours:minutes:seconds or days-hours, such as 24:00:00 or 3-0",
        ),
        ("slurm", one_type(), ("--time", "24:30"), r"--time 24:30: Slurm reads 24 minutes and 30 seconds; expected"),
        ("slurm", one_type(), ("--time", "0:00:00"), r"--time 0:00:00: Slurm sets no time limit then; expected"),
        ("slurm", one_type(), ("--time", "0-0"), r"--time 0-0: Slurm sets no time limit then; expected more"),
        ("slurm", one_type(), ("--time", "0-0:2"), r"--time 0-0:2: the run is asked to end as it begins; exp"),
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


@pytest.mark.parametrize("name", ["my runs", "a$b", "a;b", "a(1)"])
def test_a_folder_of_runs_that_no_script_can_name_is_refused(
    export: Export, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(name)
    monkeypatch.chdir(tmp_path / name)
    for options in ((), ("--runs-dir", str(tmp_path / "link" / "runs"))):
        code, out, error = export.tried("slurm", one_type(), *options)
        assert code == 2 and out == ""
        assert "--runs-dir " in error and f"got {str(tmp_path / name / 'runs')!r}" in error
    assert export("slurm", one_type(), "--runs-dir", str(tmp_path / "runs"))


def test_a_file_that_cannot_be_written_is_told(export: Export, tmp_path: Path) -> None:
    code, _, error = export.tried("slurm", one_type(), "--out", str(tmp_path / "none" / "job.sh"))
    assert code == 2 and "--out" in error and "No such file" in error


def test_the_file_holds_what_would_be_printed(export: Export, tmp_path: Path) -> None:
    printed = export("slurm", one_type())
    assert export("slurm", one_type(), "--out", str(tmp_path / "job.sh")) == ""
    assert (tmp_path / "job.sh").read_text() == printed


@pytest.mark.parametrize("kind", ["slurm", "kuberay"])
def test_a_job_whose_launch_would_be_refused_is_not_written(export: Export, tmp_path: Path, kind: str) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("schedule: {name: colocated}\n")
    code, out, error = export.tried(kind, one_type(), "--run", str(run))
    assert (code, out) == (2, "") and "schedule: colocated gives the same GPUs to generation and training" in error
