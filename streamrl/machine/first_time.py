"""Announcements of what is measured or proven once on a machine and then kept: it takes up to a minute.

Processes of a run have them in their logs, and a command prints them to its user (`announced`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


class _Calls(logging.Handler):
    """Passes each message on."""

    def __init__(self, say: Callable[[str], object]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(record.getMessage())


def announce(work: str) -> None:
    """Say what begins now, as nothing is kept of it: 'measuring ...'."""
    log.info("%s, once on this machine", work)


@contextmanager
def announced(say: Callable[[str], object]) -> Iterator[None]:
    """Call a function with each line that is announced inside the block, in any thread of this process."""
    before, calls = log.level, _Calls(say)
    log.addHandler(calls)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(calls)
        log.setLevel(before)
