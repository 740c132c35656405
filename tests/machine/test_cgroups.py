"""Limits of control groups, of both versions, as containers show them."""

from __future__ import annotations

import math
import os
import resource
from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from streamrl.machine import own_share
from streamrl.machine.cgroups import (
    GroupLimits,
    core_limit,
    group_folders,
    memory_limits,
    read_limits,
    smallest,
    tasks_left,
)

GIB = 2**30
DOCKER_V2 = ("0::/\n", "652 641 0:28 / /sys/fs/cgroup ro,nosuid,nodev - cgroup2 cgroup rw,nsdelegate\n")
"""(/proc/self/cgroup, /proc/self/mountinfo) in a container of Docker with cgroup v2, which has its own namespace."""
JOB_V2 = (
    "0::/system.slice/slurmstepd.scope/job_7/step_0\n",
    "25 30 0:23 / /sys rw,nosuid shared:7 - sysfs sysfs rw\n"
    "35 25 0:31 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n",
)
DOCKER_V1 = (
    "11:memory:/docker/3f9a\n10:cpu,cpuacct:/docker/3f9a\n3:cpuset:/docker/3f9a\n1:name=systemd:/docker/3f9a\n0::/init\n",
    "761 752 0:30 /docker/3f9a /sys/fs/cgroup/memory ro,nosuid master:16 - cgroup cgroup rw,memory\n"
    "762 752 0:31 /docker/3f9a /sys/fs/cgroup/cpu,cpuacct ro,nosuid master:17 - cgroup cgroup rw,cpu,cpuacct\n"
    "763 752 0:32 /docker/3f9a /sys/fs/cgroup/cpuset ro,nosuid master:18 - cgroup cgroup rw,cpuset\n",
)
UNLIMITED_V1 = "9223372036854771712\n"


@pytest.mark.parametrize(
    ("texts", "folders"),
    [
        (DOCKER_V2, [""]),
        (JOB_V2, ["system.slice/slurmstepd.scope/job_7/step_0"]),
        (DOCKER_V1, ["memory", "cpu,cpuacct"]),
    ],
)
def test_the_own_group_comes_first(texts: tuple[str, str], folders: list[str]) -> None:
    found = [str(folder) for folder in group_folders(*texts)]
    assert found[: len(folders)] == [f"/sys/fs/cgroup/{folder}".rstrip("/") for folder in folders]


def test_all_groups_above_count_up_to_the_one_that_is_mounted() -> None:
    names = ("/system.slice/slurmstepd.scope/job_7", "/system.slice/slurmstepd.scope", "/system.slice", "")
    assert [str(folder) for folder in group_folders(*JOB_V2)[1:]] == [f"/sys/fs/cgroup{name}" for name in names]
    inner = DOCKER_V1[0].replace("/docker/3f9a", "/docker/3f9a/inner")
    found = [str(folder) for folder in group_folders(inner, DOCKER_V1[1])]
    assert found[:2] == ["/sys/fs/cgroup/memory/inner", "/sys/fs/cgroup/memory"]


@pytest.mark.parametrize(("path", "top"), [("/../../elsewhere", "/"), ("/elsewhere", "/mine")])
def test_a_group_outside_of_what_is_mounted_is_taken_for_the_mounted_one(path: str, top: str) -> None:
    found = group_folders(f"0::{path}\n", DOCKER_V2[1].replace(" / /sys", f" {top} /sys"))
    assert [str(folder) for folder in found] == ["/sys/fs/cgroup"]


def test_names_with_escapes_are_decoded() -> None:
    mounts = r"1 2 0:3 /user\134x2d1 /sys/fs/c\040group rw - cgroup2 cgroup rw"
    found = group_folders("0::/user\\x2d1/a\n", mounts)
    assert [str(folder) for folder in found] == ["/sys/fs/c group/a", "/sys/fs/c group"]


@pytest.mark.parametrize(
    ("own", "mounts"),
    [
        ("", ""),
        ("0::/\n", ""),
        ("", DOCKER_V2[1]),
        ("nonsense\n4\n", DOCKER_V2[1]),
        (DOCKER_V2[0], "1 2 - cgroup2\n\n1 2 0:3 / /sys/fs/cgroup rw - cgroup2 cgroup\n1 2 0:3 / - cgroup2 a b\n"),
    ],
)
def test_texts_without_groups_name_none(own: str, mounts: str) -> None:
    assert group_folders(own, mounts) == []
    assert smallest([]) == GroupLimits(math.inf, math.inf, math.inf)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        # version 2: what is cached and not in use can be taken
        (
            {
                "memory.max": f"{8 * GIB}\n",
                "memory.current": f"{5 * GIB}\n",
                "memory.stat": f"anon 7\nactive_file {GIB}\ninactive_file {2 * GIB}\n",
            },
            (8 * GIB, 5 * GIB),
        ),
        # version 1: with the groups below
        (
            {
                "memory.limit_in_bytes": f"{8 * GIB}\n",
                "memory.usage_in_bytes": f"{5 * GIB}\n",
                "memory.stat": f"cache 9\ninactive_file 4096\ntotal_cache 9\ntotal_inactive_file {GIB}\n",
            },
            (8 * GIB, 4 * GIB),
        ),
        ({"memory.max": "max\n", "memory.current": f"{GIB}\n"}, (math.inf, math.inf)),
        ({"memory.max": "100\n", "memory.current": "300\n"}, (100, 0)),
        ({"memory.max": "100\n", "memory.current": "30\n", "memory.stat": "inactive_file 90\n"}, (100, 100)),
        ({"memory.max": "100\n"}, (100, 100)),
        ({"memory.max": "100\n", "memory.current": "30\n", "memory.stat": "a b c\n\ninactive_file x\n"}, (100, 70)),
        ({"memory.max": "8g\n", "memory.current": "1\n"}, (math.inf, math.inf)),
        ({"memory.max": ""}, (math.inf, math.inf)),
        ({}, (math.inf, math.inf)),
    ],
)
def test_memory_that_is_left(files: dict[str, str], expected: tuple[float, float]) -> None:
    assert memory_limits(files) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, math.inf),
        ({"cpu.cfs_quota_us": "400000\n", "cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, math.inf),
        ({"cpu.cfs_quota_us": "400000\n"}, math.inf),
        ({"cpu.max": "100000\n"}, math.inf),
        ({"cpu.max": "100000 0\n"}, math.inf),
        ({"cpu.max": "a b\n"}, math.inf),
        ({}, math.inf),
    ],
)
def test_cores(files: dict[str, str], expected: float) -> None:
    assert core_limit(files) == expected


def write(root: Path, texts: tuple[str, str], files: dict[str, str]) -> Path:
    """A file system with a process's groups."""
    (root / "proc" / "self").mkdir(parents=True)
    for name, text in zip(("cgroup", "mountinfo"), texts, strict=True):
        (root / "proc" / "self" / name).write_text(text)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_container_of_version_2_is_read(tmp_path: Path) -> None:
    files = {"memory.max": f"{8 * GIB}\n", "memory.current": f"{GIB}\n", "cpu.max": "100000 100000\n"}
    assert read_limits(write(tmp_path, DOCKER_V2, files)) == GroupLimits(8 * GIB, 7 * GIB, 1)


def test_a_container_of_version_1_is_read(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": f"{8 * GIB}\n",
        "memory/memory.usage_in_bytes": f"{3 * GIB}\n",
        "memory/memory.stat": f"total_inactive_file {GIB}\n",
        "cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
        "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "cpuset/memory.limit_in_bytes": "1\n",  # not a group of memory
    }
    assert read_limits(write(tmp_path, DOCKER_V1, files)) == GroupLimits(8 * GIB, 6 * GIB, 2.5)


def test_the_smallest_limit_of_nested_groups_counts(tmp_path: Path) -> None:
    job = "system.slice/slurmstepd.scope/job_7"
    files = {
        f"{job}/step_0/memory.max": "max\n",
        f"{job}/step_0/cpu.max": "800000 100000\n",
        f"{job}/memory.max": f"{16 * GIB}\n",
        f"{job}/memory.current": f"{2 * GIB}\n",
        f"{job}/cpu.max": "max 100000\n",
        "system.slice/memory.max": f"{20 * GIB}\n",  # more, but others use nearly all of it
        "system.slice/memory.current": f"{19 * GIB}\n",
        "system.slice/cpu.max": "300000 100000\n",
    }
    assert read_limits(write(tmp_path, JOB_V2, files)) == GroupLimits(16 * GIB, GIB, 3)


def test_a_machine_without_groups_has_no_limits(tmp_path: Path) -> None:
    assert read_limits(tmp_path) == GroupLimits()


def test_what_this_process_may_use_is_the_less_of_machine_and_container(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = namedtuple("memory", ["total", "available"])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory(64 * GIB, 40 * GIB))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)

    def within(limits: GroupLimits) -> tuple[int, float, float]:
        monkeypatch.setattr(own_share, "read_limits", lambda: limits)
        return own_share.usable_cores(), own_share.free_memory(), own_share.total_memory()

    assert within(GroupLimits()) == (6, 40 * GIB, 64 * GIB)
    assert within(GroupLimits(8 * GIB, 5 * GIB, 2.9)) == (2, 5 * GIB, 8 * GIB)
    assert within(GroupLimits(float(UNLIMITED_V1), float(UNLIMITED_V1), 0.5)) == (1, 40 * GIB, 64 * GIB)
    assert within(GroupLimits(cores=32)) == (6, 40 * GIB, 64 * GIB)


def test_without_a_set_of_cores_those_of_the_machine_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    monkeypatch.setattr(own_share, "read_limits", GroupLimits)
    assert own_share.usable_cores() == 12


def test_threads_that_may_still_be_started_are_the_less_of_group_and_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = read_limits(write(tmp_path, DOCKER_V2, {"pids.max": "100\n", "pids.current": "30\n"}))
    assert limits == GroupLimits(tasks_left=70)
    assert tasks_left({"pids.max": "max\n", "pids.current": "30\n"}) == math.inf
    v1 = ("5:pids:/docker/3f9a\n", "7 5 0:3 /docker/3f9a /sys/fs/cgroup/pids ro - cgroup cgroup rw,pids\n")
    v1_files = {"pids/pids.max": "8\n", "pids/pids.current": "9\n"}
    assert read_limits(write(tmp_path / "v1", v1, v1_files)) == GroupLimits(tasks_left=0)

    monkeypatch.setattr(own_share, "read_limits", lambda: limits)
    monkeypatch.setattr(own_share, "_tasks_of_user", lambda: 40)
    for user, limit, free in ((1000, 100, 60), (1000, 500, 70), (1000, resource.RLIM_INFINITY, 70), (0, 50, 70)):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert own_share.free_tasks() == free


def test_the_threads_of_this_user_are_counted() -> None:
    assert own_share._tasks_of_user() >= psutil.Process().num_threads()
