"""Passes connections on to another machine: what other sites connect to may be on a node that they cannot reach.

Bytes are passed on as they are, so whatever is encrypted stays so from end to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from typing import Self

log = logging.getLogger(__name__)

START_S = 5.0
CONNECT_S = 10.0
CHUNK_BYTES = 1 << 18


class Forwarder:
    """Listens at one address, in a thread of its own, until it is closed."""

    def __init__(self, host: str, port: int) -> None:
        """Nobody listens yet.

        Args:
            host: to listen at.
            port: to listen at.
        """
        self.listens = host, port
        self.target: tuple[str, int] | None = None
        """Where new connections go; None: they are closed."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="forwarder", daemon=True)
        self._server: asyncio.Server | None = None

    def __enter__(self) -> Self:
        """Begins to listen.

        Raises:
            OSError: the address cannot be listened at.
        """
        self._thread.start()
        listening = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, *self.listens), self._loop)
        self._server = listening.result(START_S)
        return self

    def __exit__(self, *args: object) -> None:
        """Closes it, with all connections."""
        if self._server is not None:
            self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            if self.target is None:
                return
            try:
                async with asyncio.timeout(CONNECT_S):
                    there, back = await asyncio.open_connection(*self.target)
            except OSError as error:  # a timeout is one
                log.warning("%s:%d cannot be reached for another site: %s", *self.target, error)
                return
            with contextlib.closing(back):
                ways = [asyncio.ensure_future(_pass_on(*way)) for way in ((reader, back), (there, writer))]
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                for way in ways:
                    way.cancel()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
