"""A TCP proxy that can be cut, mended, deafened, and that keeps what clients sent."""

from __future__ import annotations

import asyncio
import contextlib
import math

from tests.ports import free_port


class Proxy:
    """Stands before a port on loopback."""

    def __init__(self, target: int) -> None:
        self.target, self.port = target, free_port()
        self.sent_by_clients: list[bytearray] = []
        """What came from each client, one entry per connection."""
        self.deaf: set[int] = set()
        """Connections, by index, whose bytes are taken and not passed on."""
        self.most_bytes = math.inf
        """Bytes that each new connection carries in each direction; the rest is taken and not passed on."""
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._pipes: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    async def start(self) -> Proxy:
        self._server = await asyncio.start_server(self._client, "127.0.0.1", self.port)
        return self

    async def stop(self) -> None:
        """Breaks every connection and takes no new one."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        self._writers = []
        for pipe in self._pipes:
            pipe.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            back, forth = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        index = len(self.sent_by_clients)
        self.sent_by_clients.append(bytearray())
        self._writers += [writer, forth]
        for source, sink, keep in ((reader, forth, self.sent_by_clients[index]), (back, writer, None)):
            pipe = asyncio.create_task(self._pipe(index, source, sink, keep))
            self._pipes.add(pipe)
            pipe.add_done_callback(self._pipes.discard)

    async def _pipe(
        self, index: int, source: asyncio.StreamReader, sink: asyncio.StreamWriter, keep: bytearray | None
    ) -> None:
        left = self.most_bytes
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                if keep is not None:
                    keep += data
                left -= len(data)
                if index not in self.deaf and left >= 0:
                    sink.write(data)
                    await sink.drain()
        sink.transport.abort()
