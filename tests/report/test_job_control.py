"""Ctrl-Z, `fg`, `bg` and Ctrl-\\ in a live view, in a shell on a terminal of its own."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.launcher import supervisor
from streamrl.run_dir.status import write_status
from tests.report.synthetic import make_status
from tests.waiting import scaled

ROOT = Path(__file__).parents[2]
SHOW, HIDE = b"\x1b[?25h", b"\x1b[?25l"
BASH = shutil.which("bash")
HEAD = b"smollm2-135m"
PROMPT = b"next> "


class Shell:
    """bash on a terminal, which reads what is typed."""

    def __init__(self, folder: Path) -> None:
        assert BASH is not None
        own = {"PS1": PROMPT.decode(), "TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "COLUMNS": "110"}
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            for one in (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP):  # ignored where tests run in the background
                signal.signal(one, signal.SIG_DFL)
            os.chdir(folder)
            os.execve(BASH, [BASH, "--norc", "--noprofile", "--noediting", "-i"], os.environ | own)
        self.shown = b""

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def until(self, *parts: bytes) -> bytes:
        """Read until these parts have come in this order; what has been shown since the last call."""
        limit, seen = time.monotonic() + scaled(60), b""
        while not in_order(seen, parts):
            ready, _, _ = select.select([self._terminal], [], [], max(0.0, limit - time.monotonic()))
            assert ready, f"{parts} has not come: {seen!r}"
            seen += os.read(self._terminal, 1 << 16)
        self.shown += seen
        return seen

    def close(self) -> None:
        os.kill(self.pid, signal.SIGHUP)  # bash passes it on to its jobs
        os.close(self._terminal)
        os.waitpid(self.pid, 0)


def in_order(text: bytes, parts: tuple[bytes, ...]) -> bool:
    place = 0
    for part in parts:
        if (found := text.find(part, place)) < 0:
            return False
        place = found + len(part)
    return True


def has_cursor(shell: Shell) -> bool:
    return shell.shown.rfind(SHOW) > shell.shown.rfind(HIDE)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell in which a run is watched."""
    if BASH is None:
        pytest.skip("needs bash")
    (tmp_path / "demo").mkdir()
    write_status(tmp_path / "demo", make_status(3, 20, time.time()))
    with supervisor._locked(tmp_path / "demo"), contextlib.closing(Shell(tmp_path)) as made:  # watched while it is held
        made.until(PROMPT)
        made.type(f"'{sys.executable}' -m streamrl.cli.main status demo --watch\n")
        made.until(HIDE, HEAD)
        yield made


def test_a_stopped_view_leaves_the_shell_a_cursor_and_takes_it_back(shell: Shell) -> None:
    shell.type("\x1a")
    shell.until(b"Stopped", PROMPT)
    assert has_cursor(shell)
    shell.type("fg\n")
    shell.until(HIDE, HEAD)
    shell.type("\x1a")  # and once more
    shell.until(b"Stopped", PROMPT)
    assert has_cursor(shell)


def test_a_view_in_the_background_draws_nothing_until_it_is_in_front(shell: Shell) -> None:
    shell.type("\x1a")
    shell.until(b"Stopped", PROMPT)
    shell.type("bg\n")
    shell.until(PROMPT)
    shell.type("jobs\n")
    before = shell.until(b"Running", PROMPT)
    assert HIDE not in before and HEAD not in before
    shell.type("fg\n")
    shell.until(HIDE, HEAD)


@pytest.mark.parametrize("key", ["\x1c", "\x03"], ids=["quit", "interrupt"])
def test_a_view_that_is_told_to_stop_gives_the_cursor_back(shell: Shell, key: str) -> None:
    shell.type(key)
    shell.until(b"Stopped watching; the run goes on.", PROMPT)
    assert has_cursor(shell)
