"""`trackers/NAME.jsonl`: what a tracker has been sent. It only grows, and is written after each delivery.

So a process that follows the run for a tracker can be killed at any time: the next one goes on behind the last line. A
row is known by its step and by the time at which that step ended, as a step that is trained again after a restart has
the same number.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any, Literal, Self

from streamrl.errors import UserError
from streamrl.run_dir import layout

Kind = Literal["step", "evaluation", "samples"]


class SentRows:
    """The record of one tracker; the process that has it open is the only one that sends."""

    def __init__(self, folder: Path, tracker: str) -> None:
        """Open the record of a tracker in a run's folder.

        Raises:
            UserError: another process sends to this tracker, or the file cannot be written.
        """
        self.path = folder / layout.TRACKERS / f"{tracker}.jsonl"
        self.id = ""
        self._sent: dict[tuple[Kind, int], float] = {}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab+", buffering=0)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UserError(
                f"{folder} is being sent to {tracker} by another process, such as the run's own; wait until it has "
                "ended"
            ) from None
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror or error}") from error
        self._load()

    def _load(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1  # a killed process may have left a cut last line
        os.truncate(self.path, whole)
        for line in content[:whole].splitlines():
            try:
                self._apply(json.loads(line))
            except (ValueError, KeyError, TypeError):
                continue

    def _apply(self, entry: dict[str, Any]) -> None:
        if "id" in entry:
            self.id = entry["id"]
        elif "rewound" in entry:
            self._sent = {key: time for key, time in self._sent.items() if key[1] <= entry["rewound"]}
        else:
            self._sent[entry["kind"], int(entry["step"])] = float(entry["time"])

    def _append(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._apply(entry)

    @property
    def last_step(self) -> int:
        """Newest step that was sent; 0: none was."""
        return max((step for kind, step in self._sent if kind == "step"), default=0)

    def time_of(self, kind: Kind, step: int) -> float | None:
        """Return the time of the row that was sent for a step; None: none was."""
        return self._sent.get((kind, step))

    def name(self, id: str) -> None:
        """Keep how the tracker calls the run."""
        if id != self.id:
            self._append({"id": id})

    def mark(self, kind: Kind, step: int, time: float) -> None:
        """Keep that a row was sent."""
        self._append({"kind": kind, "step": step, "time": time})

    def rewind(self, step: int) -> None:
        """Keep that the tracker has nothing after a step any more."""
        self._append({"rewound": step})

    def close(self) -> None:
        """Let another process send."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
