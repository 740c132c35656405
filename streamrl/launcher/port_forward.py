"""A TCP forwarder, for a process on a node that other sites cannot reach directly.

Bytes are forwarded unchanged, so encryption stays end to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Self

log = logging.getLogger(__name__)

START_S = 5.0
CONNECT_S = 10.0
CHUNK_BYTES = 1 << 18


class Forwarder:
    """A thread that forwards connections from one address to a target, until it is closed."""

    def __init__(self, host: str, port: int) -> None:
        """Prepare the forwarder; it does not listen yet.

        Args:
            host: address to listen on.
            port: port to listen on.
        """
        self.listens = host, port
        self.target: tuple[str, int] | None = None
        """(host, port) to which new connections go; None: they are closed."""
        self._begun: Future[Callable[[], object]] = Future()
        """Resolves to the function that stops the thread."""
        self._thread = threading.Thread(target=asyncio.run, args=(self._listen(),), name="forwarder", daemon=True)

    def __enter__(self) -> Self:
        """Start to listen.

        Raises:
            OSError: the address cannot be bound.
        """
        self._thread.start()
        self._begun.result(START_S)
        return self

    def __exit__(self, *args: object) -> None:
        """Stop listening and close all connections."""
        self._begun.result()()
        self._thread.join(START_S)

    async def _listen(self) -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        try:
            server = await asyncio.start_server(self._serve, *self.listens)
        except OSError as error:
            self._begun.set_exception(error)
            return
        self._begun.set_result(lambda: loop.call_soon_threadsafe(over.set))
        await over.wait()
        server.close()  # connections end with their tasks, which asyncio.run cancels

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
