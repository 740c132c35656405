"""Standard output and standard error of a launcher, written by a thread of their own.

A terminal may stop reading (Ctrl-S, a stalled ssh connection), and so may a pipe (`| less`): a write then waits, maybe
for ever. The launcher watches its processes meanwhile, and stops them when it is told to. What cannot be written (a
full disk behind `>> log`, a closed pipe) is dropped, and does not end the run.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec, TextIO, cast

from streamrl.runtime.stop_signals import STANDARD_OUTPUTS, leave

log = logging.getLogger(__name__)
P = ParamSpec("P")

MOST_WAITING = 10_000
"""Texts that are kept for an output that is not read; the oldest ones beyond are dropped."""
GIVE_UP_S = 5.0
"""Seconds for which a launcher that has been told to stop waits for an output that is not read."""


class Output:
    """The thread that writes, and what it has not written yet."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, bytes]] = deque(maxlen=MOST_WAITING)
        self._writing: int | None = None
        """The file that the thread is writing to; None: none."""
        self._changed = threading.Condition()
        self._ended = False
        self._done = False
        """Whether the thread has ended, or is left to itself."""
        self._failed: set[int] = set()
        threading.Thread(target=self._write, name="output", daemon=True).start()

    @property
    def behind(self) -> bool:
        """Whether anything has yet to be written."""
        with self._changed:
            return bool(self._waiting) or self._writing is not None

    def put(self, file: int, text: bytes) -> None:
        """Have a text written to a file descriptor; after the thread's end, write it here."""
        with self._changed:
            if not self._done:
                self._waiting.append((file, text))
                self._changed.notify_all()
                return
        with contextlib.suppress(OSError):
            _write_all(file, text)

    def finish(self, stop: Sequence[int]) -> None:
        """Wait until all is written, and end the thread.

        Args:
            stop: the requests to stop so far. After one, an output that is not read is waited for `GIVE_UP_S`, and
                further writes to it go nowhere.
        """
        asked: float | None = None
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            while not self._done and (self._waiting or self._writing is not None):
                self._changed.wait(0.1)  # signals that arrive meanwhile are handled in between
                if stop and asked is None:
                    asked = time.monotonic()
                if asked is not None and time.monotonic() - asked > GIVE_UP_S:
                    self._give_up()
                    return

    def _give_up(self) -> None:
        self._waiting.clear()
        self._done = True
        if (stuck := self._writing) is not None:  # standard output and standard error may be one terminal
            leave([stuck, *(file for file in STANDARD_OUTPUTS if os.path.sameopenfile(file, stuck))])

    def _write(self) -> None:
        while True:
            with self._changed:
                self._writing = None
                self._changed.notify_all()
                while not self._waiting:
                    if self._ended:
                        self._done = True
                        return
                    self._changed.wait()
                file, text = self._waiting.popleft()
                self._writing = file
            try:
                _write_all(file, text)
            except OSError as error:
                if file not in self._failed:
                    self._failed.add(file)
                    name = {1: "standard output", 2: "standard error"}.get(file, f"file {file}")
                    log.warning("cannot write to %s, the run goes on: %s", name, error)


def _write_all(file: int, text: bytes) -> None:
    while text:
        try:
            text = text[os.write(file, text) :]
        except BlockingIOError:  # whoever shares the file has set O_NONBLOCK
            ready = select.poll()
            ready.register(file, select.POLLOUT)
            ready.poll()


class _Stream(io.TextIOBase):
    """Takes the place of a stream, and lets `Output` write to its file."""

    def __init__(self, output: Output, stream: TextIO) -> None:
        self.output, self._stream, self._file = output, stream, stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The stream's encoding."""
        return self._stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        """How the stream treats characters that its encoding lacks."""
        return self._stream.errors

    def fileno(self) -> int:
        """Return the stream's file descriptor."""
        return self._file

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return os.isatty(self._file)

    def writable(self) -> bool:
        """Say yes."""
        return True

    def write(self, text: str) -> int:
        """Have a text written."""
        self.output.put(self._file, text.encode(self.encoding, self.errors or "strict"))
        return len(text)


@contextlib.contextmanager
def unblocked_output(stop: Sequence[int]) -> Iterator[Output]:
    """Let a thread write what this process prints, so that no print waits for whoever reads it.

    Streams without a file descriptor, such as one in memory, stay as they are. At the end all is written, unless there
    has been a request to stop (`Output.finish`), of which KeyboardInterrupt is one. Inside another such block, the
    thread of that one writes.

    Args:
        stop: the requests to stop so far.
    """
    streams = sys.stdout, sys.stderr
    output = next((stream.output for stream in streams if isinstance(stream, _Stream)), None) or Output()
    sys.stdout, sys.stderr = (_replaced(output, stream) for stream in streams)
    try:
        yield output
    except KeyboardInterrupt:
        stop = [*stop, signal.SIGINT]
        raise
    finally:
        output.finish(stop)
        sys.stdout, sys.stderr = streams


def unblocked(command: Callable[P, None]) -> Callable[P, None]:
    """Let a command print in this way from its first line on; one with `dry_run` prints as any other does."""

    @functools.wraps(command)
    def call(*args: P.args, **options: P.kwargs) -> None:
        with contextlib.nullcontext() if options["dry_run"] else unblocked_output([]):
            command(*args, **options)

    return call


def _replaced(output: Output, stream: TextIO) -> TextIO:
    if isinstance(stream, _Stream):
        return stream
    try:
        stream.flush()
        return cast(TextIO, _Stream(output, stream))
    except OSError:  # it has no file descriptor, or cannot be written to
        return stream
