"""Marks by which processes of tests are recognized."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import psutil

MARK = "STREAMRL_STARTED_BY"
"""Environment variable that names the test or fixture that started a process (`tests/leaks.py`)."""
WARM = "tests.warm"
"""Part of the command line of a template process (`tests/warm.py`), which lives as long as pytest's session."""


@contextlib.contextmanager
def started_by(mark: str) -> Iterator[None]:
    """Give this mark to all processes started meanwhile."""
    before = os.environ.get(MARK)
    os.environ[MARK] = mark
    try:
        yield
    finally:
        if before is None:
            del os.environ[MARK]
        else:
            os.environ[MARK] = before


def mark_of(environment: bytes, begin: str = "") -> str | None:
    """Return the mark in a process's environment (as in /proc) if it starts with `begin`, without that prefix.

    A process that has renamed itself has overwritten part of its environment, so the variables cannot be parsed from
    the front.
    """
    key = f"{MARK}={begin}".encode()
    return next((one[len(key) :].decode() for one in environment.split(b"\0") if one.startswith(key)), None)


def descendants(pid: int | None = None) -> list[tuple[psutil.Process, list[str]]]:
    """Return the living processes that descend from one (None: this one) and have a command line, each with it.

    A process has none just after it has begun, and when it has ended.
    """
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if words := process.cmdline():
                found.append((process, words))
    return found
