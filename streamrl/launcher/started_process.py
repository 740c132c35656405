"""A started process of a run, whoever has started it: how it is, and its last words."""

from __future__ import annotations

import os
import signal
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

from streamrl.launcher.entry_point import AGAIN, LAST_WORDS, UNEXPECTED
from streamrl.runtime.process_plan import ProcessSpec

LOG_TAIL_LINES = 12
MOST_LOG_BYTES = 1 << 20
"""Of a process's output that is searched for its last words."""


@dataclass
class RunProcess(ABC):
    """See the module's text. Its output is at the end of a log that the launcher can read."""

    spec: ProcessSpec
    log: Path
    number: int = 1
    """Of an instance's processes, one after the other, this is the one with that number."""
    log_from: int = 0
    """Where in the log its own output begins."""
    started: float = field(default_factory=time.time)
    """Unix seconds."""

    @property
    @abstractmethod
    def exit_code(self) -> int | None:
        """None while it lives; negative: ended by that signal."""

    @property
    @abstractmethod
    def pid(self) -> int:
        """On its node; 0: not known yet."""

    @property
    def node(self) -> str:
        """Where it is; '': on this machine."""
        return ""

    @abstractmethod
    def signal(self, number: int) -> None:
        """Signals the process only (it knows how to end its own children)."""

    @abstractmethod
    def kill(self) -> None:
        """Ends the process and all that it started."""

    def short_words(self) -> str:
        """Why it ended, in one line."""
        return self.last_words().partition("; the end of ")[0].splitlines()[0]

    def last_words(self) -> str:
        """Why it ended, from its exit code and its log."""
        how = self.how_it_ended()
        lines = self._said()
        said = [line for line in lines if line.startswith((LAST_WORDS, UNEXPECTED))]
        if said:
            words = said[0].removeprefix(LAST_WORDS).removeprefix(UNEXPECTED)
            return f"{self.spec.name} {how}: {words}"
        tail = "\n".join(f"    {line}" for line in lines[-LOG_TAIL_LINES:])
        return f"{self.spec.name} {how}; the end of {self.log}:\n{tail}"

    def how_it_ended(self) -> str:
        """In a few words, from its exit code."""
        code = self.exit_code
        if code is None or code >= 0:
            return f"ended with exit code {code}"
        why = " (out of memory, or somebody's kill -9)" if code == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{why}"

    def _said(self) -> list[str]:
        """Lines of its own output, the newest ones if there are many."""
        try:
            with self.log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self.log_from, size - MOST_LOG_BYTES))
                return log.read().decode(errors="replace").splitlines()
        except OSError:
            return []

    @property
    def is_final(self) -> bool:
        """Whether it has ended for a cause that would end the next one, too."""
        return self.exit_code != AGAIN and any(line.startswith(LAST_WORDS) for line in self._said())

    @property
    def is_root_cause(self) -> bool:
        """Whether it did not end because another one did."""
        words = self.last_words()
        return not any(hint in words for hint in (" left the run", "has been silent", "left"))
