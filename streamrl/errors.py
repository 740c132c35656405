"""The errors with which a command, or a process of a run, fails, and the codes of their documentation."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a disk that more room helps."""
DISK = (*FULL, errno.EROFS, errno.EACCES)
"""Error numbers that a restarted process would meet again: the disk is full or not writable."""


class ErrorCode(StrEnum):
    """Codes of the entries of docs/how-to/troubleshoot.md, which `streamrl explain` prints."""

    CONFIGURATION = "E1001"
    MODEL = "E1002"
    INSTALLATION = "E1003"
    PORT = "E1004"
    CONTEXT = "E1005"
    MEMORY = "E1006"
    DISK = "E1007"
    REWARD = "E1008"
    RESUME = "E1009"
    INSTANCE = "E1010"
    HANG = "E1011"
    SITES = "E1012"
    KEYS = "E1013"
    PACKING = "E1014"
    REFUSED_STEPS = "E1015"
    MISMATCH = "E1016"

    def refer(self, message: str) -> str:
        """Append `(see docs: CODE)` to a message; a message that has a code already keeps it."""
        return message if SEE_DOCS in message else f"{message} ({SEE_DOCS}{self})"


SEE_DOCS = "see docs: "
"""What stands before the code in a message."""


class UserError(Exception):
    """Bad input: shown as one message without a traceback; nothing was started (exit code 2)."""

    exit_code = 2


class RunFailed(Exception):
    """Failure of a run that had started; the message ends with the cause (exit code 1)."""

    exit_code = 1


class RestartNeeded(RunFailed):
    """Failure of a process that a restarted one can overcome."""


NO_THREAD = re.compile(r"can't start new thread|(thread[^:]*: )?Resource temporarily unavailable")
"""What Python and libraries in C++ say, and no more than that, if the system gives them no further thread."""
STARTS = {
    *(("subprocess", "_execute_child"), ("subprocess", "_posix_spawn")),
    *(("multiprocessing.popen_fork", "_launch"), ("multiprocessing.util", "spawnv_passfds")),
}
"""(Module, function) of Python's own calls that start a process."""


def with_limit(error: BaseException) -> str:
    """Return the text of an error; if the system's limit on processes or on files is the cause, with its name."""
    number, text = getattr(error, "errno", None), str(error)
    if number == errno.EFBIG:
        return f"{text}; raise the limit on the size of a file (`ulimit -f`)"
    # sockets, pipes and locks say EAGAIN as well, for reasons of their own
    no_process = number == errno.EAGAIN and _is_of_start(error)
    if no_process or (isinstance(error, RuntimeError) and NO_THREAD.fullmatch(text)):
        return f"{text}; raise the limit on processes and threads (`ulimit -u`, a cgroup's `pids.max`)"
    return text


def _is_of_start(error: BaseException) -> bool:
    """Return whether an error was raised in the start of a process."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any((frame.f_globals.get("__name__"), frame.f_code.co_name) in STARTS for frame in frames)


@contextmanager
def writing(path: object) -> Iterator[None]:
    """Write to a file that the run cannot do without; the system's own error often does not name it.

    Raises:
        RunFailed: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        # without the name of a temporary file, and what a library has added
        why = OSError(error.errno, os.strerror(error.errno)) if error.errno else error
        text = f"cannot write {path}: {with_limit(why)}"
        raise RunFailed(ErrorCode.DISK.refer(text) if error.errno in FULL else text) from error


@contextmanager
def reaching(key: str) -> Iterator[None]:
    """Look at what a key of the user's names; folders on the way there may be closed to this user.

    Args:
        key: the key, or another beginning of the message.

    Raises:
        UserError: it cannot be reached; the message names it.
    """
    try:
        yield
    except PermissionError as error:
        raise UserError(f"{key}: {error.filename}: {why_unusable(error)}") from error


def as_typed(*words: object) -> str:
    """Return words of a command as they are typed, or pasted, into a shell: a path with a blank in quotes."""
    return shlex.join(map(str, words))


def why_unusable(error: OSError | ValueError) -> str:
    """Return in words why a file cannot be read as text, JSON or what else was expected; its name comes before."""
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, IsADirectoryError):
        return "this is a folder, expected a file"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text (byte {error.start})"
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or error}"
    return f"not valid JSON: {error}" if isinstance(error, json.JSONDecodeError) else str(error)


def cause(error: BaseException) -> BaseException:
    """Return the first real error inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def is_final(error: BaseException) -> bool:
    """Return whether an error that ends a process would end a restarted one, too: no other is worth a restart."""
    found = cause(error)
    if isinstance(found, RestartNeeded):
        return False
    return isinstance(found, RunFailed | UserError) or getattr(found, "errno", None) in DISK
