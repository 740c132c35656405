"""Whether a launcher owns a run's folder: it holds a lock there for as long as it lives, however it ends."""

from __future__ import annotations

import fcntl
import os
import re
import socket
from pathlib import Path
from typing import BinaryIO

from streamrl.plain_files import open_plain
from streamrl.run_dir import layout

MOST_TEXT = 1000
"""Most bytes that are read of what a launcher writes into its lock."""


def owner_line() -> str:
    """Return what this process, a launcher, writes into its lock."""
    return f"process {os.getpid()} on {socket.gethostname()}"


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
    """The folder whose lock this process holds, and whether it is still there under its name."""

    def __init__(self, folder: Path, lock: int) -> None:
        """
        Args:
            folder: the folder.
            lock: descriptor of its lock.
        """
        self.path, self._lock = folder, lock
        self._missed = 0

    def look(self) -> bool:
        """Look for the folder; return whether it is missing at this moment.

        A file system that does not answer says nothing about it.
        """
        try:
            there = os.path.samestat(os.stat(self.path / layout.LOCK), os.fstat(self._lock))
        except (FileNotFoundError, NotADirectoryError):
            there = False
        except OSError:
            there = True
        self._missed = 0 if there else self._missed + 1
        return not there

    @property
    def is_gone(self) -> bool:
        """Whether the folder has been moved or deleted: the last two looks missed it, as one may on a network."""
        return self._missed > 1


def _text(lock: BinaryIO) -> str:
    return lock.read(MOST_TEXT).decode(errors="replace")


def _owner(text: str) -> tuple[int, str] | None:
    found = re.fullmatch(r"process ([0-9]+) on (\S+)", text)
    return None if found is None else (int(found[1]), found[2])
