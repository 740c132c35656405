"""The trainer's side: keeps the newest version in memory and sends them to the relay of each site.

    relay -> fetch {number, request}    publisher -> manifest {request, manifest}, chunk {request, offset} + bytes ...

Chunks are reliable messages, so the hub's credits bound how much is under way.
"""

from __future__ import annotations

import asyncio
import logging

import numpy as np

from streamrl.transport.endpoint import Delivery, Hub
from streamrl.weights.version import Manifest

log = logging.getLogger(__name__)

KEPT_VERSIONS = 1
"""A version that is being sent stays in memory until it is sent, also when a newer one replaces it here."""


class WeightPublisher:
    """Serves versions over a hub that the relays connect to."""

    def __init__(self, hub: Hub, chunk_bytes: int) -> None:
        self.hub = hub
        self.chunk_bytes = chunk_bytes
        self.bytes_sent = 0
        """Weight bytes sent to relays since the start."""
        self._versions: dict[int, tuple[Manifest, np.ndarray]] = {}
        self._transfers: set[asyncio.Task[None]] = set()

    def publish(self, manifest: Manifest, buffer: np.ndarray) -> None:
        """Makes a version available; older ones are dropped."""
        self._versions[manifest.version.number] = (manifest, buffer)
        for number in sorted(self._versions)[:-KEPT_VERSIONS]:
            del self._versions[number]

    async def serve(self) -> None:
        """Answers relays until cancelled."""
        while True:
            delivery = await self.hub.receive()
            if delivery.kind == "fetch":
                task = asyncio.ensure_future(self._send(delivery))
                self._transfers.add(task)
                task.add_done_callback(self._finished)
            else:
                log.warning("publisher ignores %r of %s", delivery.kind, delivery.peer)
            delivery.ack()

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._transfers.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("sending weights failed: %s", error)

    async def _send(self, request: Delivery) -> None:
        number, tag = request.body.get("number"), request.body.get("request")
        found = self._versions.get(number) if isinstance(number, int) else None
        if found is None:
            await self.hub.send(request.peer, "no_version", {"request": tag, "available": sorted(self._versions)})
            return
        manifest, buffer = found
        await self.hub.send(request.peer, "manifest", {"request": tag, "manifest": manifest.to_dict()})
        for offset in range(0, manifest.nbytes, self.chunk_bytes):
            chunk = buffer[offset : offset + self.chunk_bytes]
            self.bytes_sent += chunk.nbytes
            await self.hub.send(request.peer, "chunk", {"request": tag, "offset": offset}, {"data": chunk})
