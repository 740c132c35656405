"""The stress script counts what failed in any of its runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil

from streamrl.runtime.processes import is_alive
from tests.loaded_tool import loaded_tool
from tests.marks import descendants
from tests.waiting import scaled, wait_for

stress = loaded_tool("stress")

FLAKY = """
import subprocess
from pathlib import Path

import pytest

SEEN = Path(__file__).with_name("seen")

def test_passes():
    subprocess.run(["true"], check=True)

def test_fails_every_second_time():
    seen = len(SEEN.read_text()) if SEEN.exists() else 0
    SEEN.write_text("x" * (seen + 1))
    assert seen % 2 == 0

@pytest.mark.skip
def test_is_left_out():
    raise AssertionError
"""


def test_what_ever_failed_is_listed_first_and_told_by_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "test_flaky.py").write_text(FLAKY)
    (tmp_path / "test_broken.py").write_text("raise ImportError('no such thing')")
    (tmp_path / "pytest.ini").touch()  # names are relative to this folder, wherever this clone is
    command = [sys.executable, "tools/stress.py", "--busy", "0", "--workers", "1", "--kept", str(tmp_path / "kept")]
    flaky, broken = str(tmp_path / "test_flaky.py"), str(tmp_path / "test_broken.py")
    options = {"cwd": Path(__file__).parents[1], "capture_output": True, "text": True, "timeout": scaled(120)}
    done = subprocess.run([*command, "--count", "2", flaky], **options)  # type: ignore[call-overload]
    header, first, second, total = done.stdout.splitlines()[-4:]
    assert (header.split(), done.returncode) == (["test", "runs", "failures"], 1)
    assert first.split() == ["test_flaky.py::test_fails_every_second_time", "2", "1"]
    assert second.split() == ["test_flaky.py::test_passes", "2", "0"]
    assert total == "2 tests, 4 runs, 1 tests ever failed"
    done = subprocess.run([*command, "--count", "1", broken], **options)  # type: ignore[call-overload]
    assert done.returncode == 1 and "1 tests ever failed" in done.stdout
    done = subprocess.run([*command, "--count", "1", f"{flaky}::test_passes"], **options)  # type: ignore[call-overload]
    assert done.returncode == 0 and done.stdout.endswith("1 tests, 1 runs, 0 tests ever failed\n")


def test_what_it_started_ends_with_it_and_it_tells_what_it_found_so_far(tmp_path: Path) -> None:
    (tmp_path / "test_long.py").write_text(
        "import subprocess\n\ndef test_long():\n"
        "    with subprocess.Popen(['sh', '-c', 'kill -STOP $$'], start_new_session=True):\n"  # as a stopped rank
        "        subprocess.run(['sleep', '600'])\n"
    )
    command = [
        sys.executable,
        "tools/stress.py",
        "--busy",
        "1",
        "--kept",
        str(tmp_path),
        str(tmp_path / "test_long.py"),
    ]
    with subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True) as told:
        wait_for(lambda: any(words[:1] == ["sleep"] for _, words in descendants(told.pid)), 120)
        wait_for(lambda: any(one.status() == psutil.STATUS_STOPPED for one, _ in descendants(told.pid)), 20)
        started = [process.pid for process, _ in descendants(told.pid)]
        told.terminate()
        output, _ = told.communicate(timeout=scaled(60))
    assert output.startswith("stopped; so far:") and told.returncode == 1
    wait_for(lambda: not any(map(is_alive, started)), 20)


def test_a_round_is_added_to_those_before_with_its_failures(tmp_path: Path) -> None:
    file = tmp_path / "rounds.json"
    stress.record(file, {"a": True, "b": False}, 61.7, 3, 2)
    stress.record(file, {"a": True}, 5, 3, 2)
    first, second = json.loads(file.read_text())
    assert (first["seconds"], first["tests"], first["failed"]) == (62, 2, ["b"])
    assert (second["tests"], second["failed"]) == (1, []) and second["machine"] == first["machine"]
    assert (first["workers"], first["busy"]) == (3, 2)


def test_rounds_that_could_not_be_recorded_are_refused_before_the_first(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("[")
    for options, words in (
        (["--record", str(tmp_path / "a.json"), "tests/test_sleeps.py"], "--record is for rounds of all files"),
        (["--record", str(tmp_path / "a.json"), "--delays"], "without delays"),
        (["--record", str(tmp_path / "none" / "a.json")], "no folder"),
        (["--record", str(tmp_path / "broken.json")], "no list of rounds"),
    ):
        command = [sys.executable, "tools/stress.py", *options]
        done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
        assert done.returncode == 2 and words in done.stderr, done.stderr


CLOSING = """
import os
import resource

def test_closing_a_pipe_waits_for_nothing():
    begun = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    for _ in range(1000):
        for end in os.pipe():
            os.close(end)
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - begun < 10
"""


def test_system_calls_wait_with_delays(tmp_path: Path) -> None:
    (tmp_path / "test_closing.py").write_text(CLOSING)
    command = [sys.executable, "tools/stress.py", "--delays", "--busy", "0", "--workers", "1", "--count", "1"]
    command += ["--kept", str(tmp_path), str(tmp_path / "test_closing.py")]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=scaled(60))
    assert done.returncode == 1 and "1 tests, 1 runs, 1 tests ever failed" in done.stdout, done.stdout + done.stderr
    output = (tmp_path / "round-1.log").read_text()
    assert "test_closing_a_pipe_waits_for_nothing" in output and "preload" not in output


def test_the_files_that_start_processes_are_found_by_what_they_contain() -> None:
    files = stress.files_that_start_processes()
    for name in ("diagnose/test_stacks.py", "end_to_end/test_ray.py", "tasks/test_reward_pool.py", "test_orphans.py"):
        assert f"tests/{name}" in files
    assert "tests/scheduler/test_dispatch_policies.py" not in files


def test_a_round_without_a_report_or_that_failed_outside_its_tests_is_a_failure(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    assert stress.results(report, 139) == {"pytest": False}
    report.write_text('<testsuite><testcase file="test_x.py" classname="test_x" name="test_y"/></testsuite>')
    assert stress.results(report, 0) == {"test_x.py::test_y": True}
    assert stress.results(report, 1) == {"test_x.py::test_y": True, "pytest": False}
