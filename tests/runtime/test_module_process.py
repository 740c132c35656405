"""A module that runs in a process of its own, and what it leaves behind."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from streamrl.runtime.module_process import run_module
from streamrl.runtime.processes import is_alive
from tests.waiting import wait_for

DEAF = """
import os, signal, time

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
print(os.getpid(), flush=True)
time.sleep(600)
"""
HANGS = f"""
import subprocess, sys

subprocess.run([sys.executable, "-c", {DEAF!r}])
"""


@pytest.fixture(autouse=True)
def _modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    (tmp_path / "repeats.py").write_text("import sys; print(sys.argv[1], input()); sys.exit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_a_module_is_given_arguments_and_input_and_its_end_is_told() -> None:
    said, done = run_module("repeats", "one", limit_s=600.0, environment={}, given="two\n")
    assert said == "one two\n" and done is not None and done.returncode == 3


@pytest.mark.parametrize("interrupted", [False, True], ids=["too late", "Ctrl-C"])
def test_a_module_that_is_ended_leaves_no_process_of_its_own(
    interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def end(child: subprocess.Popen[str], given: str | None, timeout: float) -> Any:
        assert child.stdout is not None
        line = child.stdout.readline()
        started.append(int(line))
        raise KeyboardInterrupt if interrupted else subprocess.TimeoutExpired(child.args, timeout, line.encode())

    monkeypatch.setattr(subprocess.Popen, "communicate", end)
    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            run_module("hangs", limit_s=600.0, environment={})
    else:
        assert run_module("hangs", limit_s=600.0, environment={}) == (f"{started[0]}\n", None)
    wait_for(lambda: not is_alive(started[0]), 30)
