"""Which way a run's weights take."""

from __future__ import annotations

import ast
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, get_args

import psutil
import pytest
import torch
import torch.distributed as dist

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.config.weight_sync import WEIGHT_PATHS, WeightSyncConfig
from streamrl.errors import RunFailed
from streamrl.launcher.preflight import check_sites, check_weight_path
from streamrl.runtime.interfaces import interface_towards
from streamrl.runtime.process_context import Addresses, RoleContext
from streamrl.weights.backends import nccl
from streamrl.weights.backends.broadcast import meeting_address, nccl_environment
from streamrl.weights.backends.communicator import (
    Communicator,
    GroupBroken,
    GroupStore,
    communicator_of,
    nothing_wrong,
    within,
)
from tests.waiting import scaled

SITES = {"sites": {"here": {"trainer": {}, "generation": [{}]}}}


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({}, "stream"),
        ({"schedule": {"name": "colocated"}}, "stream"),
        ({"weights": {"backend": "stream", "generation_dtype": "fp8"}}, "stream"),
        ({"weights": {"backend": "gloo"}}, "gloo"),
        ({"weights": {"backend": "nccl"}}, "nccl"),
        ({"weights": {"backend": "ipc"}}, "ipc"),
    ],
)
def test_only_a_path_that_has_been_run_is_taken_unless_another_is_named(changes: dict[str, Any], path: str) -> None:
    assert RunConfig.model_validate(changes).weights.path is WEIGHT_PATHS[path]


def test_every_path_of_the_run_file_has_a_module_that_makes_its_backend() -> None:
    named = set(get_args(WeightSyncConfig.model_fields["backend"].annotation)) - {"auto"}
    assert named == set(WEIGHT_PATHS)
    for name, path in WEIGHT_PATHS.items():
        assert f"{name}: {path.summary}" in (WeightSyncConfig.model_fields["backend"].description or "")
        assert callable(import_module(path.module).make_backend)
        if path.engine_class is not None:
            module, engine = path.engine_class  # read, not imported: that takes vLLM, and tests with an engine do it
            source = Path((find_spec(module) or pytest.fail(module)).origin or "").read_text(encoding="utf-8")
            assert engine in [one.name for one in ast.parse(source).body if isinstance(one, ast.ClassDef)]


def test_paths_that_push_differ_in_their_communicator_and_in_nothing_else() -> None:
    gloo, nccl, ipc = (WEIGHT_PATHS[name] for name in ("gloo", "nccl", "ipc"))
    same = {"summary": "", "engine": "", "communicator": None, "untried": "", "one_machine": False}
    assert replace(gloo, **same) == replace(nccl, **same) == replace(ipc, **same)  # type: ignore[arg-type]
    assert not gloo.fetched and ipc.one_machine and not nccl.one_machine
    assert not gloo.untried and nccl.untried and ipc.untried
    kinds = [communicator_of(path.engine) for path in (gloo, nccl, ipc)]
    assert len(set(kinds)) == 3 and all(issubclass(kind, Communicator) for kind in kinds)


def test_a_group_meets_where_other_nodes_reach_the_trainer() -> None:
    own = {one.address for of_one in psutil.net_if_addrs().values() for one in of_one} - {"127.0.0.1"}
    assert meeting_address("ipc:///tmp/controller", one_machine=True, backend="nccl") == "127.0.0.1"
    with pytest.raises(RunFailed, match=r"nccl needs.*the controller is at tcp://127\.0\.0\.1:5600.*backend: stream"):
        meeting_address("tcp://127.0.0.1:5600", one_machine=False, backend="nccl")
    for address in (one for one in own if "." in one):
        assert meeting_address(f"tcp://{address}:5600", one_machine=False, backend="gloo") == address


@pytest.mark.parametrize("schedule", ["colocated", "auto"])
@pytest.mark.parametrize("backend", ["nccl", "gloo", "ipc"])
def test_pushing_to_instances_that_share_the_trainers_devices_is_refused_when_the_file_is_read(
    schedule: str, backend: str
) -> None:
    with pytest.raises(ValueError, match=rf"{backend} needs devices of its own.*{schedule}.*set backend: auto or"):
        RunConfig.model_validate({"schedule": {"name": schedule}, "weights": {"backend": backend}})


def test_nccl_without_gpus_is_refused_before_the_run_starts() -> None:
    def problems(backend: str, hardware: str) -> list[str]:
        run = RunConfig.model_validate({"weights": {"backend": backend}})
        return list(check_weight_path(ClusterConfig.model_validate({"hardware": hardware} | SITES), run))

    (said,) = problems("nccl", "cpu")
    assert "expected auto, stream, gloo or ipc" in said
    fine = (("nccl", "cuda"), ("gloo", "cpu"), ("gloo", "cuda"), ("auto", "cpu"), ("ipc", "cpu"), ("ipc", "cuda"))
    assert [problems(*one) for one in fine] == [[]] * 6


def test_shared_memory_is_refused_before_the_run_starts_where_processes_may_be_on_several_machines() -> None:
    def problems(backend: str, launch: str, remote: bool = False) -> list[str]:
        sites = {"here": {"trainer": {}, "generation": [{}], "launch": {"backend": launch}}}
        links = [{"between": ["here", "there"], "bandwidth_gbit_s": 1, "rtt_ms": 10}] if remote else []
        there = {"there": {"generation": [{}]}} if remote else {}
        cluster = ClusterConfig.model_validate({"hardware": "cpu", "sites": sites | there, "links": links})
        run = RunConfig.model_validate({"weights": {"backend": backend}})
        return [*check_sites(cluster, run), *check_weight_path(cluster, run)]

    assert problems("ipc", "local") == problems("gloo", "ray") == []
    (said,) = problems("ipc", "ray")
    assert said == (
        "weights.backend: ipc needs trainer and instances on one machine, and Ray places those of site here on any of "
        "its nodes; expected auto, stream or gloo, or sites.here.launch.backend: local"
    )
    (said, _) = problems("ipc", "local", remote=True)
    assert said == "weights.backend: ipc works inside one site; expected auto or stream"


@pytest.mark.parametrize(
    ("backend", "launch", "nodes", "leads"),
    [("nccl", "ray", 1, True), ("nccl", "ray", 2, False), ("nccl", "local", 1, False), ("stream", "ray", 1, False)],
)
def test_nccl_listens_where_instances_on_other_nodes_reach_the_trainers_ranks(
    tmp_path: Path, backend: str, launch: str, nodes: int, leads: bool
) -> None:
    """Ranks on several nodes do so anyhow."""
    trainer = {"ranks": 2, "nodes": nodes}
    sites = {"here": {"launch": {"backend": launch}, "trainer": trainer, "generation": [{}]}}
    cluster = ClusterConfig.model_validate({"hardware": "cuda", "sites": sites})
    run = RunConfig.model_validate({"weights": {"backend": backend}})
    addresses = Addresses("tcp://127.0.0.1:5600", "", {})
    context = RoleContext("trainer-0", "here", tmp_path, cluster, run, addresses, False)
    expected = {"NCCL_SOCKET_IFNAME": f"={interface_towards('127.0.0.1')}"} if leads else {}
    assert nccl_environment(context) == expected


def test_a_member_that_nccl_does_not_reach_is_waited_for_no_longer_than_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    came, let_go, devices, store = Event(), Event(), list[int](), dist.HashStore()

    def unreachable(*_: object) -> None:
        came.set()
        let_go.wait()

    unique_id = SimpleNamespace(internal=bytes(128))
    library = SimpleNamespace(ncclGetUniqueId=lambda: unique_id)
    for module, names in {
        "distributed.device_communicators.pynccl": {
            "PyNcclCommunicator": SimpleNamespace(from_unique_id_bytes=unreachable)
        },
        "distributed.device_communicators.pynccl_wrapper": {"NCCLLibrary": lambda: library},
        "utils.nccl": {"unpinned_nccl_env": nullcontext},
    }.items():
        monkeypatch.setitem(sys.modules, f"vllm.{module}", SimpleNamespace(**names))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "set_device_index", devices.append)
    monkeypatch.setattr(nccl, "MEET_S", 0.05)
    with pytest.raises(GroupBroken, match="waited 0 s for 2 others in NCCL"):
        nccl.NcclCommunicator.connect(GroupStore(store, store), "127.0.0.1", 0, 3, 1.0, nothing_wrong)
    assert came.wait(scaled(20))
    let_go.set()
    assert devices == [1]


def test_work_within_its_limit_gives_what_it_returns_or_raises() -> None:
    assert within(scaled(60), lambda: 7, "a number") == 7
    with pytest.raises(TimeoutError, match="its own"):
        within(scaled(60), partial(_raise, TimeoutError("its own")), "an error")


def _raise(error: Exception) -> None:
    raise error
