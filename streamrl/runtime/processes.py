"""Processes of one host: linking their lifetimes, and telling whether they share a host."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from streamrl.runtime import warden

COPY_CODE = 70
"""Exit code of a copied process that went on where only the original may ("internal software error" of sysexits.h)."""
PR_SET_PDEATHSIG = 1
MOST_LOOKS = 5
"""Times that processes to be killed are looked for, as they may start others meanwhile."""
EXEC_S, LOOK_S = 1.0, 0.001
"""Seconds for which an empty environment or command line is read again, and between two looks."""
KERNEL = 2
"""Pid of the parent of the kernel's own processes, which have no environment."""
STARTED = 17
"""Place of a process's start time in /proc/PID/stat, counted from the one after its parent."""
_without_environment: set[tuple[int, bytes]] = set()
"""Processes that have no environment at all, by pid and start time."""
TRACKER = "from multiprocessing.resource_tracker import main"
"""Stands in the command line of a process that frees what Python's processes have left of their shared memory."""


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask the kernel to signal this process when the thread that started it ends, for whatever reason.

    Linux only; a no-op elsewhere. A parent that ended before the call is not noticed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def forget_main() -> None:
    """Let `multiprocessing` start processes as it would in a plain Python, for a user's code in a process of a run.

    They begin with the method of the platform, not with that by which this process was started itself, and do not
    import this process's main module, which is none of the user's and takes seconds.
    """
    multiprocessing.set_start_method(None, force=True)
    main = sys.modules["__main__"]
    main.__spec__ = None
    vars(main).pop("__file__", None)


def start_warden(starters: Sequence[int]) -> None:
    """Start a warden that ends this process within `ENDS_WITHIN_S` of the death of any starter, whatever it is doing.

    If this process leads a process group or a session, all of that ends with it; what is left of it is ended after it.

    Raises:
        OSError: the warden cannot be started.
    """
    command = [sys.executable, "-I", "-S", warden.__file__, str(os.getpid()), *map(str, starters)]
    null = subprocess.DEVNULL
    # with a job's RANK (torchrun, PyTorchJob), that of the rank launcher would be taken for a rank
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    subprocess.Popen(command, stdin=null, stdout=null, stderr=null, env=environment, start_new_session=True)


def is_alive(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def exit_text(exit_code: int) -> str:
    """Describe how a process ended: 'SIGSEGV', 'exit code 3'."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def end_copy(original: int, error: BaseException | None = None) -> None:
    """End this process if it is a copy that a user's code has made by `os.fork`; a no-op in the original.

    A copy that leaves the user's code would go on as the original, with its pipes and sockets. It ends as Python would
    end it, so that the code that waits for it finds the exit code that it expects.

    Args:
        original: process id of the original.
        error: what the user's code has raised in this process; None: it has returned, and the code is `COPY_CODE`.
    """
    if os.getpid() == original:
        return
    code = COPY_CODE if error is None else 1
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        code = (error.code or 0) & 0xFF
    os._exit(code)


def kill_with_children(pid: int) -> None:
    """Kill a process and all that it has started, as far as they can still be seen."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                one.kill()


def kill_with_setting(setting: str) -> list[str]:
    """Kill this user's processes that began with a variable, whoever their parent and whatever their group and session.

    Linux only; a no-op elsewhere.

    Args:
        setting: `NAME=value`, which nothing else has: it is inherited by what a process starts.

    Returns:
        Names of those killed in another session than this process, such as daemons.
    """
    names: list[str] = []
    for _ in range(MOST_LOOKS):
        found = False
        for pid in psutil.pids():
            with contextlib.suppress(OSError):  # it is another user's, has ended, or this is no Linux
                if setting.encode() in _environment(pid).split(b"\0"):
                    name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
                    elsewhere = os.getsid(pid) != os.getsid(0)
                    os.kill(pid, signal.SIGKILL)
                    found = True
                    names += [name] if elsewhere else []
        if not found:
            break
    return names


def _environment(pid: int) -> bytes:
    """Return a process's environment as in /proc; a process has none for a moment while it loads a program.

    Raises:
        OSError: it is another user's, or has ended, or this is no Linux.
    """
    folder, end = Path(f"/proc/{pid}"), time.monotonic() + EXEC_S
    while not (found := (folder / "environ").read_bytes()):
        state, parent, *others = (folder / "stat").read_bytes().rpartition(b")")[2].split()
        process = pid, others[STARTED]
        if state in (b"Z", b"X") or int(parent) == KERNEL or process in _without_environment:
            break
        if time.monotonic() > end:
            _without_environment.add(process)
        time.sleep(LOOK_S)
    return found


def kill_group(leader: int) -> None:
    """Kill a process group, but for multiprocessing's resource trackers in it, which are only continued.

    A tracker ends by itself once those that it serves have ended, and first frees the shared memory that they have
    left, such as that between the workers of a vLLM engine. A tracker that does not is for the warden.
    """
    for _ in range(2):  # again for what one of them has forked meanwhile
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
                if os.getpgid(pid) == leader:
                    process = psutil.Process(pid)
                    frees = any(TRACKER in word for word in _command_line(process))
                    process.send_signal(signal.SIGCONT if frees else signal.SIGKILL)


def _command_line(process: psutil.Process) -> list[str]:
    """Return a process's command line, which a process does not have for a moment while it loads a program.

    Raises:
        psutil.Error: it has ended, or is another user's.
    """
    end = time.monotonic() + EXEC_S
    while not (words := process.cmdline()) and time.monotonic() < end:
        time.sleep(LOOK_S)
    return words


def kill_with(starter: int, *, children: bool) -> None:
    """Kill this process once another process has ended; for processes that have threads and nothing to close.

    Args:
        starter: PID of the other process.
        children: kill all that this process has started, too. Not for a process whose children have wardens: it would
            kill the wardens, and nobody would end those that it cannot see, because their own parent is gone.
    """

    def wait_and_kill() -> None:
        warden.wait_for_an_end([starter])
        for process in psutil.Process().children(recursive=True) if children else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_and_kill, name="starter", daemon=True).start()


@functools.cache
def this_host() -> str:
    """Return an identifier of this host or container; '' if it cannot be determined.

    It is equal for two processes that can open each other's files through /proc.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
