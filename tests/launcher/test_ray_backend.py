"""What processes ask Ray for, and what is told when it does not have that."""

from __future__ import annotations

import asyncio
import stat
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import ray

from streamrl.config.cluster import ClusterConfig
from streamrl.launcher import ray_backend, ray_node
from streamrl.launcher.ray_backend import demand, missing, problems, versions
from streamrl.runtime.process_plan import SOCKETS_OF_VLLM, ProcessSpec


def spec(role: str, gpu: str = "cpu", gpus: int = 0, threads: int = 1, ranks: int = 1) -> ProcessSpec:
    ids = tuple(range(gpus))
    return ProcessSpec(
        role,
        role,
        "here",
        None,
        [sys.executable],
        gpu=gpu,
        gpu_ids=ids,
        threads=threads,
        ranks=ranks,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("one", "known", "wanted"),
    [
        (spec("instance", threads=2), {}, {"CPU": 2.0}),
        (
            spec("instance", "H20", gpus=2),
            {"accelerator_type:H20": 1.0},
            {"CPU": 1, "GPU": 2, "accelerator_type:H20": 0.002},
        ),
        (spec("instance", "H20", gpus=2), {"H20": 8.0}, {"CPU": 1, "GPU": 2, "H20": 2}),
        (spec("instance", "fast"), {}, {"CPU": 1, "fast": 1}),  # CPUs that somebody has given a name
        (spec("trainer", "large", threads=3, ranks=2), {}, {"CPU": 6, "large": 2}),
        (spec("rewards", threads=4), {"H20": 8.0}, {"CPU": 4}),
        (replace(spec("agents", threads=3), memory_gb=2.5), {"H20": 8.0}, {"CPU": 3, "memory": 2.5 * 2**30}),
    ],
)
def test_a_process_asks_ray_for_its_resources(
    one: ProcessSpec, known: dict[str, float], wanted: dict[str, float]
) -> None:
    assert demand(one, known) == pytest.approx(wanted)


def test_missing_resources_are_reported_with_both_counts() -> None:
    nodes = [{"CPU": 8.0, "GPU": 8.0, "accelerator_type:H20": 1.0}, {"CPU": 4.0}]
    fleet = [spec("instance", "H20", gpus=2)] * 4
    assert missing(fleet, nodes) == []
    assert missing([*fleet, fleet[0]], nodes) == [
        "10 GPU asked for, 8 in Ray",
        "10 H20 asked for, 8 in Ray; its GPUs: H20",
    ]
    assert "1 H800 asked for, 0 in Ray; its GPUs: H20" in missing([spec("trainer", "H800", gpus=1)], nodes)
    assert missing([spec("rewards", threads=20)], nodes) == ["20 CPU asked for, 12 in Ray"]
    stepping = [replace(spec("agents"), memory_gb=3.0)]
    assert missing(stepping, [{"CPU": 2.0, "memory": 4.0 * 2**30}]) == []
    assert missing(stepping, [{"CPU": 2.0, "memory": 2.0 * 2**30}]) == ["3.0 GiB of memory asked for, 2.0 in Ray"]


@pytest.mark.parametrize("there", [{"b1": {"CPU": 4.0, "memory": 9.0}, "c2": {"CPU": 8.0}}, {}])
def test_rewards_prefer_living_nodes_without_gpus(
    monkeypatch: pytest.MonkeyPatch, there: dict[str, dict[str, float]]
) -> None:
    def node(name: str, alive: bool = True, **resources: float) -> dict[str, object]:
        return {"NodeID": name * 28, "Alive": alive, "Resources": {"node:10.0.0.1": 1.0, **resources}}

    others = [node("a0", CPU=64.0, GPU=8.0), node("d3", alive=False, CPU=64.0), node("e4", CPU=8.0, fast=1.0)]
    monkeypatch.setattr(ray, "nodes", lambda: [*others, *(node(name, **has) for name, has in there.items())])
    found = ray_backend._without_gpus()
    if not there:
        assert found == "DEFAULT"
        return
    (preferred,) = found.soft
    assert not found.hard and (preferred.key, preferred.operator.values) == ("ray.io/node-id", [n * 28 for n in there])


def test_a_missing_token_is_told_like_a_wrong_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> NoReturn:
        raise ray.exceptions.AuthenticationError("no authentication token was found")

    monkeypatch.setattr(ray, "init", init)
    site = {"launch": {"backend": "ray"}, "trainer": {}, "generation": [{}]}
    (problem,) = problems(ClusterConfig.model_validate({"hardware": "cpu", "sites": {"here": site}}), "here", [])
    assert problem.startswith("sites.here.launch.address: no Ray cluster at 'auto': no authentication token was found")


def test_versions_are_those_of_what_nodes_must_share() -> None:
    assert {"streamrl", "torch"} <= versions().keys()


def test_a_node_replaces_the_launchers_python_and_nothing_that_is_called_like_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    async def usable(*_: object) -> tuple[str, str]:
        return "10.0.0.1", ""

    def spawn(command: Sequence[str], *_: object, **__: object) -> None:
        started.append(list(command))
        raise OSError("not here")

    for name, stand_in in {"spawn": spawn, "kill_with": lambda starter, children: None}.items():
        monkeypatch.setattr(ray_node, name, stand_in)
    node = ray_node.NodeProcess()
    monkeypatch.setattr(node, "look", usable)
    theirs = "/opt/theirs/bin/python3.11"
    others = ["runs/python-tutor", "/data/python", "python3.11", "python"]
    command = [theirs, "-m", "streamrl.launcher.trainer_ranks", "--", theirs, "-m", "trainer", *others]
    folder = tmp_path / "of the launcher" / "sockets"
    env = {SOCKETS_OF_VLLM: str(folder)}
    asyncio.run(node.start(command, env, str(tmp_path / "log"), "runs/python-tutor", "token", {}, str(tmp_path)))
    ours = [sys.executable if word == theirs else word for word in command[:5]]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700  # else vLLM could not make its sockets here
    (folder / "socket").touch()
    asyncio.run(node.kill())
    assert not folder.exists()
    assert started == [[*ours, *command[5:]]] and ours.count(sys.executable) == 2
