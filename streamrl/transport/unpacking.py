"""Unpacking of msgpack that a peer has sent, within bounds of time.

A byte can be a list of its own. Python's collector walks through all lists and maps made so far, again and again while
more are made: with it 4 MiB of empty lists take 5 s, without it 0.5 s.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgpack

MOST_CONTAINERS = 1 << 20
"""Most lists and maps in one piece. What is ever sent has far fewer: those of real messages take dozens of bytes."""
MOST_VALUES = 1 << 22
"""Most values in all of them."""


class _TooMany(Exception):
    """Raised while msgpack is unpacked."""


def unpack(data: bytes | memoryview) -> Any:
    """Return what bytes of msgpack say, with text as str, and without keys other than text.

    Raises:
        ValueError: they are no msgpack, or have more lists, maps or values than they may. Its text follows an 'is'.
    """
    containers = values = 0

    def counted(container: Any) -> Any:
        nonlocal containers, values
        containers += 1
        values += len(container)
        if containers > MOST_CONTAINERS or values > MOST_VALUES:
            raise _TooMany
        return container

    counting: dict[str, Any] = {}
    if len(data) > MOST_CONTAINERS:  # hooks take time, and a piece of fewer bytes cannot have as many
        most = {"max_array_len": MOST_VALUES, "max_map_len": MOST_VALUES}  # a hook gets a list when it is complete
        counting = {"list_hook": counted, "object_hook": counted, **most}
    with collector_off():
        try:
            return msgpack.unpackb(data, raw=False, strict_map_key=True, timestamp=0, **counting)
        except _TooMany as error:
            raise ValueError(f"of more than {MOST_CONTAINERS} lists and maps, or {MOST_VALUES} values") from error
        except Exception as error:  # msgpack raises many types on bad input
            raise ValueError(f"not msgpack: {type(error).__name__}") from error


@contextmanager
def collector_off() -> Iterator[None]:
    """Keep Python's collector from running while many containers are made.

    It is off as long as any thread is in here, and afterwards as it was before the first came.
    """
    _collector.enter()
    try:
        yield
    finally:
        _collector.leave()


class _Collector:
    """Python's collector, which is one for all threads of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        """Threads, or calls within each other, that need the collector off."""
        self._was_enabled = False

    def enter(self) -> None:
        """Switch the collector off, unless somebody has already done so here."""
        with self._lock:
            if self._users == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._users += 1

    def leave(self) -> None:
        """Switch the collector back on with the last user, if it was on before the first."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._was_enabled:
                gc.enable()


_collector = _Collector()
