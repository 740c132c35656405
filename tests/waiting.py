"""Waits of tests: for facts, with deadlines that scale with how slow this machine is at the moment.

A deadline in a test is for the case that what it waits for never comes. So it must be one that no machine misses:
seconds are written for an idle machine of the kind that `COMPUTE_S` was measured on, and multiplied by `slowness()`,
which is measured once at the start of pytest's session and is the same in all its workers. Nothing else in tests/ may
sleep in order to wait (tests/test_sleeps.py).
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
"""Name of the environment variable that hands the factor on to pytest's workers; set before, it is not measured."""
COMPUTE_S, START_S = 0.077, 0.136
"""What the two parts of `measure` take on an idle machine (2 cores of an AMD EPYC with AVX2, Python 3.11)."""
LOOPS = 2_000_000
IMPORTS = "import asyncio, json, multiprocessing, subprocess, numpy"
EVERY_S, OFTEN_S = 0.02, 0.002


def measure() -> float:
    """How many times longer than the reference this machine takes now, for the worse of: computing on one thread;
    starting a process that imports something. At least 1."""
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
    """The factor of this session, measured when it is first asked for.

    Args:
        workers: of pytest, each of which will keep two cores busy when tests have begun.
    """
    if FACTOR not in os.environ:
        os.environ[FACTOR] = f"{measure() * max(1.0, 2 * workers / (os.cpu_count() or 1)):.2f}"
    return float(os.environ[FACTOR])


def scaled(seconds: float) -> float:
    """A deadline on this machine, of one that is written for an idle machine."""
    return seconds * slowness()


def wait_for(
    condition: Callable[[], T],
    seconds: float,
    process: subprocess.Popen[Any] | None = None,
    *,
    what: str = "",
    meanwhile: Callable[[], object] | None = None,
    tell: Callable[[], object] | None = None,
) -> T:
    """Waits until a condition's result is true, and returns it.

    Args:
        condition: asked again and again.
        seconds: deadline on an idle machine.
        process: of which the condition is: it has to live.
        what: is waited for, for the error; '': the condition's source.
        meanwhile: called before each asking but the first.
        tell: gives more for the error.

    Raises:
        AssertionError: the deadline is over, or the process has ended.
    """
    deadline = time.monotonic() + scaled(seconds)
    while not (found := condition()):
        if process is not None and process.poll() is not None:
            raise AssertionError(
                f"ended with exit code {process.returncode} before: {_words(condition, what)}\n{_output(process)}"
            )
        if time.monotonic() > deadline:
            raise AssertionError(_over(seconds, condition, what) + (f"\n{tell()}" if tell is not None else ""))
        time.sleep(EVERY_S)
        if meanwhile is not None:
            meanwhile()
    return found


async def until(condition: Callable[[], T], seconds: float = 30.0, *, what: str = "") -> T:
    """The same inside an event loop, which goes on meanwhile.

    Raises:
        AssertionError: the deadline is over.
    """
    deadline = time.monotonic() + scaled(seconds)
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(_over(seconds, condition, what))
        await asyncio.sleep(OFTEN_S)
    return found


async def holds(condition: Callable[[], object], seconds: float) -> None:
    """Sees for a while that a condition goes on to be true: for what is not to happen. A slow machine only sees less.

    Raises:
        AssertionError: it is not true any more.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert condition(), f"it does not hold any more: {_words(condition, '')}"
        await asyncio.sleep(OFTEN_S)


def settled(value: Callable[[], T], quiet_s: float = 0.2, seconds: float = 30.0) -> T:
    """Waits until a value has not changed for a while, and returns it: for the end of what comes from outside, which
    nothing else tells.

    Raises:
        AssertionError: it has gone on changing.
    """
    last, since = value(), time.monotonic()

    def is_quiet() -> bool:
        nonlocal last, since
        if (now := value()) != last:
            last, since = now, time.monotonic()
        return time.monotonic() - since > scaled(quiet_s)

    wait_for(is_quiet, seconds, what=f"an end of changes, after {last}")
    return last


def finish(process: subprocess.Popen[str], seconds: float, tell: Callable[[], object] | None = None) -> str:
    """Waits until a process has ended, and returns what it has printed. One that does not end in time is killed.

    Raises:
        AssertionError: it was.
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
    """What an ended process printed; what others still hold its pipe for is not waited for."""
    try:
        output, errors = process.communicate(timeout=scaled(5))
    except (subprocess.TimeoutExpired, ValueError) as error:
        return f"(its output cannot be read: {error})"
    return "\n".join(
        part if isinstance(part, str) else part.decode(errors="replace") for part in (output, errors) if part
    )
