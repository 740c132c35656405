"""The token journal of a site's service: what running requests have produced, in case their instance dies.

Another instance then continues from these tokens. Instances report new tokens about four times a second. The journal is
kept in memory and in a SQLite file, which outlives the service (but not a power cut: it is not forced to disk, since
all it saves is time). Memory and file are bounded by the tokens of requests in flight: finished and released requests
are forgotten.
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
    """Return the checksum of a row, so that bytes damaged on disk never become tokens of an answer."""
    sample_id, start, *blobs, dispatched, first = row
    found = zlib.crc32(f"{sample_id} {start} {dispatched!r} {first!r} {[len(b) for b in blobs]}".encode())  # type: ignore[arg-type]
    for blob in blobs:
        found = zlib.crc32(blob, found)  # type: ignore[arg-type]
    return found


@dataclass
class _Entry:
    """The tokens of one request, in the parts that were reported."""

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
    """The tokens of all running requests, in memory and in a SQLite file."""

    def __init__(self, path: Path) -> None:
        """Open the file and load what an earlier service left in it. An unreadable file is replaced by an empty one."""
        self._entries: dict[str, _Entry] = {}
        self._forgotten: set[str] = set()
        """Requests that were forgotten but are still in the file."""
        self._new: defaultdict[str, list[_Row]] = defaultdict(list)
        """Rows that are not yet in the file, by request."""
        try:
            self._db = self._open(path)
        except (sqlite3.DatabaseError, TypeError, ValueError) as error:
            log.warning("replacing the unreadable token journal %s with an empty one: %s", path, error)
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
                # later parts no longer connect to the ones before, so they are left out, too
                log.warning("dropping the tokens of %s from a damaged part of the token journal on", sample_id)
                continue
            arrays = (np.frombuffer(tokens, np.int32), np.frombuffer(logprobs, np.float32))
            self._append(sample_id, start, *arrays, np.frombuffer(versions, np.int32), dispatched, first)
        return db

    @property
    def tokens(self) -> int:
        """Tokens in the journal now."""
        return sum(entry.length for entry in self._entries.values())

    def add(self, start: int, part: PartialSample) -> bool:
        """Add what a request has produced from token `start` on.

        Returns:
            Whether the part is usable; False: earlier tokens are missing here.
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
        """Return everything that is known of a request; None: nothing is."""
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
        """Forget requests that have ended or are no longer wanted."""
        for sample_id in sample_ids:
            if self._entries.pop(sample_id, None) is not None:
                self._forgotten.add(sample_id)
                self._new.pop(sample_id, None)

    def forget_all(self) -> None:
        """Forget all requests."""
        self.forget(list(self._entries))

    def flush(self) -> None:
        """Write what is new to the file. A failure is only logged: without the journal, tokens are generated again."""
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
        """Write what is new and close the file."""
        self.flush()
        self._db.close()
