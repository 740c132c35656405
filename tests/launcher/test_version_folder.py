"""Where versions of the weights are kept: in shared memory if those of all sites here fit."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections import namedtuple
from multiprocessing import synchronize
from pathlib import Path
from typing import NoReturn

import pytest

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.errors import RunFailed, UserError
from streamrl.launcher import preflight, site_setup
from streamrl.launcher.site_setup import LONGEST_SOCKET_PATH, check_sockets, prepare
from streamrl.launcher.version_folder import (
    check_semaphores,
    fits_into_shared_memory,
    room_needed,
    shared_memory_warnings,
)
from streamrl.run_dir import layout
from streamrl.runtime.process_context import Addresses
from tests.launcher.test_preflight import make_model

MIB = 2**20


def cluster(hardware: str = "cuda", far: bool = False) -> ClusterConfig:
    home = {"trainer": {}, "generation": [{}]} | ({"address": "10.0.0.1", "port": 7000} if far else {})
    sites = {"here": home} | ({"far": {"generation": [{}]}} if far else {})
    links = [{"between": ["here", "far"], "bandwidth_gbit_s": 1, "rtt_ms": 10}] if far else []
    return ClusterConfig.model_validate({"hardware": hardware, "sites": sites, "links": links})


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    """A run of a model whose files have 100 MiB."""
    return make_model(tmp_path / "model", megabytes=100)


def with_room(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(free))


def asking(run: RunConfig, dtype: str = "auto", backend: str = "stream") -> RunConfig:
    model = run.model.model_dump() | {"dtype": dtype}
    return RunConfig.model_validate(run.model_dump() | {"model": model, "weights": {"backend": backend}})


def test_two_versions_of_each_site_have_to_fit(run: RunConfig) -> None:
    assert room_needed(cluster(), run, ["here"]) == 200 * MIB
    assert room_needed(cluster(far=True), run, ["here", "far"]) == 400 * MIB


def test_a_site_that_passes_weights_on_needs_room_for_a_third_version(run: RunConfig) -> None:
    passing = cluster(far=True)
    passing.sites["far"] = passing.sites["far"].model_copy(update={"address": "10.0.0.2", "port": 7000})
    assert room_needed(passing, run, ["far"]) == 300 * MIB
    assert room_needed(passing, run, ["here", "far"]) == 500 * MIB  # the trainer's port is for something else


@pytest.mark.parametrize(
    ("hardware", "far", "dtype", "needed"),
    [
        ("cuda", False, "float32", 400),
        ("cuda", False, "bfloat16", 200),
        ("cpu", False, "bfloat16", 200),
        ("cpu", False, "auto", 400),  # the trainer may choose fp32
        ("cpu", True, "auto", 200),  # what crosses links is bf16
        ("cpu", True, "float32", 400),
    ],
)
def test_versions_in_fp32_are_twice_as_large_as_the_models_files(
    hardware: str, far: bool, dtype: str, needed: int, run: RunConfig
) -> None:
    assert room_needed(cluster(hardware, far), asking(run, dtype), ["here"]) == needed * MIB


@pytest.mark.parametrize("backend", ["gloo", "nccl", "ipc"])
def test_pushed_weights_take_no_room(run: RunConfig, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_room(monkeypatch, 0)
    assert fits_into_shared_memory(cluster(), asking(run, backend=backend), ["here"])


def test_a_missing_model_is_told_elsewhere() -> None:
    assert room_needed(cluster(), RunConfig.model_validate({"model": {"path": "/nowhere/model"}}), ["here"]) == 0


@pytest.mark.parametrize(("free", "fits"), [(400 * MIB, True), (400 * MIB - 1, False)])
def test_less_room_than_that_is_too_little_and_is_told(
    run: RunConfig, free: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_room(monkeypatch, free)
    assert fits_into_shared_memory(cluster(far=True), run, ["here", "far"], tmp_path) == fits
    warnings = shared_memory_warnings(cluster(far=True), run, ["here", "far"], tmp_path)
    assert len(warnings) == (not fits)
    for warning in warnings:
        assert warning.startswith(f"{tmp_path} has 400 MiB free and versions of the weights take 400 MiB")
        assert "--shm-size 1g" in warning


def test_shared_memory_that_cannot_be_written_to_is_told_as_that(
    run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_room(monkeypatch, 800 * MIB)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    [warning] = shared_memory_warnings(cluster(far=True), run, ["here", "far"], tmp_path)
    assert warning.startswith(f"{tmp_path} cannot be written to: ") and "MiB" not in warning


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_machine_without_semaphores_is_refused_before_the_start(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    assert list(check_semaphores(cluster("cpu"), None)) == []
    monkeypatch.setattr(synchronize.SemLock, "__init__", refused)
    remedy = r"delete files .*--shm-size\) \(see docs: E1007\)" if number == errno.ENOSPC else "mount it so that all"
    told = rf"cannot make semaphores in /dev/shm \({os.strerror(number)}\), which the rewards process needs: {remedy}"
    with pytest.raises(UserError, match=told):
        preflight.check(cluster("cpu"), make_model(tmp_path / "model"), tmp_path)
    on_ray = {"launch": {"backend": "ray"}, "trainer": {}, "generation": [{}]}
    elsewhere = ClusterConfig.model_validate({"hardware": "cpu", "sites": {"here": on_ray}})
    assert list(check_semaphores(elsewhere, None)) == []


def test_where_there_is_no_shared_memory_or_no_site_nothing_is_told(run: RunConfig, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert not fits_into_shared_memory(cluster(), run, ["here"], nowhere)
    assert shared_memory_warnings(cluster(), run, ["here"], nowhere) == []
    assert shared_memory_warnings(cluster(), run, [], tmp_path) == []


@pytest.mark.parametrize("fits", [True, False])
def test_a_launch_makes_a_folder_of_its_own_in_shared_memory_or_uses_the_run_folder(
    fits: bool, run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")  # paths of sockets are short
    monkeypatch.setattr(layout, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(site_setup, "fits_into_shared_memory", lambda *_: fits)
    left = tmp_path / "run" / "weights"
    left.mkdir(parents=True)
    (left / "version_3.bin").write_bytes(b"of an earlier launch")
    with prepare(cluster(), run, left.parent):
        found = Addresses.load(left.parent).weights_folder(left.parent)
        assert not (left / "version_3.bin").exists()
        if not fits:
            assert found == left
            found.mkdir()
        assert found.is_dir() and (found.parent == tmp_path) == fits
    assert not found.exists()


@pytest.mark.parametrize("spare", [0, -1])
def test_a_temporary_folder_whose_path_is_too_long_for_vllms_sockets_is_refused(
    spare: int, run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        ours_and_vllms = len("/streamrl-abcdefgh.012345") + len("/4e0a7a3c-6b7c-4a3e-9d07-5c8a3a1d3c55")
        deep = Path(name, "d" * (LONGEST_SOCKET_PATH - ours_and_vllms - len(name) - 1 - spare))
        deep.mkdir()
        (tmp_path / "run").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(deep))
        problems = list(check_sockets())
        assert (len(problems), "is too long for a socket" in "".join(problems)) == (-spare, bool(spare))
        refused = pytest.raises(RunFailed, match="is too long for a socket") if spare else contextlib.nullcontext()
        with refused, prepare(cluster(), run, tmp_path / "run"):
            pass
