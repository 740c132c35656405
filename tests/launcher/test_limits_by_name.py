"""An error for which the system's limits on processes or files are the cause names the limit."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.errors import with_limit
from streamrl.launcher import entry_point, local_backend
from streamrl.runtime.process_plan import ProcessSpec
from tests.waiting import scaled

OF_PROCESSES = "raise the limit on processes and threads (`ulimit -u`, a cgroup's `pids.max`)"
TOO_LARGE = "raise the limit on the size of a file (`ulimit -f`)"
WRITES = """import resource, signal, sys
from streamrl.errors import RunFailed, writing
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    with writing("it"), open(sys.argv[1], "wb", buffering=0) as file:
        while True: file.write(bytes(100))
except RunFailed as error:
    print(error)
"""


def no_more(*arguments: object, **options: object) -> None:
    """The answer of a system that gives no further process."""
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


@pytest.mark.parametrize(
    ("error", "limit"),
    [
        (RuntimeError("can't start new thread"), OF_PROCESSES),
        (RuntimeError("Resource temporarily unavailable"), OF_PROCESSES),
        (RuntimeError("thread constructor failed: Resource temporarily unavailable"), OF_PROCESSES),
        (RuntimeError("connect to 10.0.0.1: Resource temporarily unavailable"), None),
        (BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)), None),
        (OSError(errno.EFBIG, os.strerror(errno.EFBIG)), TOO_LARGE),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), None),
        (ValueError("can't start new thread"), None),
        (RuntimeError("another one"), None),
    ],
)
def test_the_limit_is_in_the_last_words_of_a_process(error: Exception, limit: str | None) -> None:
    assert with_limit(error) == (f"{error}; {limit}" if limit else str(error))
    assert entry_point._unexpected(error).endswith(limit or str(error))


def test_a_process_that_cannot_be_started_names_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "_fork_exec", no_more)
    with pytest.raises(Exception, match=r"cannot start one: .*ulimit -u"):
        local_backend.start(ProcessSpec("one", "instance", "here", "pool", [sys.executable]), tmp_path, False)


def test_a_forked_process_that_cannot_be_started_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", no_more)
    with pytest.raises(BlockingIOError) as raised:
        multiprocessing.get_context("fork").Process().start()
    assert with_limit(raised.value).endswith(OF_PROCESSES)


def test_a_socket_or_lock_that_is_not_ready_names_no_limit(tmp_path: Path) -> None:
    near, far = socket.socketpair()
    with near, far, pytest.raises(BlockingIOError) as raised:
        near.setblocking(False)
        near.recv(1)
    assert with_limit(raised.value) == entry_point._unexpected(raised.value).partition("BlockingIOError: ")[2]
    assert "ulimit" not in with_limit(raised.value)
    with (tmp_path / "one").open("w") as one, (tmp_path / "one").open("w") as two:
        fcntl.flock(one, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError) as locked:
            fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert "ulimit" not in with_limit(locked.value)


def test_a_file_that_may_not_become_that_large_names_the_limit(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITES, str(tmp_path / "file")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=scaled(60)).stdout
    assert printed.startswith("cannot write it: [Errno 27] File too large; raise the limit on the size of a file")
