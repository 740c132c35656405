"""What a process of a run does right now: how it is asked, and how it answers.

A role's process answers two signals, in `stacks/` of its site's folder:

    SIGUSR2   what its asyncio tasks await, in <name>.tasks.txt; only while its event loop turns
    SIGUSR1   the Python stacks of all its threads, added to <name>.txt; whatever it is doing

Both would end a process that is not prepared for them. So only one is asked that has put its pid into its file, is not
younger than that, and catches the signal. To be asked for its threads costs a process a moment of all of them, so by
default only those are that do not answer the first question.
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
from streamrl.run_dir import layout

if TYPE_CHECKING:
    import asyncio  # loaded by who has tasks; to look from outside takes half as long without

TASKS, THREADS = signal.SIGUSR2, signal.SIGUSR1
CLOCK_S = 2.0
"""Start times of processes are told to a second."""


def answer_requests(run_dir: Path, name: str) -> None:
    """From now on this process answers, as the module's text says; to be called in its main thread.

    A folder that cannot be written is no reason to end: the process then cannot be asked.

    Args:
        run_dir: of its site.
        name: as waits have it: 'controller', 'trainer-0', 'here-tail-0'.
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
        file = (folder / f"{name}.txt").open("w")  # faulthandler keeps it open
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
        signal.siginterrupt(TASKS, False)  # system calls of libraries go on


def _put(path: Path, lines: list[str]) -> None:
    """In one piece, so that a reader sees all or nothing."""
    with contextlib.suppress(OSError):
        replace_text(path, "\n".join(lines) + "\n")


def describe(task: asyncio.Task[Any]) -> str:
    """What a task awaits: its coroutines from the outermost to the innermost, with the line that each is at."""
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
    """A process that is looked at."""

    facts: ProcessFacts
    folder: Path
    tree: list[psutil.Process] = field(default_factory=list)
    """Itself, and all that it has started."""
    asked_tasks: bool = False
    tasks_before: tuple[int, int] | None = None
    threads_from: int | None = None
    """Bytes that its file had when it was asked."""

    @property
    def tasks_file(self) -> Path:
        return self.folder / f"{self.facts.name}.tasks.txt"

    @property
    def threads_file(self) -> Path:
        return self.folder / f"{self.facts.name}.txt"

    def ask_tasks(self) -> None:
        self.tasks_before = _mark(self.tasks_file)
        self.asked_tasks = self._signal(TASKS)

    def ask_threads(self) -> None:
        if self.threads_from is None and self.threads_file.exists():
            size = self.threads_file.stat().st_size
            self.threads_from = size if self._signal(THREADS) else None

    def _signal(self, number: signal.Signals) -> bool:
        """Whether it can be asked, and was."""
        pid = self.facts.pid
        if pid is None or self.facts.alive in ("gone", "zombie", "stopped", "traced"):
            return False
        if not _prepared(pid, self.threads_file, number):
            return False
        with contextlib.suppress(OSError):
            os.kill(pid, number)
            return True
        return False

    @property
    def loop(self) -> Loop:
        if not self.asked_tasks:
            return "unknown"
        if _mark(self.tasks_file) == self.tasks_before:
            return "blocked"
        return "none" if self.tasks_file.read_text().startswith("no event loop") else "answers"

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self.tasks_file.read_text().splitlines()[1:]) if self.loop == "answers" else ()

    @property
    def threads(self) -> tuple[str, ...]:
        """What has come of the answer."""
        if self.threads_from is None:
            return ()
        with self.threads_file.open("rb") as file:
            file.seek(self.threads_from)
            return tuple(file.read().decode(errors="replace").splitlines())

    @property
    def threads_told(self) -> bool:
        """Whether the answer has come to its end: the thread that was interrupted, mostly the main one."""
        return any("Current thread" in line for line in self.threads[:-1])


def _mark(path: Path) -> tuple[int, int] | None:
    """Changes when a file is replaced."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _prepared(pid: int, file: Path, number: int) -> bool:
    """Whether this pid is the process that opened the file, and it catches the signal (Linux only)."""
    try:
        with file.open() as opened:
            word, told, _, at = opened.readline().split()
        if word != "pid" or int(told) != pid or psutil.Process(pid).create_time() > float(at) + CLOCK_S:
            return False
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        caught = next(line for line in lines if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
    except (OSError, ValueError, StopIteration, psutil.Error):
        return False
