"""A clock for the limits of sandboxes: no test waits for them, and none ends before what it looks at has begun."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

from tests.waiting import scaled


def passing_once(there: Path, seconds: float) -> SimpleNamespace:
    """Return a stand-in for `time` that stands still until a file is there (for a minute at most).

    Args:
        there: the file.
        seconds: by how much each look at the clock moves it on from then on.
    """
    now, began = 0.0, time.monotonic()

    def monotonic() -> float:
        nonlocal now
        if there.exists() or time.monotonic() > began + scaled(60):
            now += seconds
        return now

    return SimpleNamespace(monotonic=monotonic)
