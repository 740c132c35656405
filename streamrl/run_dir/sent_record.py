"""`trackers/NAME.jsonl`: what a tracker has been sent. It only grows, and is written after each delivery.

A row is known by its step and by the time at which that step ended, as a step that is trained again after a restart has
the same number.
"""

from __future__ import annotations

import json
from typing import Any, Literal

Kind = Literal["step", "evaluation", "samples"]


class SentRecord:
    """What the lines of such a file say, taken in their order."""

    def __init__(self) -> None:
        self.id = ""
        """How the tracker calls the run."""
        self.folder, self.inode = "", 0
        """The run's folder when something was sent last, an absolute path, and its inode; '' and 0: not known."""
        self._sent: dict[tuple[Kind, int], float] = {}

    def take(self, line: bytes) -> None:
        """Take a line; one that cannot be read changes nothing."""
        try:
            self.apply(json.loads(line))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return

    def apply(self, entry: dict[str, Any]) -> None:
        """Take an entry: the run's name or folder, a row that was sent, the step after which the tracker has nothing,
        or that the folder is a copy, whose run begins anew.

        Raises:
            ValueError, KeyError, TypeError: it is none of them.
        """
        if "id" in entry:
            self.id = str(entry["id"])
        elif "folder" in entry:
            self.folder, self.inode = str(entry["folder"]), int(entry["inode"])
        elif "copied" in entry:
            self.id, self._sent = "", {}
        elif "rewound" in entry:
            self._sent = {key: time for key, time in self._sent.items() if key[1] <= entry["rewound"]}
        else:
            self._sent[entry["kind"], int(entry["step"])] = float(entry["time"])

    @property
    def last_step(self) -> int:
        """Newest step that was sent; 0: none was."""
        return max((step for kind, step in self._sent if kind == "step"), default=0)

    def time_of(self, kind: Kind, step: int) -> float | None:
        """Return the time of the row that was sent for a step; None: none was."""
        return self._sent.get((kind, step))
