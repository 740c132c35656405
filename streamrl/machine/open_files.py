"""How many files a process may have open: each of its connections is one."""

from __future__ import annotations

import resource

MOST_OPEN_FILES = 65_536
"""Files that a process asks for at most: some programs that it may start close each one that they could have."""


def most_open_files() -> int:
    """Return how many files a process of this machine can have open: `MOST_OPEN_FILES`, or as the hard limit says."""
    return _reachable(*resource.getrlimit(resource.RLIMIT_NOFILE))


def raise_open_files() -> None:
    """Let this process, and those that it starts, have open as many files as `most_open_files` says.

    The usual soft limit of 1,024 is fewer than a large site has connections, and a process that has reached it is ended
    by libzmq's next connection.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft not in (most := _reachable(soft, hard), resource.RLIM_INFINITY):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _reachable(soft: int, hard: int) -> int:
    """Return the files that limits let a process have open; what it has already is never lowered."""
    reachable = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    return max(soft, reachable)
