"""The SQLite file of a journal: not forced to disk, since all it saves is time, and replaced if it cannot be read."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)


def open_journal(path: Path, schema: str, load: Callable[[sqlite3.Connection], None]) -> sqlite3.Connection:
    """Open a journal's file and load what an earlier service left in it; replace an unreadable one by an empty one.

    Args:
        path: the file.
        schema: statements that make its tables, if they are not there.
        load: reads the tables; it may be called twice, and is to raise `ValueError` or `TypeError` at nonsense.
    """
    try:
        return _opened(path, schema, load)
    except (sqlite3.DatabaseError, TypeError, ValueError) as error:
        log.warning("replacing the unreadable journal %s with an empty one: %s", path, error)
        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        return _opened(path, schema, load)


def _opened(path: Path, schema: str, load: Callable[[sqlite3.Connection], None]) -> sqlite3.Connection:
    db = sqlite3.connect(path)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=OFF")
    db.executescript(schema)
    load(db)
    return db
