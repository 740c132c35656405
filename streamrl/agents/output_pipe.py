"""A pipe for what a process prints, which does not hold up the wait for the process's end.

asyncio's own pipes do (`Process.wait` also waits until they are closed), so a process that leaves a child behind would
seem to run as long as that child.
"""

from __future__ import annotations

import asyncio
import os


class OutputPipe:
    """One pipe: give `write_end` to a process as its output, call `started`, and read."""

    def __init__(self, reader: asyncio.StreamReader, transport: asyncio.ReadTransport, write_end: int) -> None:
        self.read = reader.read
        self.write_end = write_end
        self._transport = transport

    @classmethod
    async def open(cls) -> OutputPipe:
        """Make a pipe."""
        read_end, write_end = os.pipe()
        reader = asyncio.StreamReader()
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
