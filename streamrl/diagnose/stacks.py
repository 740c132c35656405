"""Ask a process of a run what it is doing right now, and answer when asked.

A role's process answers two signals, in `stacks/` of its site's folder:

    SIGUSR2   what its asyncio tasks await, written to <name>.tasks.txt; only while its event loop runs
    SIGUSR1   the Python stacks of all its threads, appended to <name>.txt; always

Either signal would kill a process without a handler. So a process is asked only if it has written its pid to its file,
has it open, is not younger than that file, and catches the signal. Writing the stacks halts all of a process's threads
for a moment, so by default only processes that do not answer SIGUSR2 are asked for them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil

from streamrl.atomic_files import replace_text
from streamrl.diagnose.facts import Loop, ProcessFacts
from streamrl.plain_files import open_plain, read_plain
from streamrl.run_dir import layout

if TYPE_CHECKING:
    import asyncio  # imported only where tasks exist: observing from outside is twice as fast without it

TASKS, THREADS = signal.SIGUSR2, signal.SIGUSR1
CLOCK_S = 2.0
"""Seconds of tolerance between a process's start time, known to a second, and a file's time."""


def answer_requests(run_dir: Path, name: str) -> None:
    """Make this process answer SIGUSR1 and SIGUSR2 as above; call it in the main thread.

    If the folder cannot be written, the process continues and cannot be asked.

    Args:
        run_dir: the folder of the process's site.
        name: the process's name in waits: 'controller', 'trainer-0', 'here-tail-0'.
    """
    import asyncio

    folder = run_dir / layout.STACKS
    tasks = folder / f"{name}.tasks.txt"

    def put_tasks() -> None:
        known = sorted(asyncio.all_tasks(), key=lambda task: (len(task.get_name()), task.get_name()))
        _put(tasks, [f"tasks at {time.time():.3f}", *map(describe, known)])

    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
        tasks.unlink(missing_ok=True)
        file = (folder / f"{name}.txt").open("w", encoding="utf-8")  # faulthandler keeps it open
        file.write(f"pid {os.getpid()} at {time.time():.3f}\n")
        file.flush()
        faulthandler.register(THREADS, file=file, all_threads=True, chain=False)

        def asked(number: int, frame: FrameType | None) -> None:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                _put(tasks, [f"no event loop at {time.time():.3f}"])
            else:
                loop.call_soon_threadsafe(put_tasks)

        signal.signal(TASKS, asked)
        signal.siginterrupt(TASKS, False)  # system calls of libraries are resumed, not interrupted


def _put(path: Path, lines: list[str]) -> None:
    """Write lines atomically, so that a reader sees all or nothing."""
    with contextlib.suppress(OSError):
        replace_text(path, "\n".join(lines) + "\n")


def describe(task: asyncio.Task[Any]) -> str:
    """Describe what a task awaits: its coroutines, outermost first, with the line that each is at."""
    parts: list[str] = []
    one: Any = task.get_coro()
    while one is not None:
        frame = getattr(one, "cr_frame", None) or getattr(one, "gi_frame", None)
        if frame is None:
            break
        file = "/".join(Path(frame.f_code.co_filename).parts[-2:])
        parts.append(f"{getattr(one, '__qualname__', '?')} ({file}:{frame.f_lineno})")
        one = getattr(one, "cr_await", None) or getattr(one, "gi_yieldfrom", None)
    return f"{task.get_name()}: " + (" > ".join(parts) or "done")


# -- asking


@dataclass
class ObservedProcesses:
    """A process under observation, and its answers."""

    facts: ProcessFacts
    folder: Path
    tree: list[psutil.Process] = field(default_factory=list)
    """The process itself and all its descendants."""
    asked_tasks: bool = False
    tasks_before: tuple[int, int] | None = None
    threads_from: int | None = None
    """Size of `threads_file`, in bytes, when the process was asked."""

    @property
    def tasks_file(self) -> Path:
        """File in which the process writes what its tasks await."""
        return self.folder / f"{self.facts.name}.tasks.txt"

    @property
    def threads_file(self) -> Path:
        """File to which the process appends its threads' stacks."""
        return self.folder / f"{self.facts.name}.txt"

    def ask_tasks(self) -> None:
        """Ask the process what its asyncio tasks await."""
        self.tasks_before = _mark(self.tasks_file)
        self.asked_tasks = self._signal(TASKS)

    def ask_threads(self) -> None:
        """Ask the process for the stacks of its threads, at most once."""
        if self.threads_from is None and self.threads_file.exists():
            size = self.threads_file.lstat().st_size
            self.threads_from = size if self._signal(THREADS) else None

    def _signal(self, number: signal.Signals) -> bool:
        """Send a signal if the process can take it; return whether it was sent."""
        pid = self.facts.pid
        if pid is None or self.facts.alive in ("gone", "zombie", "stopped", "traced"):
            return False
        if not _prepared(pid, self.threads_file, self._below, number):
            return False
        with contextlib.suppress(OSError):
            os.kill(pid, number)
            return True
        return False

    @property
    def loop(self) -> Loop:
        """State of the process's event loop, judged by its answer so far."""
        if not self.asked_tasks:
            return "unknown"
        if _mark(self.tasks_file) == self.tasks_before:
            return "blocked"
        return "none" if self._answer().startswith("no event loop") else "answers"

    @property
    def tasks(self) -> tuple[str, ...]:
        """Await chains of its asyncio tasks, one line each; empty unless it has answered."""
        return tuple(self._answer().splitlines()[1:]) if self.loop == "answers" else ()

    def _answer(self) -> str:
        return read_plain(self.tasks_file, below=self._below).decode(errors="replace")

    @property
    def _below(self) -> Path:
        """The run's folder: names of processes come from there, and lead nowhere else."""
        return layout.whole_folder(self.folder.parent)

    @property
    def threads(self) -> tuple[str, ...]:
        """Lines of the answer received so far."""
        if self.threads_from is None:
            return ()
        with open_plain(self.threads_file, below=self._below) as file:
            file.seek(self.threads_from)
            return tuple(file.read().decode(errors="replace").splitlines())

    @property
    def threads_told(self) -> bool:
        """Whether the answer is complete: its last part is the interrupted thread, mostly the main one."""
        return any("Current thread" in line for line in self.threads[:-1])


def _mark(path: Path) -> tuple[int, int] | None:
    """Return a value that changes when the file is replaced; None if there is no file."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _has_open(pid: int, file: os.stat_result) -> bool:
    """Return whether a process has a file open; raise OSError if that may not be seen."""
    for descriptor in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(file, descriptor.stat()):
                return True
    return False


def _prepared(pid: int, path: Path, below: Path, number: int) -> bool:
    """Return whether `pid` is the process that opened the file and catches the signal (Linux only).

    It keeps the file open. So whoever writes to the run's folder cannot have a process signalled that is no part of it.
    """
    try:
        with open_plain(path, below=below) as opened:
            own = os.fstat(opened.fileno())
            word, written, _, at = opened.readline(200).decode().split()
        if not _has_open(pid, own):
            return False
        if word != "pid" or int(written) != pid or psutil.Process(pid).create_time() > float(at) + CLOCK_S:
            return False
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        caught = next(line for line in lines if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
    except (OSError, ValueError, StopIteration, psutil.Error):
        return False
