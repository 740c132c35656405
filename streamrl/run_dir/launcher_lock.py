"""Whether a launcher owns a run's folder: it holds a lock there for as long as it lives, however it ends."""

from __future__ import annotations

import fcntl
import os
import re
import socket
from pathlib import Path
from typing import BinaryIO

from streamrl.errors import ErrorCode
from streamrl.plain_files import SEARCH, open_plain
from streamrl.run_dir import layout

MOST_TEXT = 1000
"""Most bytes that are read of what a launcher writes into its lock."""


def owner_line() -> str:
    """Return what this process, a launcher, writes into its lock."""
    return _line(os.getpid(), socket.gethostname())


def owner_here(folder: Path) -> str | None:
    """Return the line of the launcher that owns a folder now; None: there is none on this machine.

    See `has_launcher`, also for the moment in which the lock is taken.
    """
    found = owner(folder)
    if found is None or found[1] != socket.gethostname() or not has_launcher(folder):
        return None
    return _line(*found)


def owner(folder: Path) -> tuple[int, str] | None:
    """Return process and machine of the launcher that has a folder's lock, or had it last; None: the lock does not say.

    Args:
        folder: of a run, or of a site that is part of one.
    """
    folder = layout.whole_folder(folder)
    try:
        with open_plain(folder / layout.LOCK) as lock:
            return _owner(_text(lock))
    except OSError:
        return None


def in_use(folder: Path, owner: str) -> str:
    """Return the text of a launch that is refused as another launcher owns its folder.

    Args:
        folder: the run's folder.
        owner: which launcher, in words.
    """
    return ErrorCode.RESUME.refer(f"{folder} is in use by another launcher ({owner})")


def has_launcher(folder: Path) -> bool:
    """Return whether a launcher owns the folder of a run or of a site; true if that cannot be told.

    A lock that was written on another machine tells nothing here: on many file systems it does not reach others.

    The lock is taken for a moment if it is free, so look only where a launcher seems to be gone: one that starts in
    that moment would be refused.
    """
    folder = layout.whole_folder(folder.resolve())
    try:
        with open_plain(folder / layout.LOCK) as lock:
            if (text := _text(lock)) and ((found := _owner(text)) is None or found[1] != socket.gethostname()):
                return True
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # it is held, or not ours to look at
        return True
    return False


class HeldFolder:
    """The folder whose lock this process holds, and whether it is still there under its name, and nobody else's."""

    def __init__(self, folder: Path, lock: int) -> None:
        """
        Args:
            folder: the folder.
            lock: descriptor of its lock.

        Raises:
            OSError: the folder is not there.
        """
        self.path, self._lock = folder, lock
        self._folder = os.open(folder, SEARCH)
        self._missed = 0

    def close(self) -> None:
        """Let go of the folder itself; its lock is the caller's."""
        os.close(self._folder)

    def look(self) -> bool:
        """Look for the folder; return whether it is missing at this moment.

        A file system that does not answer says nothing about it. Nor does a lock that somebody has removed or replaced,
        unless the logs are gone as well, as in a folder that is being deleted, or another launcher has the new one.
        """
        try:
            there = os.path.samestat(os.stat(self.path), os.fstat(self._folder))
            there = there and ((self.path / layout.LOCK).exists() or (self.path / layout.LOGS).exists())
        except (FileNotFoundError, NotADirectoryError):
            there = False
        except OSError:
            there = True
        there = there and not self.is_taken()
        self._missed = 0 if there else self._missed + 1
        return not there

    def is_taken(self) -> bool:
        """Return whether another launcher has made and locked a new lock, in the place of the one that was removed."""
        try:
            with open_plain(self.path / layout.LOCK) as lock:
                if os.path.samestat(os.fstat(lock.fileno()), os.fstat(self._lock)):
                    return False
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, as in `has_launcher`: those do not exclude
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    @property
    def is_gone(self) -> bool:
        """Whether the folder is moved, deleted or taken: the last two looks missed it, as one may on a network."""
        return self._missed > 1


def _line(pid: int, machine: str) -> str:
    return f"process {pid} on {machine}"


def _text(lock: BinaryIO) -> str:
    return lock.read(MOST_TEXT).decode(errors="replace")


def _owner(text: str) -> tuple[int, str] | None:
    found = re.fullmatch(r"process ([0-9]+) on (\S+)", text)
    return None if found is None else (int(found[1]), found[2])
