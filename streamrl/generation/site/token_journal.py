"""The token journal of a site's service: what running requests have produced, in case their instance dies.

Another instance then continues from these tokens. Instances report new tokens about four times a second. The journal is
kept in memory and in a SQLite file, which outlives the service (but not a power cut: it is not forced to disk, since
all it saves is time). Both are bounded by what is in flight: memory by the tokens of running requests, the file by
these and those of samples that the controller has not yet committed. Should the service die before it has, finished
samples are lost with it, and the next service continues from their tokens.

Tokens are continued only under the prompt and the settings that they were drawn with: a controller that went back to
its checkpoint may issue another prompt under the same id.
"""

from __future__ import annotations

import hashlib
import logging
import sqlite3
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from streamrl.generation.site.journal_file import open_journal
from streamrl.rollouts.types import ByteArray, PartialSample, SampleRequest, rows_from

log = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS token_parts (
    sample_id    TEXT NOT NULL,
    start        INTEGER NOT NULL,
    tokens       BLOB NOT NULL,
    logprobs     BLOB NOT NULL,
    versions     BLOB NOT NULL,
    t_dispatched REAL NOT NULL,
    t_first      REAL NOT NULL,
    experts      BLOB,
    row_bytes    INTEGER,
    drawn_from   BLOB NOT NULL,
    t_queued     REAL NOT NULL,
    checksum     INTEGER NOT NULL,
    PRIMARY KEY (sample_id, start)
) WITHOUT ROWID;
"""
_COLUMNS = (
    "sample_id, start, tokens, logprobs, versions, t_dispatched, t_first, experts, row_bytes, drawn_from, t_queued"
)
_Row = tuple[str, int, bytes, bytes, bytes, float, float, bytes | None, int | None, bytes, float]


def drawn_from(request: SampleRequest, settings: str) -> bytes:
    """Return a digest of what a request's tokens are drawn from besides the weights: prompt, temperature, settings."""
    said = f"{request.temperature} {settings}".encode()
    return hashlib.blake2b(np.asarray(request.prompt_tokens, np.int32).tobytes() + said, digest_size=16).digest()


class _Origin(NamedTuple):
    """What `TokenJournal.begin` was told of a request when its first tokens began."""

    drawn_from: bytes = b""
    t_queued: float = 0.0


def _row(start: int, part: PartialSample, origin: _Origin) -> _Row:
    blobs = part.completion_tokens.tobytes(), part.logprobs.tobytes(), part.token_versions.tobytes()
    experts = (None, None) if part.experts is None else (part.experts.tobytes(), part.experts.shape[1])
    return part.sample_id, start, *blobs, part.t_dispatched, part.t_first_token, *experts, *origin


def _joined_experts(parts: list[PartialSample]) -> ByteArray | None:
    """Return the experts of consecutive parts; None: some part has none."""
    rows = [part.experts for part in parts if part.experts is not None]
    return np.concatenate(rows) if len(rows) == len(parts) and len({one.shape[1] for one in rows}) == 1 else None


def _joined(parts: list[PartialSample]) -> PartialSample:
    """Return consecutive parts of a request as one."""
    return replace(
        parts[0],
        completion_tokens=np.concatenate([part.completion_tokens for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        token_versions=np.concatenate([part.token_versions for part in parts]),
        experts=_joined_experts(parts),
    )


def _checksum(*row: object) -> int:
    """Return the checksum of a row, so that bytes damaged on disk never become tokens of an answer."""
    sample_id, start, tokens, logprobs, versions, dispatched, first, experts, row_bytes, source, queued = row
    blobs: list[Any] = [tokens, logprobs, versions, experts or b"", source]
    lengths = [len(blob) for blob in blobs]
    found = zlib.crc32(f"{sample_id} {start} {dispatched!r} {first!r} {queued!r} {lengths} {row_bytes}".encode())
    for blob in blobs:
        found = zlib.crc32(blob, found)
    return found


class TokenJournal:
    """The tokens of all running requests, in memory and in a SQLite file."""

    def __init__(self, path: Path) -> None:
        """Open the file and load what an earlier service left in it. A damaged file is replaced by an empty one."""
        self._parts: defaultdict[str, list[PartialSample]] = defaultdict(list)
        """The tokens of each request, in few parts, each longer than those after it."""
        self._lengths: Counter[str] = Counter()
        self._origins: dict[str, _Origin] = {}
        self._forgotten: set[str] = set()
        """Requests that were forgotten but are still in the file."""
        self._ended: set[str] = set()
        """Requests whose samples are not yet committed: they are in the file alone."""
        self._new: defaultdict[str, list[tuple[int, PartialSample]]] = defaultdict(list)
        """Parts that are not yet in the file, and where they start, by request."""
        self._cut: dict[str, int] = {}
        """Token from which on the file still has unusable parts, by request. Left there, they would follow tokens of
        another draw once there are as many as before."""
        self._problem = ""
        """Why the file could not be written at the last try; '': it was."""
        self._db = open_journal(path, _SCHEMA, self._load)

    def _load(self, db: sqlite3.Connection) -> None:
        for loaded in (self._parts, self._lengths, self._cut, self._origins):
            loaded.clear()
        for *row, checksum in db.execute(f"SELECT {_COLUMNS}, checksum FROM token_parts ORDER BY sample_id, start"):
            sample_id, start, tokens, logprobs, versions, dispatched, first, experts, row_bytes, source, queued = row
            if sample_id in self._cut:
                continue
            if checksum != _checksum(*row) or start != self._lengths[sample_id]:
                log.warning("dropping the tokens of %s from a damaged part of the token journal on", sample_id)
                self._cut[sample_id] = self._lengths[sample_id]
                continue
            self._origins[sample_id] = _Origin(source, queued)
            arrays = np.frombuffer(tokens, np.int32), np.frombuffer(logprobs, np.float32)
            drawn_by, rows = np.frombuffer(versions, np.int32), rows_from(experts, row_bytes)
            self._append(PartialSample(sample_id, *arrays, drawn_by, dispatched, first, rows))

    def begin(
        self, sample_id: str, source: bytes, t_queued: float, oldest: int = 0
    ) -> tuple[PartialSample, float] | None:
        """Return the tokens from which a request goes on that is given now; None: it begins anew.

        Args:
            sample_id: the request.
            source: what it is drawn from (`drawn_from`); tokens that were drawn from something else are forgotten.
            t_queued: unix seconds at which the controller issued it.
            oldest: oldest weight version of a token; if one is older, all are forgotten.

        Returns:
            (the tokens, `t_queued` of the request with which they began).
        """
        had, origin = self.kept(sample_id), self._origins.get(sample_id, _Origin())
        stale = had is not None and had.token_versions.min(initial=oldest) < oldest
        if stale or sample_id in self._ended or origin.drawn_from != source:
            self.forget([sample_id])  # if it has ended, its sample was refused, and it is given again
            had = None
        if had is None:
            self._origins[sample_id] = _Origin(source, t_queued)
            return None
        return had, origin.t_queued

    def add(self, start: int, part: PartialSample) -> bool:
        """Add what a request has produced from token `start` on.

        Returns:
            Whether the part is usable; False: earlier tokens are missing here, or `start` is below 0.
        """
        before = self._lengths[part.sample_id]
        if not 0 <= start <= before:
            return False
        known = slice(before - start, None)
        tokens, logprobs, versions = part.completion_tokens[known], part.logprobs[known], part.token_versions[known]
        if len(tokens):
            # copied: each array is a part of a message about all requests, which it would keep in memory
            tokens, logprobs, versions = tokens.copy(), logprobs.copy(), versions.copy()
            # the rows of the new tokens are the last ones; a request's first part has those of its prompt, too
            experts = part.experts if before == 0 or part.experts is None else part.experts[-len(tokens) :]
            experts = None if experts is None else experts.copy()
            new = replace(part, completion_tokens=tokens, logprobs=logprobs, token_versions=versions, experts=experts)
            self._append(new)
            self._new[part.sample_id].append((before, new))
        return True

    def _append(self, part: PartialSample) -> None:
        parts = self._parts[part.sample_id]
        parts.append(part)
        while len(parts) > 1 and len(parts[-2].completion_tokens) <= len(parts[-1].completion_tokens):
            parts[-2:] = [_joined(parts[-2:])]
        self._lengths[part.sample_id] += len(part.completion_tokens)

    def kept(self, sample_id: str) -> PartialSample | None:
        """Return everything that is known of a request; None: nothing is."""
        if (parts := self._parts.get(sample_id)) is None:
            return None
        return _joined(parts)

    def ended(self, sample_id: str) -> None:
        """Keep the tokens of a request that has ended in the file alone, until `committed`."""
        if self._parts.pop(sample_id, None) is not None:
            del self._lengths[sample_id]
            self._ended.add(sample_id)
        else:
            self._origins.pop(sample_id, None)

    def committed(self, sample_id: str) -> None:
        """Forget a request that has ended, unless it was given again."""
        if sample_id in self._ended:
            self.forget([sample_id])

    def forget(self, sample_ids: Iterable[str]) -> None:
        """Forget requests that are no longer wanted."""
        for sample_id in sample_ids:
            self._origins.pop(sample_id, None)
            if sample_id in self._ended or self._parts.pop(sample_id, None) is not None:
                self._ended.discard(sample_id)
                self._lengths.pop(sample_id, None)
                self._forgotten.add(sample_id)
                self._new.pop(sample_id, None)

    def forget_newer(self, version: int) -> None:
        """Forget requests with tokens of weights newer than a version."""
        self.forget(
            [name for name, parts in self._parts.items() if any(int(p.token_versions.max()) > version for p in parts)]
        )

    def flush(self) -> None:
        """Write what is new to the file. A failure is only logged, once, and the next call writes the same again."""
        origins = self._origins
        rows = [
            _row(start, part, origins.get(one, _Origin())) for one, parts in self._new.items() for start, part in parts
        ]
        new = [(*row, _checksum(*row)) for row in rows]
        gone = [(sample_id,) for sample_id in self._forgotten]
        if not new and not gone and not self._cut:
            return
        try:
            with self._db:
                self._db.executemany("DELETE FROM token_parts WHERE sample_id = ?", gone)
                cut = self._cut.items()
                self._db.executemany("DELETE FROM token_parts WHERE sample_id = ? AND start >= ?", cut)
                self._db.executemany(f"INSERT OR REPLACE INTO token_parts VALUES ({', '.join('?' * 12)})", new)
        except sqlite3.Error as error:
            if self._problem != (problem := str(error)):
                log.warning("the token journal cannot be written: %s", problem)
            self._problem = problem
            return
        self._problem = ""
        for written in (self._new, self._forgotten, self._cut):
            written.clear()

    def close(self) -> None:
        """Write what is new and close the file."""
        self.flush()
        self._db.close()
