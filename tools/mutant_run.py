"""Run the tests of a module against changed sources of it, in forked processes: a mutant costs its tests alone.

A test run in a fresh interpreter spends most of its time on imports and on collection. So `run_sources` does both once,
and forks a child for each source, which replaces the code of the changed functions and runs the tests, those first that
have failed before, until one fails. A source that differs outside of functions (a constant, a default, a decorator) may
have been copied by other modules already; its child imports and collects everything of this project anew.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import importlib.machinery
import importlib.util
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = ("streamrl", "scheduler", "ranker", "tests")
"""Packages that are imported anew where a source differs outside of functions."""
CPU_FACTOR, CPU_LEAST_S = 5, 10
"""A child gets as many times the CPU seconds of the unchanged module's tests, and at least so many."""
IDLE_FACTOR = 20
"""A child that uses no CPU for as many times its CPU seconds waits for ever and is ended."""
MEMORY = 6 << 30
"""Address space, in bytes, that a child may take beyond its parent's; an endless loop that fills a list ends soon."""
REMEMBERED = 20
"""Number of tests that run first because they have failed last."""
FLAGS = ("-q", "-p", "no:cacheprovider", "-p", "no:leaks", "-p", "no:unraisableexception", "-p", "no:threadexception")


@dataclass(frozen=True)
class Outcome:
    """What the tests say about one source."""

    verdict: str
    """'survived' (all tests passed), 'killed' (one failed), 'broken' (the module or a test cannot be imported), or
    'time' (ended at its limit)."""
    test: str = ""
    """The test that failed."""
    cpu_s: float = 0.0


@dataclass(frozen=True)
class Job:
    """A module, its tests, and the sources to run them against."""

    path: Path
    """The module, relative to `root`."""
    tests: Sequence[str]
    """Files of its tests, or ids of tests, relative to `root`."""
    sources: Sequence[str]
    root: Path = ROOT

    @property
    def name(self) -> str:
        """The module's name."""
        return ".".join(self.path.with_suffix("").parts)


def run_sources(job: Job, seen: Callable[[int, Outcome], None] = lambda number, outcome: None) -> list[Outcome]:
    """Return the outcome of each source.

    Args:
        job: what to run.
        seen: is called with each outcome as soon as it is known.

    Raises:
        SystemExit: the tests fail without any change, or there are none.
    """
    outcomes: dict[int, Outcome] = {}
    later: list[int] = []

    def heard(line: dict[str, Any]) -> None:
        if "again" in line:
            later.append(line["again"])
        elif "number" in line:
            outcomes[line["number"]] = Outcome(**line["outcome"])
            seen(line["number"], outcomes[line["number"]])

    original = (job.root / job.path).read_text(encoding="utf-8")
    lines = _in_session(job, original, list(job.sources), None, heard)
    first = next((Outcome(**line["unchanged"]) for line in lines if "unchanged" in line), Outcome("broken"))
    if first.verdict != "survived":
        output = next((line["output"] for line in lines if "output" in line), "")
        raise SystemExit(f"{job.path}: its tests do not pass without any change: {first}\n{output}")
    for name in next(line["imported"] for line in lines if "imported" in line):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    for number in later:
        lines = _in_session(job, job.sources[number], [], _limit_s(first.cpu_s), lambda line: None)
        outcomes[number] = next((Outcome(**line["unchanged"]) for line in lines if "unchanged" in line), None) or (
            Outcome("time" if any("ended" in line for line in lines) else "broken")
        )
        seen(number, outcomes[number])
    return [outcomes[number] for number in range(len(job.sources))]


def _limit_s(cpu_s: float) -> float:
    return max(CPU_LEAST_S, CPU_FACTOR * cpu_s)


def _in_session(
    job: Job, source: str, changes: list[str], limit_s: float | None, heard: Callable[[dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """Run pytest in a fork that loads the module from `source`, and return what it reports.

    It runs the tests once without a change, and then with each of `changes`.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            os.close(reader)
            _session(job, source, changes, limit_s, os.fdopen(writer, "w"))
        finally:
            os._exit(99)
    os.close(writer)
    lines = []
    with os.fdopen(reader) as reports:
        for text in reports:
            lines.append(json.loads(text))
            heard(lines[-1])
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return lines if os.WIFEXITED(status) else [*lines, {"ended": status}]


def _session(job: Job, source: str, changes: list[str], limit_s: float | None, reports: Any) -> None:
    """Collect the tests and run them (in the fork of `_in_session`)."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        with output.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        if limit_s is not None:
            _limit(limit_s)
        os.chdir(job.root)
        sys.path.insert(0, str(job.root))
        sys.meta_path.insert(0, _Replaced(job.name, job.root / job.path, source))
        _same_examples_every_time()
        before, loop = set(sys.modules), _Loop(job, source, changes, reports, Path(folder), limit_s)
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        arguments = [*FLAGS, "--hypothesis-profile", "mutants", "--basetemp", f"{folder}/pytest", *job.tests]
        pytest.main(arguments, plugins=[loop])
        new = [name for name in sys.modules if name not in before and name.split(".")[0] not in PROJECT]
        sys.stdout.flush()
        for line in ({"imported": new}, {"output": output.read_text(errors="replace")[-3000:]}):
            reports.write(json.dumps(line) + "\n")
        reports.flush()
    os._exit(0)


class _Loop:
    """A pytest plugin that runs the collected tests in a child for each change of the source."""

    def __init__(
        self, job: Job, source: str, changes: list[str], reports: Any, folder: Path, limit_s: float | None
    ) -> None:
        self._job, self._changes, self._reports, self._folder = job, changes, reports, folder
        self._limit_s, self._source = limit_s, source
        self._swap: _Swap | None = None
        self._first: list[str] = []
        self._seconds: dict[str, float] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed or not session.items:
            return True
        if self._changes:
            self._swap = _Swap(self._job, self._source)
        gc.collect()
        gc.freeze()
        unchanged = self._run(session, None)
        self._report({"unchanged": asdict(unchanged)})
        if unchanged.verdict != "survived":
            return True
        self._limit_s = _limit_s(unchanged.cpu_s)
        for number, change in enumerate(self._changes):
            assert self._swap is not None
            if (codes := self._swap.codes(change)) is None:
                self._report({"again": number})
                continue
            outcome = self._run(session, codes)
            if outcome.test:
                self._first = [outcome.test, *(name for name in self._first if name != outcome.test)][:REMEMBERED]
            self._report({"number": number, "outcome": asdict(outcome)})
        return True

    def _report(self, line: dict[str, Any]) -> None:
        self._reports.write(json.dumps(line) + "\n")
        self._reports.flush()

    def _run(self, session: pytest.Session, codes: dict[str, CodeType] | None) -> Outcome:
        result = self._folder / "result"
        result.unlink(missing_ok=True)
        began = resource.getrusage(resource.RUSAGE_CHILDREN)
        pid = os.fork()
        if pid == 0:
            try:
                os.setpgid(0, 0)
                if self._limit_s is not None:
                    _limit(self._limit_s)
                if codes is not None and self._swap is not None:
                    self._swap.apply(codes)
                watch = _Watch()
                session.config.pluginmanager.register(watch)
                places = {name: place for place, name in enumerate(self._first)}
                items = sorted(
                    session.items,
                    key=lambda item: (places.get(item.nodeid, len(places)), self._seconds.get(item.nodeid, 0.0)),
                )
                for item, following in zip(items, [*items[1:], None], strict=True):
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                    if watch.failed:
                        break
                result.write_text(json.dumps([watch.failed, watch.seconds]))
                os._exit(0)
            finally:
                os._exit(99)
        status = _wait(pid, IDLE_FACTOR * (self._limit_s or 60.0))
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = round(ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime, 3)
        if not os.WIFEXITED(status):
            return Outcome("time", cpu_s=cpu_s)
        if not result.exists():  # a BaseException that pytest does not take for a failure
            return Outcome("broken", cpu_s=cpu_s)
        test, seconds = json.loads(result.read_text())
        if codes is None:
            self._seconds = seconds
        return Outcome("killed" if test else "survived", test, cpu_s)


class _Watch:
    """A pytest plugin that notes the first test that fails, and how long each takes."""

    def __init__(self) -> None:
        self.failed = ""
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed and not self.failed:
            self.failed = report.nodeid


class _Swap:
    """Replaces the code of a module's live functions."""

    def __init__(self, job: Job, source: str) -> None:
        self._path = str(job.root / job.path)
        self._outside, self._codes = _outside(source), _functions(source, self._path)
        self._live: dict[str, list[FunctionType]] = {}
        for one in gc.get_objects():
            if type(one) is FunctionType and one.__code__.co_filename == self._path:
                self._live.setdefault(one.__code__.co_qualname, []).append(one)

    def codes(self, change: str) -> dict[str, CodeType] | None:
        """Return the changed code by function; None if a new import is needed."""
        if _outside(change) != self._outside:
            return None
        codes = {name: code for name, code in _functions(change, self._path).items() if code != self._codes.get(name)}
        fits = all(
            name in self._live and all(len(one.__closure__ or ()) == len(code.co_freevars) for one in self._live[name])
            for name, code in codes.items()
        )
        return codes if codes and fits else None

    def apply(self, codes: dict[str, CodeType]) -> None:
        """Let all live functions run the given code."""
        for name, code in codes.items():
            for one in self._live[name]:
                one.__code__ = code


def _outside(source: str) -> str:
    """Return what a source is without the bodies of its functions."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [ast.Pass()]
    return ast.dump(tree)


def _functions(source: str, path: str) -> dict[str, CodeType]:
    """Return the code of the functions of a module and its classes, by qualified name."""
    found: dict[str, CodeType] = {}
    scopes = [compile(source, path, "exec", dont_inherit=True)]
    while scopes:
        for code in scopes.pop().co_consts:
            if isinstance(code, CodeType):
                if code.co_flags & 1:  # CO_OPTIMIZED: a function; those inside of it are constants of its code
                    found[code.co_qualname] = code
                else:
                    scopes.append(code)
    return found


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from a text instead of its file."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec", dont_inherit=True)


class _Replaced(MetaPathFinder):
    """Finds one module, with another source."""

    def __init__(self, name: str, path: Path, source: str) -> None:
        self._name, self._path, self._source = name, str(path), source

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
        if fullname != self._name:
            return None
        loader = _Loader(fullname, self._path, self._source)
        return importlib.util.spec_from_file_location(fullname, self._path, loader=loader)


def _limit(cpu_s: float) -> None:
    """End this process after some seconds of work, and let it not take the machine's memory."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for kind, most in ((resource.RLIMIT_CPU, int(cpu_s) + 1), (resource.RLIMIT_AS, used + MEMORY)):
        _, hard = resource.getrlimit(kind)  # without privileges it can only fall
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


@dataclass
class Patience:
    """Tells a process that waits for ever from one that a busy machine keeps from working."""

    seconds: float
    used: int = -1
    until: float = 0.0

    def is_over(self, used: int, now: float) -> bool:
        """Return whether a process has used no CPU for more than `seconds`.

        Args:
            used: what it has used so far, in any unit.
            now: seconds of a clock that never goes back.
        """
        if used != self.used:
            self.used, self.until = used, now + self.seconds
        return now > self.until


def _wait(pid: int, seconds: float) -> int:
    """Return the status of a child; one that uses no CPU for so many seconds is killed."""
    patience, pause = Patience(seconds), 0.001
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended or patience.is_over(_ticks(pid), time.monotonic()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            return status if ended else os.waitpid(pid, 0)[1]
        time.sleep(pause)
        pause = min(0.02, pause * 1.5)


def _ticks(pid: int) -> int:
    """Return the CPU time that a process has used, user's and system's, in clock ticks."""
    behind_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(behind_name[11]) + int(behind_name[12])


def _same_examples_every_time() -> None:
    """Register the Hypothesis profile of the children: the same examples for every mutant, and failures not shrunk."""
    from hypothesis import Phase, settings

    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("mutants", deadline=None, phases=phases, database=None, derandomize=True)
