"""Keep what a tracker has been sent, in `trackers/NAME.jsonl`.

It names the run's folder, too: a copy of that becomes a run of its own in the tracker, while the original is there.
So a process that follows the run for a tracker can be killed at any time: the next one goes on behind the last line.
What the disk has no room for is known to this process, so that it sends nothing twice, and written once there is room.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from pathlib import Path
from typing import Any, Self

from streamrl.errors import RunFailed, UserError
from streamrl.plain_files import append_plain
from streamrl.run_dir import layout
from streamrl.run_dir.jsonl import append_whole
from streamrl.run_dir.sent_record import Kind, SentRecord

log = logging.getLogger(__name__)

OWN = "tensorboard"
"""What the record calls a run with event files in its own folder, and earlier versions called every run with such."""

LONGEST_LINE = 1 << 20
"""Most bytes of a line that are held: the record's own have a hundred."""


class RecordInUseError(UserError):
    """Another process sends to this tracker."""


class SentRows(SentRecord):
    """The record of one tracker; the process that has it open is the only one that sends."""

    def __init__(self, folder: Path, tracker: str) -> None:
        """Open the record of a tracker in a run's folder.

        Raises:
            RecordInUseError: another process sends to this tracker.
            UserError: the file cannot be written.
        """
        super().__init__()
        self._owed = b""
        """Lines that the file lacks."""
        self.path = folder / layout.TRACKERS / f"{tracker}.jsonl"
        try:
            self._file = append_plain(self.path, below=folder)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise RecordInUseError(
                f"{folder} is being sent to {tracker} by another process, such as the run's own; wait until it has "
                "ended"
            ) from None
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror or error}") from error
        self._load()
        self._now = str(folder.resolve()), folder.stat().st_ino
        self.copied_from = self._original()
        """The folder that this one is a copy of, whose run goes on under its name; '': it is none."""
        if self.copied_from:
            self._append({"copied": self.copied_from})
        else:
            self._note_folder()

    def _original(self) -> str:
        """Return the folder in which something was sent last, if it is there beside this one; '': it is this one."""
        if not self.folder or self.folder == self._now[0] or self.inode == self._now[1]:
            return ""
        try:
            return self.folder if os.stat(self.folder).st_ino == self.inode else ""
        except (OSError, ValueError):
            return ""

    def _note_folder(self) -> None:
        """Keep where the folder is, if its tracker has the run somewhere else."""
        if self.id not in ("", OWN) and (self.folder, self.inode) != self._now:
            self._append({"folder": self._now[0], "inode": self._now[1]})

    def _load(self) -> None:
        whole = 0
        with os.fdopen(os.dup(self._file.fileno()), "rb") as lines:
            lines.seek(0)
            while line := lines.readline(LONGEST_LINE):
                if line.endswith(b"\n"):
                    self.take(line)
                    whole = lines.tell()
        os.ftruncate(self._file.fileno(), whole)  # a killed process may have left a cut last line

    def _append(self, entry: dict[str, Any]) -> None:
        self.apply(entry)  # what was sent was sent, whether or not there is room to write it
        was_whole = not self._owed
        self._owed += json.dumps(entry).encode() + b"\n"
        if (problem := self._write_owed()) and was_whole:
            log.warning("%s", problem)

    def _write_owed(self) -> str:
        """Write what the file lacks; return why that failed, '': it did not."""
        try:
            append_whole(self._file, self._owed)
        except RunFailed as error:
            return f"cannot write {self.path}: {error.__cause__}"
        self._owed = b""
        return ""

    def name(self, id: str) -> None:
        """Keep how the tracker calls the run."""
        if id != self.id:
            self._append({"id": id})
            self._note_folder()

    def mark(self, kind: Kind, step: int, time: float) -> None:
        """Keep that a row was sent."""
        self._append({"kind": kind, "step": step, "time": time})

    def rewind(self, step: int) -> None:
        """Keep that the tracker has nothing after a step any more."""
        self._append({"rewound": step})

    def close(self) -> None:
        """Let another process send."""
        if self._owed and (problem := self._write_owed()):
            log.warning("rows will be sent again: %s", problem)
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
