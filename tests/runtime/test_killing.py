"""Which processes are found by a variable of their environment or by their group, and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from streamrl.runtime import processes
from tests.waiting import scaled

SETTING = "KILLED_BY_A_TEST"
SLEEP = [sys.executable, "-S", "-c", "import time; print(flush=True); time.sleep(600)"]


def asleep(environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a process, and return once it runs its program."""
    process = subprocess.Popen(SLEEP, env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    return process


def test_a_process_that_loads_a_program_is_found_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = f"{os.getpid()}"
    process, read = asleep(os.environ | {SETTING: mark}), Path.read_bytes
    file, looks = Path(f"/proc/{process.pid}/environ"), [0]

    def as_in_exec(path: Path) -> bytes:
        looks[0] += path == file
        return b"" if path == file and looks[0] < 4 else read(path)

    monkeypatch.setattr(Path, "read_bytes", as_in_exec)
    try:
        processes.kill_with_setting(f"{SETTING}={mark}")
        assert process.wait(scaled(10)) == -9
    finally:
        process.kill()
        process.communicate()


def test_a_process_without_an_environment_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    process = asleep({})
    naps: list[float] = []
    monkeypatch.setattr(processes, "EXEC_S", 0.0)
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=time.monotonic, sleep=naps.append))
    try:
        for _ in range(2):
            assert processes._environment(process.pid) == b""
        assert len(naps) == 1
    finally:
        process.kill()
        process.communicate()


def test_a_tracker_that_loads_its_program_is_not_killed_with_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = [*SLEEP[:-1], f"{processes.TRACKER}; {SLEEP[-1]}"]
    process = subprocess.Popen(tracker, stdout=subprocess.PIPE, start_new_session=True)
    read, looks, sent = psutil.Process.cmdline, [0], list[int]()

    def as_in_exec(one: psutil.Process) -> list[str]:
        looks[0] += 1
        return [] if looks[0] < 4 else read(one)

    try:
        assert process.stdout is not None and process.stdout.readline()
        with monkeypatch.context() as changed:
            changed.setattr(psutil.Process, "cmdline", as_in_exec)
            changed.setattr(psutil.Process, "send_signal", lambda one, number: sent.append(number))
            processes.kill_group(process.pid)
        assert set(sent) == {signal.SIGCONT}
    finally:
        process.kill()
        process.communicate()
