"""The signals that ask a command to stop and clean up, a closed terminal's SIGHUP among them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

STANDARD_OUTPUTS = (1, 2)


def on_stop(handler: Callable[[int, FrameType | None], None], *numbers: int) -> dict[int, Any]:
    """Call a handler at some signals, and at SIGHUP unless that is ignored (`nohup`); return the previous handlers.

    After SIGHUP, outputs of this process that are terminals go nowhere: they are gone, or soon will be, and writing to
    one would fail in the middle of the handler's clean-up.
    """
    terminals = [file for file in STANDARD_OUTPUTS if os.isatty(file)]

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave(terminals)
        handler(number, frame)

    heeded = [*numbers, *([] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP])]
    return {number: signal.signal(number, handle) for number in heeded}


def leave(files: Sequence[int]) -> None:
    """Let writes to these file descriptors go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for file in files:
        os.dup2(nowhere, file)
    os.close(nowhere)
