"""The signals that ask a command to stop and clean up, among them those of a closed terminal and of Ctrl-\\."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

STANDARD_OUTPUTS = (1, 2)
TERMINALS_OWN = (signal.SIGHUP, signal.SIGQUIT)
"""Sent by a terminal that is closed, and at Ctrl-\\."""


def on_stop(handler: Callable[[int, FrameType | None], None], *numbers: int) -> dict[int, Any]:
    """Call a handler at some signals; return the previous handlers.

    SIGHUP and SIGQUIT are among them, unless they are ignored (`nohup`). A thread other than the main one gets no
    signals: there, nothing is changed.

    After SIGHUP, outputs of this process that are terminals go nowhere: they are gone, or soon will be, and writing to
    one would fail in the middle of the handler's clean-up.
    """
    terminals = [file for file in STANDARD_OUTPUTS if os.isatty(file)]

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave(terminals)
        handler(number, frame)

    if threading.current_thread() is not threading.main_thread():
        return {}
    heeded = [*numbers, *(one for one in TERMINALS_OWN if signal.getsignal(one) != signal.SIG_IGN)]
    return {number: signal.signal(number, handle) for number in heeded}


def leave(files: Sequence[int]) -> None:
    """Let writes to these file descriptors go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for file in files:
        os.dup2(nowhere, file)
    os.close(nowhere)
