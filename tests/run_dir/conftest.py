"""The synthetic run folder of the report's tests, a disk that is full, and what reaches a disk."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.report.conftest import make_run as make_run

FILE_LIMIT = "raise the limit on the size of a file (`ulimit -f`)"
"""What an error says of a write that `file_size_limit` fails."""


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Let files of this process have at most `size` bytes, as on a full disk: a write that passes it is short, the next
    one fails (EFBIG in place of ENOSPC)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Disk:
    """What this process has made sure to be on disk, and renamed, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, str]] = []
        """('on disk', name of a file or folder) or ('renamed', its name before)."""
        self._fsync, self._replace = os.fsync, os.replace
        monkeypatch.setattr(os, "fsync", self._synced)
        monkeypatch.setattr(os, "replace", self._renamed)

    def _synced(self, descriptor: int) -> None:
        self.events.append(("on disk", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        self._fsync(descriptor)

    def _renamed(self, source: Path, target: Path) -> None:
        self.events.append(("renamed", Path(source).name))
        self._replace(source, target)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)
