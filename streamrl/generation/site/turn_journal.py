"""The turn journal of a site's service: finished turns of open episodes, so that an episode can be resumed.

Code of an agent cannot be resumed in its middle. It is run again from its start instead, and each of its calls gets the
turn that it got before, as long as it is the same call: the same number in its episode (and with it the same seed)
and the same prompt, token for token. From the first call that differs, turns are generated.

The journal is kept in memory and in a SQLite file, which outlives the service (but not a power cut: it is not forced to
disk, since all it saves is time). It is bounded by what is open: an episode's turns are forgotten once the controller
has committed it.
"""

from __future__ import annotations

import hashlib
import logging
import sqlite3
import zlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from streamrl.generation.site.journal_file import open_journal
from streamrl.protocol.message import body_of
from streamrl.protocol.site_instance import FinishedSample
from streamrl.rollouts.types import IntArray
from streamrl.transport.wire import Arrays

log = logging.getLogger(__name__)

TurnKey = tuple[int, bytes]
"""What makes a call the same one when an episode is run again: its seed, and a digest of its prompt."""
ARRAYS = {"completion_tokens": "int32", "logprobs": "float32", "token_versions": "int32"}
_SCHEMA = """
CREATE TABLE IF NOT EXISTS turns (
    episode  TEXT NOT NULL,
    turn     TEXT NOT NULL,
    key      BLOB NOT NULL,
    kept     BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (episode, turn)
) WITHOUT ROWID;
"""


def turn_key(seed: int, prompt: IntArray) -> TurnKey:
    """Return the key of a call with a prompt of shape [P]."""
    return seed, hashlib.sha256(np.ascontiguousarray(prompt, np.int32).tobytes()).digest()


@dataclass(frozen=True)
class KeptTurn:
    """A finished turn."""

    sample: FinishedSample
    """The sample as its instance reported it; its `sample_id` is the turn's id."""
    arrays: Arrays
    """The arrays of a `FinishedSample`."""

    @property
    def newest(self) -> int:
        """The newest weight version that one of its tokens was sampled under; -1: it has no token."""
        return int(self.arrays["token_versions"].max(initial=-1))

    def to_bytes(self) -> bytes:
        """Return it as bytes."""
        arrays = [np.asarray(self.arrays[name], kind).tobytes() for name, kind in ARRAYS.items()]
        return msgspec.msgpack.encode([body_of(self.sample), *arrays])

    @classmethod
    def from_bytes(cls, kept: bytes) -> Self:
        """Return what `to_bytes` was given."""
        body, *arrays = msgspec.msgpack.decode(kept)
        each = zip(ARRAYS.items(), arrays, strict=True)
        return cls(FinishedSample(**body), {name: np.frombuffer(array, kind) for (name, kind), array in each})


class TurnJournal:
    """Finished turns of open episodes, in memory and, if there is a path, in a SQLite file."""

    def __init__(self, path: Path | None = None) -> None:
        """Open the file and load what an earlier service left in it. A damaged file is replaced by an empty one."""
        self._turns: defaultdict[str, dict[TurnKey, KeptTurn]] = defaultdict(dict)
        """Finished turns, by episode."""
        self._new: dict[tuple[str, str], tuple[TurnKey, KeptTurn]] = {}
        """Those that are not yet in the file, by episode and turn."""
        self._forgotten: set[str] = set()
        """Episodes that were forgotten, but may still be in the file."""
        self._dropped: set[tuple[str, str]] = set()
        """Single turns of which the same is true, by episode and turn."""
        self._problem = ""
        """Why the file could not be written at the last try; '': it was."""
        self._db = None if path is None else open_journal(path, _SCHEMA, self._load)

    def _load(self, db: sqlite3.Connection) -> None:
        self._turns.clear()
        for episode, turn, key, kept, checksum in db.execute("SELECT * FROM turns"):
            if checksum != _checksum(episode, turn, key, kept):
                log.warning("dropping turn %s, which is damaged in the turn journal", turn)
                continue
            self._turns[episode][tuple(msgspec.msgpack.decode(key))] = KeptTurn.from_bytes(kept)

    def add(self, episode: str, key: TurnKey, turn: KeptTurn) -> None:
        """Keep a finished turn of an episode."""
        self._turns[episode][key] = turn
        self._new[episode, turn.sample.sample_id] = key, turn

    def find(self, episode: str, key: TurnKey, version: int | None) -> KeptTurn | None:
        """Return the turn that a call got before; None: it is another call.

        Args:
            episode: sample id of the episode.
            key: key of the call.
            version: weight version of the run now, if it has one. Turns of newer ones are left out: the run has gone
                back to a checkpoint since.
        """
        turn = self._turns[episode].get(key) if episode in self._turns else None
        return None if turn is None or turn.newest > (version or 0) else turn

    def forget(self, episode: str) -> None:
        """Forget the turns of an episode that is committed."""
        if self._turns.pop(episode, None) is not None:
            self._forgotten.add(episode)

    def forget_newer(self, version: int) -> None:
        """Forget turns with tokens of weights newer than a version."""
        for episode, turns in self._turns.items():
            for key, turn in [(key, turn) for key, turn in turns.items() if turn.newest > version]:
                del turns[key]
                self._new.pop((episode, turn.sample.sample_id), None)
                self._dropped.add((episode, turn.sample.sample_id))

    def flush(self) -> None:
        """Write what is new to the file. A failure is only logged, once, and the next call writes the same again."""
        new = [
            (episode, turn, msgspec.msgpack.encode(key), kept.to_bytes())
            for (episode, turn), (key, kept) in self._new.items()
            if episode in self._turns
        ]
        gone, dropped = [(episode,) for episode in self._forgotten], list(self._dropped)
        try:
            if self._db is not None and (new or gone or dropped):
                with self._db:
                    self._db.executemany("DELETE FROM turns WHERE episode = ?", gone)
                    self._db.executemany("DELETE FROM turns WHERE episode = ? AND turn = ?", dropped)
                    rows = [(*row, _checksum(*row)) for row in new]
                    self._db.executemany("INSERT OR REPLACE INTO turns VALUES (?, ?, ?, ?, ?)", rows)
        except sqlite3.Error as error:
            if self._problem != (problem := str(error)):
                log.warning("the turn journal cannot be written: %s", problem)
            self._problem = problem
            self._new = {key: one for key, one in self._new.items() if key[0] in self._turns}
            return
        self._problem = ""
        for written in (self._new, self._forgotten, self._dropped):
            written.clear()

    def close(self) -> None:
        """Write what is new and close the file."""
        self.flush()
        if self._db is not None:
            self._db.close()


def _checksum(episode: Any, turn: Any, key: Any, kept: Any) -> int:
    """Return the checksum of a row, so that bytes damaged on disk never become tokens of an answer."""
    found = zlib.crc32(f"{episode} {turn} {len(key)} ".encode())
    return zlib.crc32(kept, zlib.crc32(key, found))
