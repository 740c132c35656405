"""The local backend: every process of a run on this machine, each in a session of its own."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from streamrl.emulation.namespaces import enter
from streamrl.errors import RunFailed
from streamrl.launch.plan import PROCESS, ProcessSpec
from streamrl.launch.role import AGAIN, LAST_WORDS, UNEXPECTED
from streamrl.processes import end_with_parent

LOG_TAIL_LINES = 12
MOST_LOG_BYTES = 1 << 20
"""Of a process's output that is searched for its last words."""


def _in_child(namespace: str | None) -> None:
    """Runs in the child before exec: however the launcher ends, its processes are told to stop."""
    end_with_parent()
    if namespace is not None:
        enter(namespace)


@dataclass
class LocalProcess:
    """A started process."""

    spec: ProcessSpec
    process: subprocess.Popen[bytes]
    log: Path
    number: int = 1
    """Of an instance's processes, one after the other, this is the one with that number."""
    log_from: int = 0
    """Where in the log its own output begins."""
    started: float = field(default_factory=time.time)
    """Unix seconds."""

    @property
    def exit_code(self) -> int | None:
        """None while it lives; negative: ended by that signal."""
        return self.process.poll()

    def signal(self, number: int) -> None:
        """Signals the process only (it knows how to end its own children)."""
        if self.exit_code is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """Ends the process and all that it started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait(timeout=10)

    def short_words(self) -> str:
        """Why it ended, in one line."""
        return self.last_words().partition("; the end of ")[0].splitlines()[0]

    def last_words(self) -> str:
        """Why it ended, from its exit code and its log."""
        code = self.exit_code
        how = f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                how += " (out of memory, or somebody's kill -9)"
        lines = self._said()
        said = [line for line in lines if line.startswith((LAST_WORDS, UNEXPECTED))]
        if said:
            words = said[0].removeprefix(LAST_WORDS).removeprefix(UNEXPECTED)
            return f"{self.spec.name} {how}: {words}"
        tail = "\n".join(f"    {line}" for line in lines[-LOG_TAIL_LINES:])
        return f"{self.spec.name} {how}; the end of {self.log}:\n{tail}"

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


def start(
    spec: ProcessSpec,
    log_dir: Path,
    resume: bool,
    further_env: Mapping[str, str] = MappingProxyType({}),
    namespace: str | None = None,
    number: int = 1,
) -> LocalProcess:
    """Starts a process with its output appended to logs/<name>.log, in a network namespace if one is named.

    Raises:
        RunFailed: it cannot be started.
    """
    log = log_dir / f"{spec.name}.log"
    env = (
        os.environ
        | spec.env
        | dict(further_env)
        | {"STREAMRL_RESUME": "1" if resume else "0", "STREAMRL_PARENT": str(os.getpid()), PROCESS: str(number)}
    )
    try:
        with log.open("ab") as output:
            begin = output.tell()
            output.write(f"--- started {time.strftime('%Y-%m-%d %H:%M:%S')} by {os.getpid()}\n".encode())
            output.flush()
            process = subprocess.Popen(
                spec.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
                preexec_fn=functools.partial(_in_child, namespace),
            )
    except OSError as error:
        raise RunFailed(f"cannot start {spec.name}: {error}") from error
    return LocalProcess(spec, process, log, number, begin)
