"""Ctrl-Z, `fg` and `bg` of a command that redraws a picture and has hidden the cursor meanwhile."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from types import FrameType
from typing import Self

from rich.control import Control

SHOW, HIDE, HOME = (
    str(one).encode() for one in (Control.show_cursor(True), Control.show_cursor(False), Control.home())
)


class JobControl:
    """Gives the shell a terminal with a cursor while this process is stopped or in the background.

    Use it as a context manager. What it writes goes straight to the terminal: a handler may run in the middle of a
    print, and a thread that writes for this process is stopped with it.
    """

    def __init__(self, terminal: int) -> None:
        """Prepare for the terminal with this file descriptor."""
        self._terminal = terminal
        self._previous: dict[int, object] = {}
        self._away = False
        """Whether the terminal is the shell's since Ctrl-Z."""

    def __enter__(self) -> Self:
        """Install the handlers; where nobody can press Ctrl-Z, or in a thread that gets no signals, none."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTSTP) != signal.SIG_IGN:
            for number, handler in ((signal.SIGTSTP, self._stop), (signal.SIGCONT, self._go_on)):
                self._previous[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *error: object) -> None:
        """Put the previous handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def is_away(self) -> bool:
        """Return whether the terminal is the shell's since Ctrl-Z, so that nothing may be drawn; else take it back.

        It is asked for, as `fg` after `bg` sends no signal.
        """
        if self._away and self._is_in_front():
            self._write(HIDE)
            self.take_page()
        return self._away

    def take_page(self) -> None:
        """Leave what the shell has written above, and begin an empty page: drawing goes on there."""
        self._away = False
        with contextlib.suppress(OSError):
            self._write(b"\r\n" * os.get_terminal_size(self._terminal).lines + HOME)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Stop as any process does at Ctrl-Z, with a cursor."""
        self._away = True
        self._write(SHOW)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
        signal.signal(number, self._stop)
        self._go_on(number, frame)  # the system stops no process whose shell is gone, and then sends no SIGCONT

    def _go_on(self, number: int, frame: FrameType | None) -> None:
        """Take the terminal back in the foreground; after `bg` it is the shell's until `fg`."""
        self.is_away()

    def _is_in_front(self) -> bool:
        try:
            return os.tcgetpgrp(self._terminal) == os.getpgrp()
        except OSError:  # it is not the terminal from which this process is controlled
            return True

    def _write(self, text: bytes) -> None:
        ready = select.poll()
        ready.register(self._terminal, select.POLLOUT)
        if ready.poll(0):  # a terminal that does not read now (Ctrl-S) holds up no handler
            with contextlib.suppress(OSError):
                os.write(self._terminal, text)
