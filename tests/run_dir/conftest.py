"""The synthetic run folder of the report's tests, and a disk that is full."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

from tests.report.conftest import make_run as make_run


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
