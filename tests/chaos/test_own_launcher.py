"""The launcher that `streamrl chaos` starts has the folder that was made for it, and no other run's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from streamrl.chaos import own_launcher
from streamrl.cli.chaos import _launcher
from streamrl.errors import RunFailed
from streamrl.launcher.local_backend import spawn
from streamrl.run_dir.instance_files import StartedProcess, write_started
from tests.waiting import scaled, wait_for

CLUSTER = Path(__file__).parents[2] / "cluster_configs" / "local.yaml"
BEGINS = (
    "import signal, time; from pathlib import Path; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "Path({logs!r}).mkdir(); time.sleep(3600)"
)
"""A launcher takes SIGINT even if it is ignored where it is started, as it is in the background of a shell."""

REPORTS = (
    "import signal, sys, time; from pathlib import Path; "
    "signal.signal(signal.SIGINT, lambda *_: (time.sleep(1), sys.exit())); Path({logs!r}).mkdir()\n"
    "while True: time.sleep(0.1)"
)
"""It needs a second once it has been told to end. A `signal.pause` might begin just after the signal."""


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[list[str]]]:
    """Lets launchers run a few lines instead; the commands that they should have run."""

    def replace(code: str) -> list[list[str]]:
        asked: list[list[str]] = []

        def stand_in(command: Sequence[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
            asked.append(list(command))
            return spawn([sys.executable, "-S", "-c", code], log, env)

        monkeypatch.setattr(own_launcher, "spawn", stand_in)
        return asked

    return replace


def test_a_run_begins_in_the_folder_that_was_made_for_it(
    tmp_path: Path, commands: Callable[[str], list[list[str]]]
) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)  # another run
    launcher = _launcher(CLUSTER, None, (), tmp_path)
    assert launcher.run_dir == tmp_path / "run-2" and os.listdir(launcher.run_dir) == []
    asked = commands(BEGINS.format(logs=str(launcher.run_dir / "logs")))
    launcher.start()
    assert (launcher.run_dir / "logs" / "launcher.log").exists()
    assert launcher.end() and not launcher.runs
    (command,) = asked
    assert command[command.index("--folder") + 1] == str(launcher.run_dir) and "--runs-dir" not in command
    assert launcher.run_dir.is_dir()


@pytest.mark.parametrize("has_process", [False, True])
def test_a_launcher_may_take_its_time_to_report_but_not_to_end_its_processes(
    tmp_path: Path, commands: Callable[[str], list[list[str]]], monkeypatch: pytest.MonkeyPatch, has_process: bool
) -> None:
    monkeypatch.setattr(own_launcher, "STOP_S", 0.0)
    monkeypatch.setattr(own_launcher, "ENDS_S", 0.0)
    launcher = _launcher(CLUSTER, None, (), tmp_path)
    commands(REPORTS.format(logs=str(launcher.run_dir / "logs")))
    launcher.start()
    command = [sys.executable, "-S", "-c", "input()", str(launcher.run_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as one:  # it ends with its input
        if has_process:
            # the kernel shows the arguments of a process a moment after it has begun a program
            wait_for(lambda: str(launcher.run_dir) in psutil.Process(one.pid).cmdline(), 10)
            write_started(launcher.run_dir, [StartedProcess("service-here", "service", one.pid)])
        assert launcher.end() == (not has_process) and not launcher.runs


def test_a_launcher_that_checks_for_long_is_waited_for(
    tmp_path: Path, commands: Callable[[str], list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_launcher, "FOLDER_S", 0.0)
    launcher = _launcher(CLUSTER, None, (f"deadlines.startup_s={scaled(60):g}",), tmp_path)
    commands("import time; time.sleep(1); " + BEGINS.format(logs=str(launcher.run_dir / "logs")))
    launcher.start()
    assert launcher.runs and launcher.end()


def test_nothing_is_left_of_a_run_that_did_not_begin(
    tmp_path: Path, commands: Callable[[str], list[list[str]]]
) -> None:
    launcher = _launcher(CLUSTER, None, (), tmp_path)
    commands("print('error: no such model')")
    with pytest.raises(RunFailed, match=r"^no such model$"):
        launcher.start()
    assert os.listdir(tmp_path) == []
    unused = _launcher(CLUSTER, None, (), tmp_path)
    assert unused.end() and os.listdir(tmp_path) == []
