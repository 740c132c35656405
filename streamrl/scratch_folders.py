"""Folders for what a process needs only while it lives: gone with it, even if it is killed.

A killed process removes nothing. So each folder is locked by the process that made it. The kernel drops the lock when
the process ends, and the first folder that another process makes in the same place takes those away that nobody holds
any more. Their names tell the kernel that they were locked by: a node of a cluster may not see the locks of another.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

PREFIX = "streamrl-"


class ScratchFolder:
    """A new, empty folder with mode 0700; a context manager that gives its path.

    Where the file system has no locks, or the machine was started anew, a killed process's folder stays.
    """

    def __init__(self, parent: Path | None = None) -> None:
        """Make it, and remove those of killed processes.

        Args:
            parent: where it is made; None: in the system's folder for temporary files.

        Raises:
            OSError: there is no such folder, no room in it, or too many files are open.
        """
        place = str(parent or tempfile.gettempdir())
        _remove_abandoned(place)
        held = None
        while held is None:
            self._folder = tempfile.TemporaryDirectory(f".{_kernel()}", PREFIX, place, ignore_cleanup_errors=True)
            held = _hold(self._folder.name)
        self._held = held
        self.path = Path(self._folder.name)

    def close(self) -> None:
        """Remove it with all that is in it."""
        self._folder.cleanup()
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: Any) -> None:
        self.close()


class JoinedFolder:
    """A launcher's folder on another machine, under its name: the last process that needs it there removes it.

    On the launcher's own machine, where it is locked by the launcher, it stays as it is.
    """

    def __init__(self, path: Path) -> None:
        """Make it, unless it is there.

        Raises:
            OSError: it cannot be made.
        """
        self.path, self._held = path, -1
        while self._held < 0:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            held = -1
            try:
                held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(held), path.stat()):
                    self._held, held = held, -1
            except FileNotFoundError:
                continue  # the last one before has just removed it
            except OSError:  # the launcher has it, or there are no locks
                return
            finally:
                if held >= 0:
                    os.close(held)

    def close(self) -> None:
        """Leave it, and remove it with all that is in it if no other process has it."""
        if self._held < 0:
            return
        with contextlib.suppress(OSError):
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._held)
        self._held = -1


def _hold(folder: str) -> int | None:
    """Open and lock a folder; None: before it was locked, another process took it for abandoned."""
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        return None
    except OSError:  # a file system without locks, on which nobody takes it for abandoned
        return held
    if os.path.isdir(folder):
        return held
    os.close(held)
    return None


@functools.cache
def _kernel() -> str:
    """Return six characters that differ between running kernels: only processes of one see each other's locks."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
    except OSError:
        boot = platform.node()
    return hashlib.blake2b(boot.encode(), digest_size=3).hexdigest()


@functools.cache
def _remove_abandoned(parent: str) -> None:
    """Remove, once per process, the folders of this user that no process holds; as root, everybody's."""
    ours = re.compile(rf"{PREFIX}[a-z0-9_]{{8}}\.{_kernel()}")
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                owner = entry.stat(follow_symlinks=False).st_uid
                if ours.fullmatch(entry.name) and os.geteuid() in (owner, 0):
                    _remove_unless_held(entry.path)


def _remove_unless_held(folder: str) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(opened)
