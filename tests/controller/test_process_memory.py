"""The memory of each of a run's processes: with the processes below it, and of this machine only."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from streamrl.controller import process_memory
from streamrl.controller.process_memory import GIB, FamilyMemory, family_memory, run_memory
from streamrl.controller.telemetry import Telemetry
from streamrl.run_dir.instance_files import StartedProcess, write_started

MIB_50 = 50 << 20
HOLDS = f"import sys; held = b'x' * {MIB_50}; print(); sys.stdin.read()"
STARTS_ONE = "import subprocess, sys; one = subprocess.Popen([sys.executable, '-c', sys.argv[1]]); one.wait()"


@pytest.fixture
def instance() -> Iterator[int]:
    """A process whose child holds 50 MiB, until its input ends."""
    command = [sys.executable, "-c", STARTS_ONE, HOLDS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        yield process.pid
        process.stdin.close()


def test_a_process_counts_with_those_below_it(instance: int) -> None:
    found = family_memory(os.getpid(), {instance: "here-regular-0", os.getppid(): "of another run"})
    assert found.of_process.keys() == {"here-regular-0"}
    assert MIB_50 / GIB < found.of_process["here-regular-0"] < 3 * MIB_50 / GIB
    assert found.total_gb is not None and found.total_gb > found.of_process["here-regular-0"]


def test_the_launchers_file_names_the_processes_of_this_machine(
    instance: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_memory.os, "getppid", os.getpid)
    emulated = tmp_path / "sites" / "west"
    emulated.mkdir(parents=True)
    write_started(tmp_path, [StartedProcess("far", "instance", instance, node="10.0.0.7")])
    write_started(emulated, [StartedProcess("west-regular-0", "instance", instance)])
    assert run_memory(tmp_path).of_process.keys() == {"west-regular-0"}
    write_started(emulated, [StartedProcess("west-regular-0", "instance", instance, exit_code=-9)])
    assert run_memory(tmp_path).of_process == {}
    (tmp_path / "processes.json").write_text("[")
    assert (run_memory(tmp_path).total_gb or 0) > 0


def test_a_launcher_that_is_gone_has_no_memory(instance: int) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    assert family_memory(gone.pid, {}) == FamilyMemory(None, {})


def test_the_status_says_it_of_each_process() -> None:
    telemetry = SimpleNamespace(
        hub=SimpleNamespace(peers={}),
        state="running",
        detail="",
        processes=lambda: {"controller": "controller", "far-0": "instance"},
        memory=FamilyMemory(3.0, {"controller": 0.25}),
        _states={},
        _types={},
        _silence=lambda speaker, known: None,
        _session=lambda speaker, known: "",
    )
    roles = Telemetry._roles(cast(Telemetry, telemetry))
    assert {name: role["memory_gb"] for name, role in roles.items()} == {"controller": 0.25, "far-0": None}
