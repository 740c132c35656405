"""A process that its owner speaks to over its standard input and output; what else it prints goes to a log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from streamrl.runtime.output_pipe import InputPipe, OutputLog, OutputPipe
from streamrl.runtime.processes import kill_with_children, kill_with_setting

log = logging.getLogger(__name__)

LAST_WORDS_S = 1.0
"""Seconds for the output of a process that has ended; what it has started may hold the pipes."""


class PipedProcess:
    """One process. Await `ended`, then `last_words`, or its pipes stay open."""

    def __init__(
        self, process: asyncio.subprocess.Process, requests: InputPipe, answers: OutputPipe, printed: OutputPipe
    ) -> None:
        self.pid, self.send, self.answers = process.pid, requests.send, answers.reader
        self._process = process
        self._pipes = requests, answers, printed
        self._printing: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, command: Sequence[str], environment: Mapping[str, str], log: OutputLog, most_line: int = 2**16
    ) -> PipedProcess:
        """Start a process.

        Args:
            command: program and arguments.
            environment: its variables.
            log: takes what it prints to its standard error.
            most_line: most bytes of a line of `answers`.

        Raises:
            OSError: it cannot be started.
        """
        with contextlib.ExitStack() as opened:
            opened.callback((requests := await InputPipe.open()).close)
            opened.callback((answers := await OutputPipe.open(most_line)).close)
            opened.callback((printed := await OutputPipe.open()).close)
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=requests.read_end,
                stdout=answers.write_end,
                stderr=printed.write_end,
                env=environment,
            )
            opened.pop_all()
        for pipe in (requests, answers, printed):
            pipe.started()
        one = cls(process, requests, answers, printed)
        one._printing = asyncio.create_task(log.take(printed))
        return one

    @property
    def returncode(self) -> int | None:
        """How it ended, as of `subprocess`; None: it has not."""
        return self._process.returncode

    async def ended(self, reading: asyncio.Task[None]) -> int:
        """Wait until it has ended, and return its exit code; it is killed when its answers have.

        Args:
            reading: reads `answers` to their end. It need not end with the process: a child may hold the pipe.
        """
        ended = asyncio.ensure_future(self._process.wait())
        await asyncio.wait({reading, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done() and self.returncode is None:
            kill_with_children(self.pid)
        return await ended

    async def last_words(self, reading: asyncio.Task[None]) -> None:
        """Let what the ended process has written be read, and close its pipes."""
        assert self._printing is not None
        left: set[asyncio.Task[Any]] = {reading, self._printing}
        await asyncio.wait(left, timeout=LAST_WORDS_S)
        for task in left:
            task.cancel()
        await asyncio.wait(left)
        for pipe in self._pipes:
            pipe.close()


async def end_the_rest(setting: str, whose: str) -> None:
    """Kill what an ended process has started, and log the names of what was in a session of its own.

    Args:
        setting: `NAME=value`, with which that process began, and nothing else did.
        whose: that process, in words.
    """
    try:
        names = await asyncio.to_thread(kill_with_setting, setting)
    except (OSError, RuntimeError) as error:  # there is no file number or thread for it now
        log.warning("what %s has started may live on: %s", whose, error)
        return
    if names:
        log.warning("ended with %s: %s", whose, ", ".join(names))
