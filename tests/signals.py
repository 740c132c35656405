"""Handlers of signals that the code under test replaces."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def own_handlers(*numbers: int) -> Iterator[None]:
    """Put pytest's handlers of these signals back in the end."""
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
