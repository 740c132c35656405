"""Waits of tests for conditions, with deadlines that scale with the current slowness of this machine.

A deadline in a test is for a condition that never comes true, so no machine may miss it otherwise. Seconds are meant
for an idle machine of the kind that `COMPUTE_S` was measured on, and multiplied by `slowness()`, which is measured once
at the start of pytest's session and is the same in all its workers. Nothing else in tests/ may sleep in order to wait
(tests/test_sleeps.py).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
FACTOR = "STREAMRL_TEST_SLOWNESS"
"""Environment variable that passes the factor to pytest's workers; if it is already set, nothing is measured."""
COMPUTE_S, START_S = 0.077, 0.136
"""Seconds of the two parts of `measure` on an idle machine (2 cores of an AMD EPYC with AVX2, Python 3.11)."""
LOOPS = 2_000_000
IMPORTS = "import asyncio, json, multiprocessing, subprocess, numpy"
EVERY_S, OFTEN_S = 0.02, 0.002
LOOKS = 10
"""Least number of looks at the clock within a deadline: a longer pause between two is a standstill of this machine, in
which nothing else can happen either."""
PAUSES = 10
"""Least seconds between two checks of a condition, in those that one computes: one that reads many files of a run keeps
no core busy that the run could use."""


def measure() -> float:
    """Return how many times slower than the reference this machine is now, at least 1.

    It is the larger factor of computing on one thread and of starting a process that imports something.
    """
    began = time.perf_counter()
    total = 0
    for number in range(LOOPS):
        total += number & 7
    computed = time.perf_counter()
    for _ in range(2):
        subprocess.run([sys.executable, "-c", IMPORTS], check=True)
    started = time.perf_counter()
    return max(1.0, (computed - began) / COMPUTE_S, (started - computed) / 2 / START_S)


def slowness(workers: int = 1) -> float:
    """Return the factor of this session, measured at the first call.

    Args:
        workers: number of pytest's workers, each of which will keep two cores busy during the tests.
    """
    if FACTOR not in os.environ:
        os.environ[FACTOR] = f"{measure() * max(1.0, 2 * workers / (os.cpu_count() or 1)):.2f}"
    return float(os.environ[FACTOR])


def scaled(seconds: float) -> float:
    """Scale a deadline that is meant for an idle machine to this machine."""
    return seconds * slowness()


class Deadline:
    """Seconds for something to happen, as they are written for an idle machine; a standstill uses up few of them."""

    def __init__(self, seconds: float) -> None:
        self._limit_s, self._used_s, self._last = scaled(seconds), 0.0, time.monotonic()

    def is_over(self) -> bool:
        """Look at the clock, and return whether the time is over."""
        now = time.monotonic()
        self._used_s += min(now - self._last, self._limit_s / LOOKS)
        self._last = now
        return self._used_s >= self._limit_s


def wait_for(
    condition: Callable[[], T | None],
    seconds: float,
    process: subprocess.Popen[Any] | None = None,
    *,
    what: str = "",
    meanwhile: Callable[[], object] | None = None,
    tell: Callable[[], object] | None = None,
) -> T:
    """Wait until a condition's result is true, and return it.

    Args:
        condition: called repeatedly.
        seconds: deadline on an idle machine.
        process: the process that the condition is about, which must stay alive.
        what: description of the condition, for the error; '': the condition's source.
        meanwhile: called before each check but the first.
        tell: returns further text for the error.

    Raises:
        AssertionError: the deadline is over, or the process has ended.
    """
    deadline, computed = Deadline(seconds), time.thread_time()
    while not (found := condition()):
        if process is not None and process.poll() is not None:
            raise AssertionError(
                f"ended with exit code {process.returncode} before: {_words(condition, what)}\n{_output(process)}"
            )
        if deadline.is_over():
            raise AssertionError(_over(seconds, condition, what) + (f"\n{tell()}" if tell is not None else ""))
        time.sleep(max(EVERY_S, PAUSES * (time.thread_time() - computed)))
        if meanwhile is not None:
            meanwhile()
        computed = time.thread_time()
    return found


async def until(condition: Callable[[], T | None], seconds: float = 30.0, *, what: str = "") -> T:
    """Wait like `wait_for` inside an event loop, which keeps running.

    Raises:
        AssertionError: the deadline is over.
    """
    deadline = Deadline(seconds)
    while not (found := condition()):
        if deadline.is_over():
            raise AssertionError(_over(seconds, condition, what))
        await asyncio.sleep(OFTEN_S)
    return found


async def holds(condition: Callable[[], object], seconds: float) -> None:
    """Check for a while that a condition stays true, i.e. that something does not happen; a slow machine checks less.

    Raises:
        AssertionError: the condition is no longer true.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert condition(), f"it does not hold any more: {_words(condition, '')}"
        await asyncio.sleep(OFTEN_S)


def settled(value: Callable[[], T], quiet_s: float = 0.2, seconds: float = 30.0) -> T:
    """Wait until a value has not changed for a while, and return it; use it if nothing else reports the end of changes.

    Raises:
        AssertionError: the value kept changing.
    """
    last, quiet = value(), Deadline(quiet_s)

    def is_quiet() -> bool:
        nonlocal last, quiet
        if (now := value()) != last:
            last, quiet = now, Deadline(quiet_s)
        return quiet.is_over()

    wait_for(is_quiet, seconds, what=f"an end of changes, after {last}")
    return last


def finish(process: subprocess.Popen[str], seconds: float, tell: Callable[[], object] | None = None) -> str:
    """Wait until a process has ended, and return its output; kill it if it does not end in time.

    Raises:
        AssertionError: it was killed.
    """
    try:
        return process.communicate(timeout=scaled(seconds))[0] or ""
    except subprocess.TimeoutExpired:
        process.kill()
        further = f"\n{tell()}" if tell is not None else ""
        raise AssertionError(
            f"it did not end within {_seconds(seconds)}: {process.args}\n{_output(process)}{further}"
        ) from None


def _over(seconds: float, condition: Callable[[], object], what: str) -> str:
    return f"waited {_seconds(seconds)} in vain for: {_words(condition, what)}"


def _seconds(seconds: float) -> str:
    return f"{scaled(seconds):.1f} s ({seconds:g} s x {slowness():g} on this machine)"


def _words(condition: Callable[[], object], what: str) -> str:
    if what:
        return what
    while isinstance(condition, functools.partial):
        condition = condition.func
    try:
        return " ".join(inspect.getsource(condition).split())
    except (OSError, TypeError):
        return repr(condition)


def _output(process: subprocess.Popen[Any]) -> str:
    """Return the output of an ended process, without waiting for others that still hold its pipe."""
    try:
        output, errors = process.communicate(timeout=scaled(5))
    except (subprocess.TimeoutExpired, ValueError) as error:
        return f"(its output cannot be read: {error})"
    return "\n".join(
        part if isinstance(part, str) else part.decode(errors="replace") for part in (output, errors) if part
    )
