"""A pytest plugin that ends processes left behind by a test, and fails the test.

Processes are recognized by an environment variable that names the test and that children inherit, so they are found
even if they have another parent by now. Processes started in the set-up of a fixture for several tests (a Ray cluster,
a shared engine) carry the fixture's name instead, and are looked for after its teardown. Children with their own
environment are recognized by their parent, which is this process. Workers of xdist ignore each other's processes: the
variable begins with the pid of pytest's own process.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator
from typing import Any

import psutil
import pytest

from streamrl.runtime.processes import EXEC_S, KERNEL
from tests.marks import WARM, mark_of, started_by
from tests.waiting import Deadline

GOING_S = 2.0
"""Seconds granted to processes that are about to end."""
COMPILERS = "torch/_inductor/compile_worker"
OF_PYTHON = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", COMPILERS, WARM)
"""Parts of command lines of helpers that libraries, or `tests/warm.py`, keep for the life of this process."""


class Leaks:
    """The processes that this process's tests have started."""

    def __init__(self) -> None:
        self._own = os.getpid()
        self._fixtures: set[str] = set()
        """Names of the fixtures with a wider scope than a test that are set up."""
        self._others: set[int] = set()
        """Pids of foreign processes, so that each is examined only once."""
        self._clean: tuple[str, frozenset[str]] | None = None
        """State of the machine and fixtures that are set up when nothing but foreign processes was found."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Mark what a test starts with the test's name."""
        with started_by(f"{self._own} {item.nodeid}"):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        """Mark what a fixture for several tests starts with the fixture's name."""
        if fixturedef.scope == "function":
            return (yield)
        self._fixtures.add(name := _name(fixturedef))
        with started_by(f"{self._own} {name}"):
            return (yield)

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        """Note that the fixture's processes should be gone from now on."""
        self._fixtures.discard(_name(fixturedef))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        """Fail a test that has left processes, after all teardowns."""
        try:
            return (yield)
        finally:
            if left := self.end_left():
                pytest.fail("it has left processes, which were ended now:\n" + "\n".join(left), pytrace=False)

    def left(self) -> list[int]:
        """Return the pids of processes that should be gone and are not.

        Most tests start none. Where no process at all has begun since only foreign ones were found, there is nothing to
        look for.
        """
        now = (_begun(), frozenset(self._fixtures))
        if now[0] and now == self._clean:
            return []
        there = {int(name) for name in os.listdir("/proc") if name.isdigit()} if os.path.isdir("/proc/self") else set()
        self._others &= there
        found = []
        own = there - self._others - {self._own}
        for pid in own:
            match self._is_left(pid):
                case True:
                    found.append(pid)
                case None:
                    self._others.add(pid)
        self._clean = now if own <= self._others else None
        return found

    def _is_left(self, pid: int) -> bool | None:
        """Return whether a process should be gone; None: it is not a test's."""
        try:
            environment, parent, ended = _read(pid)
            end = time.monotonic() + EXEC_S
            while not (environment or ended) and parent not in (self._own, KERNEL) and time.monotonic() < end:
                time.sleep(0.001)
                environment, parent, ended = _read(pid)
        except OSError:  # of another user; or without memory: the kernel's own, or one that has ended
            return None if os.path.isdir(f"/proc/{pid}") else False
        if ended:
            return False
        name = mark_of(environment, f"{self._own} ")
        if name is None and parent != self._own:
            return None
        return name not in self._fixtures and not self._is_helper(pid, parent)

    def _is_helper(self, pid: int, parent: int) -> bool:
        """Return whether a process is a library's, for the life of this process: also those of torch's compilers."""
        if parent == self._own:
            return _says(pid, *OF_PYTHON)
        return _says(pid, COMPILERS) and _says(parent, COMPILERS)

    def end_left(self) -> list[str]:
        """Kill the processes left a moment after a test; return a line about each."""
        if not self.left():
            return []
        deadline = Deadline(GOING_S)
        while (left := self.left()) and not deadline.is_over():
            time.sleep(0.05)
        lines = []
        for pid in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                age = time.time() - process.create_time()
                lines.append(f"{pid} ({age:.0f} s old, parent {process.ppid()}): {' '.join(process.cmdline())[:300]}")
                process.kill()
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        return lines


def _begun() -> str:
    """Return how many processes and threads this machine has started since its boot; '' where it does not say."""
    with contextlib.suppress(OSError), open("/proc/stat") as file:
        count = next((line.split()[1] for line in file if line.startswith("processes ")), "")
        return "" if count == "0" else count  # sandboxes of some kinds do not count
    return ""


def _read(pid: int) -> tuple[bytes, int, bool]:
    """Read a process's environment, its parent, and whether it has ended.

    Raises:
        OSError: it is gone, of another user, or the kernel's own.
    """
    with open(f"/proc/{pid}/environ", "rb") as file:
        environment = file.read()
    with open(f"/proc/{pid}/stat", "rb") as file:
        state, parent = file.read().rpartition(b")")[2].split()[:2]
    return environment, int(parent), state in (b"Z", b"X")


def _name(fixture: pytest.FixtureDef[Any]) -> str:
    return f"the {fixture.scope}'s fixture {fixture.argname} of {fixture.baseid}"


def _says(pid: int, *parts: str) -> bool:
    """Return whether a process's command line has one of these parts; a process that is gone has them all."""
    with contextlib.suppress(psutil.NoSuchProcess):
        words = " ".join(psutil.Process(pid).cmdline())
        return any(part in words for part in parts)
    return True
