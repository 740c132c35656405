"""How many episodes fit into the memory of a process that starts a server for each."""

from __future__ import annotations

import statistics

from streamrl.environments.environment_process import EnvironmentProcess

MOST_KEPT = 128
"""Servers whose sizes are remembered."""


class ServerRoom:
    """Lets an episode in if all that are open would have room, before they have started their servers.

    Each server counts with what it uses now, or with what half of the last ones have come to use, if that is more.
    Until a first one is known, a process gets one episode.
    """

    def __init__(self, room: float) -> None:
        """`room`: bytes that a process may use for all."""
        self._room = room
        self._most: dict[int, int] = {}
        """Most bytes that the last servers were seen with, by PID."""
        self._size: float | None = None
        """Bytes of a server; None: unknown."""

    @property
    def known(self) -> bool:
        """Whether the size of a server is known."""
        return self._size is not None

    def learn(self, process: EnvironmentProcess) -> None:
        """Take in the memory that was last seen of a process."""
        sizes = list(process.used.started.items())
        starting = len(process.episodes) - len(process.reset)
        for pid, size in sizes[: max(0, len(sizes) - starting)]:  # the last ones are still starting
            self._most[pid] = max(size, self._most.pop(pid, 0))
        for pid in list(self._most)[:-MOST_KEPT]:
            del self._most[pid]
        if self._most:
            self._size = statistics.median(self._most.values())
        elif process.reset:  # its servers are elsewhere
            self._size = 0.0

    def fits(self, process: EnvironmentProcess) -> bool:
        """Whether a process has room for one more episode; one without any has."""
        open_ones = len(process.episodes)
        if not open_ones:
            return True
        if self._size is None:
            return False
        used = process.used.own + sum(max(size, self._size) for size in process.used.started.values())
        missing = max(0, open_ones - len(process.used.started))
        return used + (missing + 1) * self._size <= self._room
