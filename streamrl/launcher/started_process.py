"""A started process of a run, independent of the backend: its state and its last words."""

from __future__ import annotations

import functools
import itertools
import os
import re
import signal
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from streamrl.errors import FULL, SEE_DOCS, ErrorCode
from streamrl.launcher.entry_point import AGAIN, FURTHER_WORDS, LAST_WORDS, UNEXPECTED, UNSAID
from streamrl.rollouts.plain_text import shown
from streamrl.runtime.process_plan import ProcessSpec

LOG_TAIL_LINES = 12
KILL_S = 5.0
"""Seconds within which a process, or all processes of a run together, must be gone once they are killed."""
MOST_LOG_BYTES = 1 << 20
"""Most bytes of a process's output that are searched for its last words."""
TRIED_BYTES = 1 << 16
"""Bytes that are written where a log is, to see why that does not take more."""
ENGINE_FAILED = ("EngineDeadError: ", "RuntimeError: Engine core initialization failed")
"""Beginnings of vLLM's errors that only say that its engine, another process, has failed."""
ERROR = re.compile(r"(?:^|\s)(?:\w+\.)*(\w+(?:Error|Exception): .*\S)")
"""The line with which a traceback ends, whatever stands before it in a log."""


@dataclass
class RunProcess(ABC):
    """A process that a backend has started; its output is appended to a log that the launcher can read."""

    spec: ProcessSpec
    log: Path
    number: int = 1
    """Number of this process among the successive processes of an instance."""
    log_from: int = 0
    """Byte offset in the log at which its own output begins."""
    started: float = field(default_factory=time.monotonic)
    """Monotonic seconds of the launcher."""
    killed_for: str = ""
    """Why the launcher has killed it; '': it has not, or not for a fault."""

    @property
    @abstractmethod
    def exit_code(self) -> int | None:
        """Exit code; None while it lives; negative: ended by that signal."""

    @property
    @abstractmethod
    def pid(self) -> int:
        """Process id on its node; 0: not known yet."""

    @property
    def node(self) -> str:
        """Address of its node; '': this machine."""
        return ""

    @abstractmethod
    def signal(self, number: int) -> None:
        """Signal the process only; it ends its own children."""

    @abstractmethod
    def request_kill(self) -> None:
        """Let the process and all that it started be killed, without waiting for that."""

    @abstractmethod
    def finish_kill(self, limit_s: float) -> None:
        """Wait at most this long, in seconds, until a requested kill is done, and free what the process held."""

    def kill(self) -> None:
        """Kill the process and all that it started."""
        self.request_kill()
        self.finish_kill(KILL_S)

    def short_words(self) -> str:
        """Return in one line why it ended."""
        return self.last_words().partition("; the end of ")[0].splitlines()[0]

    def last_words(self, in_lines: bool = False) -> str:
        """Return why it ended, from its exit code and its log.

        Args:
            in_lines: keep the line breaks of what it said; else they become blanks.
        """
        how = self.how_it_ended()
        lines = self._said()
        said = [number for number, line in enumerate(lines) if line.startswith((LAST_WORDS, UNEXPECTED))]
        if said:
            first = lines[said[0]].removeprefix(LAST_WORDS).removeprefix(UNEXPECTED)
            rest = itertools.takewhile(lambda line: line.startswith(FURTHER_WORDS), lines[said[0] + 1 :])
            words = "\n".join([first, *(line.removeprefix(FURTHER_WORDS) for line in rest)])
            if words.startswith(ENGINE_FAILED):
                words = f"{_engine_error(lines[: said[0]]) or words}; see {self.log}"
            words = words if in_lines else " ".join(words.split())
            return f"{self.spec.name} {how}: {words}"
        tail = "\n".join(f"    {line}" for line in lines[-LOG_TAIL_LINES:])
        return f"{self.spec.name} {how}; the end of {self.log}:\n{tail}"

    def how_it_ended(self) -> str:
        """Return in a few words how it ended, from its exit code."""
        code = self.exit_code
        if code == UNSAID:
            how = f"ended with exit code {code}, and {self.log} does not take why"
            if (error := self._log_refuses) is not None and error.errno not in FULL:
                return f"{how}: {error.strerror}"
            return ErrorCode.DISK.refer(how if error is None else f"{how}: {error.strerror}")
        if code is None or code >= 0:
            return f"ended with exit code {code}"
        killed = f"was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL and self.killed_for:
            killed += f" (by its launcher, as {self.killed_for}; {SEE_DOCS}{ErrorCode.HANG})"
        elif code == -signal.SIGKILL:
            killed += f" (out of memory, or somebody's kill -9; {SEE_DOCS}{ErrorCode.MEMORY})"
        return killed

    @functools.cached_property
    def _log_refuses(self) -> OSError | None:
        """Why the file system of its log takes nothing, as one that an error has made read-only; None: it does by now.

        Tried once: whoever watches the processes asks how they ended many times a second.
        """
        try:
            with tempfile.TemporaryFile(dir=self.log.parent, buffering=0) as file:
                file.write(bytes(TRIED_BYTES))
        except OSError as error:
            return error
        return None

    def _said(self) -> list[str]:
        """Read the lines of its own output, the newest ones if there are many."""
        try:
            with self.log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self.log_from, size - MOST_LOG_BYTES))
                return log.read().decode(errors="replace").splitlines()
        except OSError:
            return []

    @property
    def is_final(self) -> bool:
        """Whether it has ended for a cause that would also end a restarted process."""
        if self.exit_code in (AGAIN, UNSAID):
            return self.exit_code == UNSAID
        return any(line.startswith(LAST_WORDS) for line in self._said())

    @property
    def is_root_cause(self) -> bool:
        """Whether it ended for a reason of its own, not because it lost its peer (`transport` `PeerLost`)."""
        return "has been silent" not in self.last_words()


def _engine_error(lines: Sequence[str]) -> str:
    """Return the last error in a log that vLLM's engine has raised itself; '': there is none."""
    found = (match[1] for line in reversed(lines) if (match := ERROR.search(line)))
    return shown(next((one for one in found if not one.startswith(ENGINE_FAILED)), ""))
