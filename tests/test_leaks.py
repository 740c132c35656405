"""A test that leaves a process behind fails, and that is ended; what fixtures keep for several tests may stay."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from streamrl.runtime.processes import is_alive
from tests import leaks
from tests.leaks import Leaks
from tests.marks import MARK, started_by
from tests.waiting import scaled, wait_for

pytest_plugins = ("pytester",)
ROOT = Path(__file__).parents[1]
TESTS = """
import os, subprocess, sys
from pathlib import Path
import pytest

SLEEPS = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]

def start(name, **options):
    process = subprocess.Popen(SLEEPS, **options)
    Path(name).write_text(str(process.pid))
    return process

@pytest.fixture(scope="module")
def shared():
    process = start("shared")
    yield process
    process.kill()
    process.wait()

@pytest.fixture(scope="module")
def careless():
    return start("careless")

def test_ends_what_it_starts():
    with start("ended") as process:
        process.kill()

def test_leaves_a_process():
    start("left")

def test_leaves_one_without_the_variable():
    start("bare", env={})

def test_leaves_one_with_another_parent():
    code = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], stdout=2, start_new_session=True).pid)"
    done = subprocess.run([sys.executable, "-c", code, *SLEEPS], stdout=subprocess.PIPE, text=True)
    Path("orphan").write_text(done.stdout)

def test_fails_and_leaves_one():
    start("failed")
    raise ValueError("its own reason")

def test_uses_what_is_shared(shared):
    assert shared.poll() is None

def test_uses_it_again(shared):
    assert shared.poll() is None

def test_is_the_last_with_a_careless_fixture(careless):
    pass
"""


def test_what_a_test_leaves_is_named_and_ended(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    soon = "\nfrom tests import leaks\nleaks.GOING_S = 0.1\n"  # nothing here is about to end by itself
    pytester.makefile(".txt", long_tests="")
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text() + soon)
    pytester.makepyfile(TESTS)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    result = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=7, failed=1, errors=5)
    for name in ("leaves_a_process", "leaves_one_without_the_variable", "leaves_one_with_another_parent"):
        result.stdout.fnmatch_lines([f"ERROR *::test_{name}*"])
    for name in ("fails_and_leaves_one", "is_the_last_with_a_careless_fixture"):
        result.stdout.fnmatch_lines([f"ERROR *::test_{name}*"])
    result.stdout.fnmatch_lines(["*its own reason*"])
    result.stdout.fnmatch_lines(["it has left processes, which were ended now:", "* s old, parent *time.sleep(600)*"])
    names = ("ended", "left", "bare", "orphan", "failed", "shared", "careless")
    assert not [name for name in names if is_alive(int((pytester.path / name).read_text()))]


def test_looking_takes_under_five_milliseconds() -> None:
    leaks, times = Leaks(), []
    for _ in range(20):
        began = time.thread_time()  # of the CPU: others may have it
        leaks.left()
        times.append(time.thread_time() - began)
    assert min(times) < scaled(0.005)


def test_nothing_is_listed_again_until_a_process_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, listed = "7", []
    plugin = Leaks()
    monkeypatch.setattr(leaks, "_begun", lambda: begun)
    monkeypatch.setattr(leaks, "_read", lambda pid: (b"PATH=/bin", 1, False))
    monkeypatch.setattr(leaks.os, "listdir", lambda path: listed.append(path) or ["self", "4000000"])
    for _ in range(3):
        assert plugin.left() == []
    assert len(listed) == 1
    begun = "8"
    assert plugin.left() == [] and len(listed) == 2
    plugin._fixtures.add("a fixture")
    assert plugin.left() == [] and len(listed) == 3
    begun = ""  # this machine does not say
    for number in (4, 5):
        assert plugin.left() == [] and len(listed) == number


def test_what_begins_after_a_look_without_result_is_found() -> None:
    plugin = Leaks()
    plugin.left()
    plugin.left()
    with started_by(f"{os.getpid()} a test"):
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        assert process.pid in plugin.left()
        assert process.pid in plugin.left()
    finally:
        process.kill()
        process.wait()


def test_a_process_that_has_no_environment_yet_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    own = f"{MARK}={os.getpid()} a test".encode()
    for last, left in ((own, True), (b"PATH=/bin", None)):
        seen = iter([b"", b"", last])
        monkeypatch.setattr(leaks, "_read", lambda pid, seen=seen: (next(seen), 1, False))
        assert Leaks()._is_left(4_000_000) is left
        assert next(seen, None) is None  # all were read
    monkeypatch.setattr(leaks, "EXEC_S", 0.01)
    for parent, ended, left in ((1, False, None), (leaks.KERNEL, False, None), (1, True, False)):
        monkeypatch.setattr(leaks, "_read", lambda pid, parent=parent, ended=ended: (b"", parent, ended))
        assert Leaks()._is_left(4_000_000) is left


def test_compilers_of_torch_and_what_they_start_may_stay() -> None:
    wait = "import subprocess, sys, time; sys.argv[2:] and subprocess.Popen(sys.argv[2:]).wait(); time.sleep(600)"
    inner = [sys.executable, "-c", wait]
    for word, is_left in ((leaks.COMPILERS, False), ("something else", True)):
        with started_by(f"{os.getpid()} a test"):
            outer = subprocess.Popen([sys.executable, "-c", wait, word, *inner, word])
        try:
            (child,) = wait_for(psutil.Process(outer.pid).children, 30.0, what="the process inside")
            assert Leaks()._is_left(child.pid) is is_left
        finally:
            for process in (*psutil.Process(outer.pid).children(), psutil.Process(outer.pid)):
                process.kill()
            outer.wait()
