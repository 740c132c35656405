"""Whether a launcher owns a run's folder: it holds a lock there for as long as it lives, however it ends."""

from __future__ import annotations

import fcntl
import socket
from pathlib import Path

from streamrl.plain_files import open_plain
from streamrl.run_dir import layout

MOST_TEXT = 1000
"""Most bytes that are read of what a launcher writes into its lock."""


def has_launcher(folder: Path) -> bool:
    """Return whether a launcher owns the folder of a run or of a site; true if that cannot be told.

    A lock that was written on another machine tells nothing here: on many file systems it does not reach others.

    The lock is taken for a moment if it is free, so look only where a launcher seems to be gone: one that starts in
    that moment would be refused.
    """
    folder = layout.whole_folder(folder.resolve())
    try:
        with open_plain(folder / layout.LOCK) as lock:
            host = lock.read(MOST_TEXT).decode(errors="replace").rpartition(" on ")[2]
            if host and host != socket.gethostname():
                return True
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # it is held, or not ours to look at
        return True
    return False
