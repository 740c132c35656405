"""By what processes of tests are known."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

MARK = "STREAMRL_STARTED_BY"
"""Environment variable: what has started a process (`tests/leaks.py`)."""
WARM = "tests.warm"
"""In the command line of a template (`tests/warm.py`), which a session of pytest keeps."""


@contextlib.contextmanager
def started_by(mark: str) -> Iterator[None]:
    """Have what is started meanwhile be known by this mark."""
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
    """The mark in a process's environment as /proc has it, if it begins so; without that beginning. A process that has
    renamed itself has overwritten part of it, so that its variables cannot be taken apart from the front."""
    key = f"{MARK}={begin}".encode()
    return next((one[len(key) :].decode() for one in environment.split(b"\0") if one.startswith(key)), None)
