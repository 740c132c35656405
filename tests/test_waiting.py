"""Deadlines scale with the machine, and a wait in vain says what for."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import waiting
from tests.waiting import FACTOR, finish, scaled, settled, slowness, until, wait_for

pytest_plugins = ("pytester",)


@pytest.fixture
def ten_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FACTOR, "10")


def test_a_condition_that_holds_is_returned_at_once() -> None:
    assert wait_for(lambda: "found", 0) == "found"
    assert asyncio.run(until(lambda: "found", 0)) == "found"


def test_a_wait_in_vain_lasts_as_long_as_the_machine_is_slow_and_says_what_for(ten_times: None) -> None:
    assert scaled(3) == 30
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"waited 0.5 s \(0\.05 s x 10 on this machine\).*for: .*1 > 2.*\nmore"):
        wait_for(lambda: 1 > 2, 0.05, tell=lambda: "more")
    assert time.monotonic() - began >= 0.5
    with pytest.raises(AssertionError, match="in vain for: a miracle"):
        asyncio.run(until(lambda: False, 0.01, what="a miracle"))


def test_a_condition_that_takes_long_to_check_keeps_no_core_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    computed, slept = [0.0], []
    clock = SimpleNamespace(sleep=slept.append, thread_time=lambda: computed[0], monotonic=lambda: 0.0)
    monkeypatch.setattr(waiting, "time", clock)

    def reads(seconds: float) -> bool:
        computed[0] += seconds
        return len(slept) == 2

    wait_for(lambda: reads(0.5 if slept else 0.0), 1)
    assert slept == [waiting.EVERY_S, 0.5 * waiting.PAUSES]


@pytest.mark.usefixtures("ten_times")
def test_a_machine_that_stands_still_neither_ends_a_wait_nor_settles_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, looks = itertools.chain([1e6], itertools.repeat(0.1)), [0.0]
    clock = SimpleNamespace(
        sleep=lambda _: looks.append(looks[-1] + next(pauses)), thread_time=lambda: 0.0, monotonic=lambda: looks[-1]
    )
    monkeypatch.setattr(waiting, "time", clock)
    wait_for(lambda: len(looks) == 4, 0.2)
    looks[:], pauses = [0.0], itertools.chain([1e6], itertools.repeat(0.1))
    assert settled(lambda: len(looks) > 3)


def test_a_process_that_has_ended_is_not_waited_for() -> None:
    code = "import sys; print('told'); sys.exit(3)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with pytest.raises(AssertionError, match=r"ended with exit code 3 before: a sign\ntold"):
        wait_for(lambda: False, 60, process, what="a sign")


def test_a_process_that_does_not_end_is_killed_and_its_output_is_told() -> None:
    code = "import time; print('told', flush=True); time.sleep(3600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with pytest.raises(AssertionError, match="it did not end within") as found:
        finish(process, 0.5)
    assert process.returncode == -9 and "time.sleep(3600)" in str(found.value)


def test_the_factor_is_measured_once_and_is_never_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FACTOR)
    monkeypatch.setattr(waiting, "COMPUTE_S", 1e9)
    monkeypatch.setattr(waiting, "START_S", 1e9)
    assert slowness() == 1.0
    monkeypatch.setattr(waiting, "COMPUTE_S", 1e-3)
    assert slowness(100) == 1.0  # as it was
    assert waiting.measure() > 10
    monkeypatch.setattr(waiting, "COMPUTE_S", 1e9)
    monkeypatch.setattr(waiting, "START_S", 1e-3)
    assert waiting.measure() > 10
    monkeypatch.delenv(FACTOR)
    monkeypatch.setattr(waiting, "measure", lambda: 1.0)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert slowness(6) == 3.0  # six workers with two processes each on four cores


def test_limits_of_tests_scale_in_every_worker_and_the_header_says_by_how_much(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, ten_times: None
) -> None:
    root = Path(__file__).parents[1]
    pytester.makefile(".txt", long_tests="")
    pytester.makeconftest((root / "tests" / "conftest.py").read_text())
    pytester.makepyprojecttoml("[tool.pytest.ini_options]\ntimeout = 300\n")
    pytester.makepyfile(
        """
        import os
        import pytest

        def limit(request):
            return request.node.get_closest_marker("timeout").args[0]

        @pytest.mark.timeout(7)
        def test_own(request):
            assert limit(request) == 70

        @pytest.mark.timeout(timeout=8)
        def test_by_name(request):
            assert limit(request) == 80

        def test_general(request):
            assert limit(request) == 3000
            assert os.environ["STREAMRL_TEST_SLOWNESS"] == "10"
        """
    )
    monkeypatch.setenv("PYTHONPATH", str(root))
    result = pytester.runpytest_subprocess("-q", "-n", "2", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["deadlines of tests: 10 x those of an idle machine"])
