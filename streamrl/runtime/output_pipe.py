"""Pipes to and from a process, which do not hold up the wait for the process's end.

asyncio's own pipes do (`Process.wait` also waits until they are closed), so a process that leaves a child behind would
seem to run as long as that child.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

MOST_LOGGED = 64 * 2**20
"""Bytes of a log of users' processes beyond which its older half is removed."""
REMOVED = b"[older output is removed]\n"


class OutputPipe:
    """One pipe: give `write_end` to a process as its output, call `started`, and read."""

    def __init__(self, reader: asyncio.StreamReader, transport: asyncio.ReadTransport, write_end: int) -> None:
        self.reader, self.read = reader, reader.read
        self.write_end = write_end
        self._transport = transport

    @classmethod
    async def open(cls, limit: int = 2**16) -> OutputPipe:
        """Make a pipe; `limit` is the most bytes of a line that is read."""
        read_end, write_end = os.pipe()
        reader = asyncio.StreamReader(limit)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", 0)
        )
        return cls(reader, transport, write_end)

    def started(self) -> None:
        """Close the end that the process has, so that its end is noticed."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def close(self) -> None:
        """Close both ends."""
        self.started()
        self._transport.close()


class InputPipe:
    """One pipe: give `read_end` to a process as its input, call `started`, and send."""

    def __init__(self, transport: asyncio.WriteTransport, read_end: int) -> None:
        self.read_end = read_end
        self._transport = transport

    @classmethod
    async def open(cls) -> InputPipe:
        """Make a pipe."""
        read_end, write_end = os.pipe()
        transport, _ = await asyncio.get_running_loop().connect_write_pipe(
            asyncio.BaseProtocol, os.fdopen(write_end, "wb", 0)
        )
        return cls(transport, read_end)

    def started(self) -> None:
        """Close the end that the process has, so that its end is noticed."""
        if self.read_end >= 0:
            os.close(self.read_end)
            self.read_end = -1

    def send(self, data: bytes) -> None:
        """Send; what is sent to a process that has ended is lost."""
        if not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Close both ends; what has not been read is lost."""
        self.started()
        if not self._transport.is_closing():
            self._transport.abort()


class OutputLog:
    """The file for what processes of users print."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file = None if path is None else path.open("ab", buffering=0)
        self.where = f"(their log: {path})" if path is not None else ""

    def write(self, part: bytes) -> None:
        """Append; a full disk must not end episodes."""
        if self._path is not None and self._file is not None and not self._file.closed:
            with contextlib.suppress(OSError):
                self._file.write(part)
            shorten(self._path)

    async def take(self, output: OutputPipe) -> None:
        """Write what a process prints, until it has closed its output."""
        while part := await output.read(2**16):
            self.write(part)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def shorten(path: Path) -> None:
    """Remove the older half of a log that has more than `MOST_LOGGED` bytes.

    It stays the same file, to which processes may append meanwhile. What they append in just that moment can be lost,
    and the newer half if this process is killed, or others fill the disk, before it is written again: a copy beside
    it would need room on a disk that may be full.
    """
    with contextlib.suppress(OSError):
        if path.stat().st_size <= MOST_LOGGED:
            return
        with path.open("a+b", buffering=0) as log:
            log.seek(-(MOST_LOGGED // 2), os.SEEK_END)
            newest = log.read()
            log.truncate(0)
            log.write(REMOVED + (newest.partition(b"\n")[2] or newest))
