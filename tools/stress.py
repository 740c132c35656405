"""Repeat tests that start processes while other processes keep the machine busy, and list the tests that ever failed.

    python tools/stress.py [--count 10] [--busy 2] [--workers 3] [--delays] [--record FILE] [FILE ...]

A test that depends on the exact timing of a process, or on a fast machine, fails here sooner or later. All files run
once, then all again, so that rare failures are seen under different conditions. With `--delays` system calls of all
processes wait at random (tools/delays.c): orders of events that are rare even under load come within a round or two,
also between the threads of one process, so all tests run. The output of rounds in which a test failed is kept in
build/stress/; `--record` adds each whole round to a file, with its commit and its machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import psutil

from streamrl.machine.compiled_c import compiler_words
from streamrl.machine.cpu import this_cpu
from streamrl.runtime.stop_signals import on_stop

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "stress"
DELAYS = ROOT / "tools" / "delays.c"
STARTS = re.compile(
    r"^(import subprocess|import multiprocessing|import ray\b|from ray\b|import torch\.multiprocessing)"
    r"|\b(Project|ProcessGroup|RewardPool|EmulatedNetwork|Engine|run_ranks)\("
    r"|^from tests\.\S+ import .*\b(Project|run_ranks)\b",
    re.MULTILINE,
)
"""Pattern of test files that start processes."""
BUSY = "while True: pass"
NO_TESTS = 5
"""Exit code of pytest when it has found no tests."""


@dataclass
class Found:
    """Counts of runs and failures by test."""

    runs: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)

    def add(self, results: dict[str, bool]) -> None:
        """Add one run of a file: whether each of its tests has passed."""
        self.runs.update(results.keys())
        self.failures.update(name for name, passed in results.items() if not passed)

    def table(self) -> str:
        """Return one line for each test, failed ones first, and a summary."""
        width = max((len(name) for name in self.runs), default=4)
        lines = [f"{'test':{width}}  runs  failures"]
        for name in sorted(self.runs, key=lambda name: (-self.failures[name], name)):
            lines.append(f"{name:{width}}  {self.runs[name]:4}  {self.failures[name]:8}")
        failed = sum(1 for count in self.failures.values() if count)
        lines.append(f"{len(self.runs)} tests, {self.runs.total()} runs, {failed} tests ever failed")
        return "\n".join(lines)


def results(report: Path, code: int) -> dict[str, bool]:
    """Return whether each test of a round has passed, from pytest's report.

    Without a failed test in the report, pytest's exit code decides for the round as a whole.
    """
    found: dict[str, bool] = {}
    try:
        for case in ET.parse(report).iter("testcase"):
            if case.find("skipped") is None:
                name = f"{case.get('file', case.get('classname'))}::{case.get('name')}"
                passed = case.find("failure") is None and case.find("error") is None
                found[name] = found.get(name, True) and passed  # an error in a test's teardown is a separate case
    except (OSError, ET.ParseError):
        found = {}
    if code not in (0, NO_TESTS) and all(found.values()):
        found["pytest"] = False
    return found


@dataclass(frozen=True)
class Round:
    """A round of all files, as `--record` keeps it."""

    commit: str
    day: str
    machine: str
    workers: int
    """Tests at once."""
    busy: int
    """Processes that keep a core busy meanwhile."""
    seconds: int
    tests: int
    failed: list[str]


def recorded(file: Path) -> list[dict[str, Any]]:
    """Return the rounds in a file; none if there is no such file.

    Raises:
        ValueError: it is something else, or it could not be made.
    """
    if not file.parent.is_dir():
        raise ValueError(f"{file}: no folder {file.parent}")
    try:
        rounds = json.loads(file.read_text()) if file.exists() else []
    except ValueError:
        rounds = None
    if not isinstance(rounds, list):
        raise ValueError(f"{file} is no list of rounds")
    return rounds


def record(file: Path, found: dict[str, bool], seconds: float, workers: int, busy: int) -> None:
    """Add a round to the rounds in a JSON file."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    this = f"{os.cpu_count()} cores of {this_cpu().name}"
    failed = [test for test, passed in found.items() if not passed]
    day = time.strftime("%Y-%m-%d")
    last = Round(commit.stdout.strip(), day, this, workers, busy, round(seconds), len(found), failed)
    file.write_text(json.dumps([*recorded(file), asdict(last)], indent=1) + "\n")


def files_that_start_processes() -> list[str]:
    """Return all test files that start processes, by their contents."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in paths if STARTS.search(path.read_text())]


@contextlib.contextmanager
def beside(count: int) -> Iterator[None]:
    """Keep `count` cores busy, with a process each."""
    busy = [subprocess.Popen([sys.executable, "-S", "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


@contextlib.contextmanager
def delaying() -> Iterator[dict[str, str]]:
    """Compile the library that delays system calls, and give the environment with which processes load it.

    Raises:
        OSError: there is no C compiler.
        ValueError: CC has a quotation without an end.
        subprocess.CalledProcessError: it cannot compile it; it has said why.
    """
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "delays.so")
        library.parent.chmod(0o755)  # for what tests start as another user
        subprocess.run([*compiler_words(), "-O2", "-shared", "-fPIC", "-o", library, DELAYS, "-ldl"], check=True)
        yield {"LD_PRELOAD": str(library)}


def run(files: list[str], workers: int, number: int, kept: Path, environment: Mapping[str, str]) -> dict[str, bool]:
    """Run the tests of these files once, the tests of a file by one worker, as `make test` does.

    Args:
        environment: variables of the tests on top of those of this process.
    """
    kept.mkdir(parents=True, exist_ok=True)
    report, log = kept / "report.xml", kept / f"round-{number}.log"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *files, "-p", "no:cacheprovider", f"--junitxml={report}"]
    command += ["-n", f"{workers}", "--dist", "loadfile", "--no-loadscope-reorder", "-o", "junit_family=xunit1"]
    began = time.monotonic()
    with (
        log.open("w") as output,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as pytest,
    ):
        assert pytest.stdout is not None
        try:
            for line in pytest.stdout:
                output.write(line)
                output.flush()
                if share := re.search(r"\[ *(\d+%)\]$", line):
                    print(f"{number:3}: {share[1]:>4} after {time.monotonic() - began:.0f} s", flush=True)
            pytest.wait()
        except KeyboardInterrupt:
            _kill(pytest.pid)
            raise
    found = results(report, pytest.returncode)
    failed = [test for test, passed in found.items() if not passed]
    print(f"{number:3}: {len(found)} tests, {time.monotonic() - began:.0f} s, {len(failed)} failed", flush=True)
    for test in failed:
        print(f"    {test} (see {log})", flush=True)
    report.unlink(missing_ok=True)
    if not failed:
        log.unlink()
    return found


def _kill(pytest: int) -> None:
    """Kill pytest's group, and what its tests have stopped; what they started in other sessions ends by itself."""
    stopped = []
    for process in psutil.Process(pytest).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_STOPPED:
                stopped.append(process)
    os.killpg(pytest, signal.SIGKILL)
    for process in stopped:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _told_to_end(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> int:
    """Run the tests; return 1 if any test has failed in any run, or if they were stopped."""
    on_stop(_told_to_end, signal.SIGTERM)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="test files (default: all that start processes; with --delays all)")
    parser.add_argument("--count", type=int, default=10, help="runs of each file (default: 10)")
    parser.add_argument("--busy", type=int, default=2, help="busy processes meanwhile (default: 2)")
    parser.add_argument("--workers", type=int, default=3, help="tests that run at once (default: 3)")
    parser.add_argument("--delays", action="store_true", help="delay system calls at random (needs a C compiler)")
    parser.add_argument("--kept", type=Path, default=KEPT, help="folder for the output of rounds with failures")
    parser.add_argument("--record", type=Path, help="JSON file to which each round of all files is added")
    parser.add_argument("--list", action="store_true", help="only list the files")
    args = parser.parse_args()
    files = args.files or (["tests"] if args.delays else files_that_start_processes())
    if args.list:
        print("\n".join(files))
        return 0
    if args.record is not None:
        if args.files or args.delays:
            parser.error("--record is for rounds of all files that start processes, without delays")
        try:
            recorded(args.record)
        except ValueError as error:
            parser.error(f"--record {error}")
    found = Found()
    delayed: AbstractContextManager[dict[str, str]] = delaying() if args.delays else contextlib.nullcontext({})
    try:
        with beside(args.busy), delayed as environment:
            for number in range(1, args.count + 1):
                began = time.monotonic()
                found.add(last := run(files, args.workers, number, args.kept, environment))
                if args.record is not None:
                    record(args.record, last, time.monotonic() - began, args.workers, args.busy)
        stopped = False
    except KeyboardInterrupt:
        print("stopped; so far:")
        stopped = True
    print(found.table())
    return 1 if stopped or any(found.failures.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
