"""The token journal of a site's service: what every running request has produced, so that another instance can go on
from there when its own one dies.

Instances tell what is new about four times a second. It is kept in memory and in a SQLite file, which outlives the
service (not a power cut: it is not forced to disk, what it saves is only time). Memory and file are bounded by the
tokens of requests that are under way: what is finished, or given back, is forgotten.
"""

from __future__ import annotations

import logging
import sqlite3
import zlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from streamrl.rollouts.types import FloatArray, IntArray, PartialSample

log = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS parts (
    sample_id    TEXT NOT NULL,
    start        INTEGER NOT NULL,
    tokens       BLOB NOT NULL,
    logprobs     BLOB NOT NULL,
    versions     BLOB NOT NULL,
    t_dispatched REAL NOT NULL,
    t_first      REAL NOT NULL,
    checksum     INTEGER NOT NULL,
    PRIMARY KEY (sample_id, start)
) WITHOUT ROWID;
"""


_Row = tuple[str, int, bytes, bytes, bytes, float, float]


def _checksum(*row: object) -> int:
    """Of a row; a byte that was changed on disk is no token of an answer."""
    sample_id, start, *blobs, dispatched, first = row
    found = zlib.crc32(f"{sample_id} {start} {dispatched!r} {first!r} {[len(b) for b in blobs]}".encode())  # type: ignore[arg-type]
    for blob in blobs:
        found = zlib.crc32(blob, found)  # type: ignore[arg-type]
    return found


@dataclass
class _Entry:
    """One request's tokens, in parts as they came."""

    t_dispatched: float
    t_first_token: float
    length: int = 0
    tokens: list[IntArray] = field(default_factory=list)
    logprobs: list[FloatArray] = field(default_factory=list)
    versions: list[IntArray] = field(default_factory=list)

    def add(self, tokens: IntArray, logprobs: FloatArray, versions: IntArray) -> None:
        self.tokens.append(tokens)
        self.logprobs.append(logprobs)
        self.versions.append(versions)
        self.length += len(tokens)


class TokenJournal:
    """See the module's text."""

    def __init__(self, path: Path) -> None:
        """Opens the file, with what an earlier service has left in it. A file that cannot be read is begun anew."""
        self._entries: dict[str, _Entry] = {}
        self._forgotten: set[str] = set()
        """Still in the file."""
        self._new: defaultdict[str, list[_Row]] = defaultdict(list)
        """Not yet in the file, by request."""
        try:
            self._db = self._open(path)
        except (sqlite3.DatabaseError, TypeError, ValueError) as error:
            log.warning("beginning the token journal %s anew: %s", path, error)
            for suffix in ("", "-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            self._db = self._open(path)

    def _open(self, path: Path) -> sqlite3.Connection:
        db = sqlite3.connect(path)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=OFF")
        db.executescript(_SCHEMA)
        for *row, checksum in db.execute("SELECT * FROM parts ORDER BY sample_id, start"):
            sample_id, start, tokens, logprobs, versions, dispatched, first = row
            if checksum != _checksum(*row):
                # what follows it begins where nothing ends, so it is left out, too
                log.warning("a part of the token journal of %s is damaged", sample_id)
                continue
            arrays = (np.frombuffer(tokens, np.int32), np.frombuffer(logprobs, np.float32))
            self._append(sample_id, start, *arrays, np.frombuffer(versions, np.int32), dispatched, first)
        return db

    @property
    def tokens(self) -> int:
        """Kept now."""
        return sum(entry.length for entry in self._entries.values())

    def add(self, start: int, part: PartialSample) -> bool:
        """What a request has produced from token `start` on.

        Returns:
            False: something before it is missing here, so it is of no use.
        """
        times = part.t_dispatched, part.t_first_token
        before = self._entries[part.sample_id].length if part.sample_id in self._entries else 0
        if start > before:
            return False
        known = slice(before - start, None)
        tokens, logprobs, versions = part.completion_tokens[known], part.logprobs[known], part.token_versions[known]
        if len(tokens):
            self._append(part.sample_id, before, tokens, logprobs, versions, *times)
            row = (part.sample_id, before, tokens.tobytes(), logprobs.tobytes(), versions.tobytes(), *times)
            self._new[part.sample_id].append(row)
        return True

    def _append(
        self,
        sample_id: str,
        start: int,
        tokens: IntArray,
        logprobs: FloatArray,
        versions: IntArray,
        t_dispatched: float,
        t_first_token: float,
    ) -> None:
        entry = self._entries.setdefault(sample_id, _Entry(t_dispatched, t_first_token))
        if entry.length == start:
            entry.add(tokens, logprobs, versions)

    def kept(self, sample_id: str) -> PartialSample | None:
        """All that is known of a request; None: nothing."""
        entry = self._entries.get(sample_id)
        if entry is None or not entry.length:
            return None
        return PartialSample(
            sample_id,
            np.concatenate(entry.tokens),
            np.concatenate(entry.logprobs),
            np.concatenate(entry.versions),
            entry.t_dispatched,
            entry.t_first_token,
        )

    def forget(self, sample_ids: Iterable[str]) -> None:
        """These have ended, or are wanted no more."""
        for sample_id in sample_ids:
            if self._entries.pop(sample_id, None) is not None:
                self._forgotten.add(sample_id)
                self._new.pop(sample_id, None)

    def forget_all(self) -> None:
        """Whatever was under way is wanted no more."""
        self.forget(list(self._entries))

    def flush(self) -> None:
        """Writes what is new to the file. A file that cannot be written costs what it would have saved, no more."""
        new = [(*row, _checksum(*row)) for rows in self._new.values() for row in rows]
        gone = [(sample_id,) for sample_id in self._forgotten]
        self._new.clear()
        self._forgotten.clear()
        if not new and not gone:
            return
        try:
            with self._db:
                self._db.executemany("DELETE FROM parts WHERE sample_id = ?", gone)
                self._db.executemany("INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?, ?, ?, ?, ?)", new)
        except sqlite3.Error as error:
            log.warning("the token journal cannot be written: %s", error)

    def close(self) -> None:
        """Writes what is new and closes the file."""
        self.flush()
        self._db.close()
