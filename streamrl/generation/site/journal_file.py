"""The SQLite file of a journal: not forced to disk, since all it saves is time, and replaced if it is damaged."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)


_PASSING = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
}
"""Errors of the place, for instance a full disk, which say nothing of what is in the file."""


def open_journal(path: Path, schema: str, load: Callable[[sqlite3.Connection], None]) -> sqlite3.Connection:
    """Open a journal's file and load what an earlier service left in it; replace a damaged one by an empty one.

    One that cannot be opened for another reason stays as it is, and this process keeps its journal in memory alone.

    Args:
        path: the file.
        schema: statements that make its tables, if they are not there.
        load: reads the tables; it may be called again, and is to raise `ValueError` or `TypeError` at nonsense.
    """
    try:
        try:
            return _opened(path, schema, load)
        except (sqlite3.DatabaseError, TypeError, ValueError) as error:
            if _is_passing(error):
                raise
            log.warning("replacing the unreadable journal %s with an empty one: %s", path, error)
            for suffix in ("", "-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            return _opened(path, schema, load)
    except (sqlite3.Error, OSError) as error:
        log.warning("the journal %s cannot be opened, and is kept in memory alone: %s", path, error)
        return _opened(":memory:", schema, load)


def _is_passing(error: Exception) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _PASSING  # the other bits are details


def _opened(path: Path | str, schema: str, load: Callable[[sqlite3.Connection], None]) -> sqlite3.Connection:
    db = sqlite3.connect(path)
    try:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=OFF")
        db.executescript(schema)
        load(db)
    except BaseException:
        db.close()
        raise
    return db
