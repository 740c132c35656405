"""The ledger: a durable account (SQLite, WAL) of every sample from issue to training.

    issued -> finished -> scored -> trained          (a resumed run deletes everything after its checkpoint)
                                 -> dropped          (another group took its place, or its reward is void)

A void sample is scored with a NULL reward and its cause. When its step is made it becomes dropped, not trained: its
group may have been trained without it. So trained + dropped are all samples of a step, and `counts_void` are those of
them that nobody could score.

The ledger holds a finished sample's content from its acknowledgement to the instance until its step's Parquet file is
written. So an acknowledged sample is always on disk, whatever dies. A run that goes back to a checkpoint keeps what was
drawn from that checkpoint's weights or older ones, for when the same prompt is issued again (`kept`); therefore
content of that kind stays after its step, until the next checkpoint. A checksum shows whether the disk has damaged it.
Contents are rows of their own: SQLite gives the pages of a deleted row to others, but leaves most of the page unused
of one that has become small.
"""

from __future__ import annotations

import logging
import sqlite3
import zlib
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from streamrl.errors import ErrorCode, RunFailed
from streamrl.rollouts.types import Group, Sample, Scored
from streamrl.transport.wire import Message, decode, encode

log = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS samples (
    sample_id TEXT PRIMARY KEY,
    group_id  TEXT NOT NULL,
    step      INTEGER,
    state     TEXT NOT NULL CHECK (state IN ('issued', 'finished', 'scored', 'trained', 'dropped')),
    reward    REAL,
    error     TEXT,
    void_cause TEXT,
    prompt    BLOB,
    newest    INTEGER,
    checksum  INTEGER
);
CREATE TABLE IF NOT EXISTS contents (
    sample_id TEXT PRIMARY KEY,
    content   BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS kept (
    sample_id TEXT PRIMARY KEY,
    prompt    BLOB NOT NULL,
    newest    INTEGER NOT NULL,
    content   BLOB NOT NULL,
    checksum  INTEGER
);
CREATE INDEX IF NOT EXISTS samples_step ON samples (step, state);
CREATE TABLE IF NOT EXISTS steps (
    step           INTEGER PRIMARY KEY,
    weight_version INTEGER NOT NULL,
    samples        INTEGER NOT NULL,
    time           REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS newest_checkpoint (
    step INTEGER PRIMARY KEY
);
"""
_BEGINNING = """
INSERT INTO newest_checkpoint SELECT 0
WHERE NOT EXISTS (SELECT 1 FROM newest_checkpoint) AND NOT EXISTS (SELECT 1 FROM steps);
"""
"""Records that a new run has no checkpoint yet. A ledger that a resume makes anew, as the old one is lost, has no such
record."""

_ADDED = {
    "samples": {"void_cause": "TEXT", "prompt": "BLOB", "newest": "INTEGER", "checksum": "INTEGER"},
    "kept": {"checksum": "INTEGER"},
}
"""Columns that the tables of earlier versions lack, with their types."""
_MOVED = """
BEGIN IMMEDIATE;
INSERT INTO contents SELECT sample_id, content FROM samples WHERE content IS NOT NULL;
ALTER TABLE samples DROP COLUMN content;
COMMIT;
"""
"""Moves the contents of earlier versions, which had them among `samples`."""


class KnownSteps(NamedTuple):
    """What a ledger knows of its run's steps."""

    newest: int = 0
    """The newest one that was trained; 0: none."""
    checkpoint: int | None = None
    """That of the newest checkpoint; 0: there was none; None: it is not recorded, as by earlier versions."""
    samples: bool = False
    """Whether it has samples, as from the first step on."""

    def due(self, every: int) -> int:
        """Return the newest step with a regular checkpoint, which was completed before the step after it; 0: of none.

        Args:
            every: optimizer steps between regular checkpoints.
        """
        return max(self.newest - 1, 0) // every * every

    @property
    def begun(self) -> int:
        """The newest step that may have files: a step's rollouts are written first. 0: the ledger knows nothing."""
        nothing = self.checkpoint is None and not self.newest and not self.samples
        return 0 if nothing else self.newest + 1


class Ledger:
    """One run's ledger; used by the controller only. A failed write (full disk) ends the run with its cause."""

    def __init__(self, path: Path, resumed: bool = False) -> None:
        """
        Args:
            path: its file.
            resumed: whether it is that of a run that is continued, and should be there.

        Raises:
            RunFailed: it cannot be opened.
        """
        self.path = path
        try:
            self._open(_SCHEMA if resumed else _SCHEMA + _BEGINNING)
        except sqlite3.Error as error:
            raise _failed(f"cannot open the ledger {path}", error) from error
        self._checkpoint = 0
        """Step of the newest checkpoint, to which a resume would go back."""

    def _open(self, schema: str) -> None:
        self._db = sqlite3.connect(self.path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")  # an acknowledged sample survives a power cut
        self._db.executescript(schema)
        for table, columns in _ADDED.items():
            for name in columns.keys() - self._columns(table):
                self._db.execute(f"ALTER TABLE {table} ADD COLUMN {name} {columns[name]}")
        if "content" in self._columns("samples"):
            self._db.executescript(_MOVED)

    def _columns(self, table: str) -> set[str]:
        """Return the names of a table's columns."""
        return {row[1] for row in self._db.execute(f"PRAGMA table_info({table})")}

    def _write(self, statements: Iterable[tuple[str, Iterable[tuple[Any, ...]]]]) -> None:
        """Execute all statements in one transaction."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            for sql, rows in statements:
                self._db.executemany(sql, rows)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise _failed(f"cannot write the ledger {self.path}", error) from error

    def issue(self, samples: Iterable[tuple[str, str, bytes]]) -> None:
        """Record samples, as (sample id, group id, digest of the prompt), that will be generated."""
        sql = "INSERT INTO samples (sample_id, group_id, prompt, state) VALUES (?, ?, ?, 'issued')"
        self._write([(sql, list(samples))])

    def kept(self, sample_ids: Iterable[str], prompt: bytes) -> list[tuple[str, bytes]]:
        """Return what is kept of samples over a resume: (id, content) of each intact one, in the order of ids.

        Args:
            sample_ids: ids of samples of one prompt, which have just been issued.
            prompt: digest of the prompt; samples of another one, for instance of a data file that has changed, are left
                out.
        """
        sql = "SELECT content, checksum FROM kept WHERE sample_id = ? AND prompt = ?"
        found = []
        for sample_id in sorted(sample_ids):
            for content, checksum in self._db.execute(sql, (sample_id, prompt)):
                if checksum == _checksum(sample_id, content):
                    found.append((sample_id, content))
                else:
                    log.warning("the kept sample %s is damaged in the ledger and is generated again", sample_id)
        return found

    def count_kept(self) -> int:
        """Return the number of samples that are kept over a resume and not issued again so far."""
        return int(self._db.execute("SELECT COUNT(*) FROM kept").fetchone()[0])

    def finish(self, samples: Sequence[tuple[Sample, bytes]]) -> set[str]:
        """Commit finished samples with their content; return the ids that were new.

        A sample that was not issued, or has already finished, changes nothing and is not returned.
        """
        new = set()
        for sample, _ in samples:
            state = self._db.execute("SELECT state FROM samples WHERE sample_id = ?", (sample.sample_id,)).fetchone()
            if state == ("issued",):
                new.add(sample.sample_id)
        ended = {
            sample.sample_id: (sample, content) for sample, content in reversed(samples) if sample.sample_id in new
        }
        if ended:
            sql = "UPDATE samples SET state = 'finished', checksum = ?, newest = ? WHERE sample_id = ?"
            rows = [(_checksum(name, content), _newest(sample), name) for name, (sample, content) in ended.items()]
            self._write(
                [
                    (sql, rows),
                    ("INSERT INTO contents VALUES (?, ?)", [(name, content) for name, (_, content) in ended.items()]),
                    ("DELETE FROM kept WHERE sample_id = ?", [(name,) for name in ended]),
                ]
            )
        return new

    def has(self, sample_id: str) -> bool:
        """Return whether a sample was issued."""
        return self._db.execute("SELECT 1 FROM samples WHERE sample_id = ?", (sample_id,)).fetchone() is not None

    def score(self, scored: list[Scored]) -> None:
        """Commit rewards, also void ones."""
        rows = [
            (one.reward, one.void and one.void.text, one.void and one.void.cause.value, one.sample.sample_id)
            for one in scored
        ]
        sql = (
            "UPDATE samples SET state = 'scored', reward = ?, error = ?, void_cause = ? "
            "WHERE sample_id = ? AND state = 'finished'"
        )
        self._write([(sql, rows)])

    def train(
        self, step: int, weight_version: int, groups: list[Group], time: float, dropped: Sequence[Group] = ()
    ) -> None:
        """Commit that all samples of a step are trained, or dropped; their Parquet file must already be written.

        Void samples of a trained group are dropped.

        Raises:
            RunFailed: a sample was not scored, or was trained before, so the account does not balance.
        """
        trained = [(step, member.sample.sample_id) for group in groups for member in group.survivors()]
        left_out = [(step, member.sample.sample_id) for group in dropped for member in group.members()]
        left_out += [(step, member.sample.sample_id) for group in groups for member in group.members() if member.void]
        ready = sum(
            self._db.execute("SELECT state FROM samples WHERE sample_id = ?", (sample_id,)).fetchone() == ("scored",)
            for sample_id in {sample_id for _, sample_id in (*trained, *left_out)}
        )
        if ready != len(trained) + len(left_out):
            raise RunFailed(
                f"ledger: step {step} trained {len(trained)} samples and dropped {len(left_out)}, "
                f"of which {ready} are scored and untrained"
            )
        forget = (
            "DELETE FROM contents WHERE sample_id = ? AND NOT EXISTS "
            f"(SELECT 1 FROM samples WHERE sample_id = contents.sample_id AND newest <= {self._checkpoint})"
        )
        self._write(
            [
                ("UPDATE samples SET state = 'trained', step = ? WHERE sample_id = ?", trained),
                ("UPDATE samples SET state = 'dropped', step = ? WHERE sample_id = ?", left_out),
                (forget, [(sample_id,) for _, sample_id in (*trained, *left_out)]),
                ("INSERT INTO steps VALUES (?, ?, ?, ?)", [(step, weight_version, len(trained), time)]),
            ]
        )

    def checkpointed(self, step: int) -> None:
        """Record that a resume would go back to a checkpoint of `step`: contents up to it, and kept ones, may go."""
        sql = "DELETE FROM contents WHERE sample_id IN (SELECT sample_id FROM samples WHERE step > ? AND step <= ?)"
        self._write([(sql, [(self._checkpoint, step)]), ("DELETE FROM kept", [()]), *_newest_checkpoint(step)])
        self._checkpoint = step

    def known(self) -> KnownSteps:
        """Return what it knows of the run's steps."""
        return _known(self._db)

    def found_checkpoint(self, step: int) -> None:
        """Record the newest checkpoint that there is, before a resume goes back to it."""
        self._write(_newest_checkpoint(step))

    def forget_contents(self) -> None:
        """Forget what all samples contain, so that a resume generates those again that are not trained then."""
        self._write([("DELETE FROM contents", [()]), ("DELETE FROM kept", [()])])

    def rewind(self, first_step: int) -> int:
        """Forget everything from `first_step` on, and all samples without a step, which a resumed run issues again.

        What the weights of the checkpoint before `first_step`, or older ones, have finished is kept for that (`kept`),
        except by earlier versions, which wrote no checksum, and other digests of prompts.

        Returns:
            Number of trained samples that were undone.
        """
        self._checkpoint = first_step - 1
        undone = self._db.execute(
            "SELECT COUNT(*) FROM samples WHERE step >= ? AND state = 'trained'", (first_step,)
        ).fetchone()
        keep = (
            "INSERT OR REPLACE INTO kept (sample_id, prompt, newest, content, checksum) "
            "SELECT sample_id, prompt, newest, content, checksum FROM samples JOIN contents USING (sample_id) "
            "WHERE (step IS NULL OR step >= ?) AND newest < ? AND prompt IS NOT NULL AND checksum IS NOT NULL"
        )
        self._write(
            [
                ("DELETE FROM kept WHERE newest >= ? OR checksum IS NULL", [(first_step,)]),
                (keep, [(first_step, first_step)]),
                ("DELETE FROM samples WHERE step IS NULL OR step >= ?", [(first_step,)]),
                ("DELETE FROM contents", [()]),
                ("DELETE FROM steps WHERE step >= ?", [(first_step,)]),
                *_newest_checkpoint(first_step - 1),
            ]
        )
        return int(undone[0])

    def counts(self) -> dict[str, int]:
        """Return the number of samples by state."""
        return dict(self._db.execute("SELECT state, COUNT(*) FROM samples GROUP BY state").fetchall())

    def counts_void(self) -> dict[str, int]:
        """Return the number of void samples by cause."""
        sql = "SELECT void_cause, COUNT(*) FROM samples WHERE void_cause IS NOT NULL GROUP BY void_cause"
        return dict(self._db.execute(sql).fetchall())

    def steps(self) -> int:
        """Return the number of steps that were trained."""
        return int(self._db.execute("SELECT COUNT(*) FROM steps").fetchone()[0])

    def trained_ids(self) -> list[str]:
        """Return the ids of all trained samples, sorted."""
        return [row[0] for row in self._db.execute("SELECT sample_id FROM samples WHERE state = 'trained' ORDER BY 1")]

    def close(self) -> None:
        """Checkpoint the WAL and close."""
        self._db.close()


def known_steps(path: Path) -> KnownSteps:
    """Return what a ledger knows that is only read, whatever version has written it; nothing, if it is not there.

    Raises:
        sqlite3.Error: it cannot be read or is none.
        OSError: nobody may look for it.
    """
    if not path.exists():
        return KnownSteps()
    # without a log all is in the file, and a reader that may look for changes would leave an empty log and its index
    how = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "mode=ro&immutable=1"
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True)) as db:
        return _known(db)


def _known(db: sqlite3.Connection) -> KnownSteps:
    """Return what a ledger knows; it lacks tables if it is of an earlier version, or all of it was in a lost log."""
    there = {row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    newest, checkpoint = (
        db.execute(f"SELECT MAX(step) FROM {table}").fetchone()[0] if table in there else None
        for table in ("steps", "newest_checkpoint")
    )
    samples = "samples" in there and db.execute("SELECT EXISTS (SELECT 1 FROM samples)").fetchone()[0]
    return KnownSteps(int(newest or 0), None if checkpoint is None else int(checkpoint), bool(samples))


def _failed(what: str, error: sqlite3.Error) -> RunFailed:
    """Return the error of a run whose ledger cannot be opened or written."""
    text = f"{what}: {error}"
    if isinstance(error, sqlite3.IntegrityError):
        why = "it has other rows than the run expects: are all files of its folder of one moment?"
        return RunFailed(ErrorCode.RESUME.refer(f"{text}; {why}"))
    of_disk = getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
    return RunFailed(ErrorCode.DISK.refer(text) if of_disk else text)


def _newest_checkpoint(step: int) -> list[tuple[str, list[tuple[Any, ...]]]]:
    """Return the statements that record the newest checkpoint; step 0 is none."""
    return [("DELETE FROM newest_checkpoint", [()]), ("INSERT INTO newest_checkpoint VALUES (?)", [(step,)])]


def _newest(sample: Sample) -> int | None:
    """Return the newest weight version that a sample's tokens were drawn from; None: it has no token."""
    return int(sample.sampled_versions.max()) if len(sample.sampled_versions) else None


def _checksum(sample_id: str, content: bytes) -> int:
    """Return the checksum of a sample's content, so that bytes damaged on disk are never trained on."""
    return zlib.crc32(content, zlib.crc32(sample_id.encode()))


def pack_content(body: dict[str, Any], arrays: Any) -> bytes:
    """Return a sample as bytes, in the wire format."""
    frames = encode(Message("sample", "", 0, body, dict(arrays)))
    return bytes(msgpack.packb([bytes(frame) for frame in frames]))


def unpack_content(content: bytes) -> tuple[dict[str, Any], Any]:
    """Return (body, arrays) from the bytes of `pack_content`."""
    message = decode(msgpack.unpackb(content))
    return message.body, message.arrays
