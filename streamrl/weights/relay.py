"""A site's side: fetches each version once from the publisher, verifies it, and keeps it for the site's instances."""

from __future__ import annotations

import asyncio
import logging

from streamrl.errors import RunFailed
from streamrl.transport.endpoint import Link
from streamrl.weights.store import WeightStore
from streamrl.weights.version import CorruptWeights, Manifest

log = logging.getLogger(__name__)

FETCH_TRIES = 3


class WeightRelay:
    """Fetches versions over a link to the publisher into a store."""

    def __init__(self, link: Link, store: WeightStore, limit_s: float) -> None:
        self.link = link
        self.store = store
        self.limit_s = limit_s
        self._request = 0
        self.corrupt = 0
        """Versions that failed verification and were fetched again."""

    async def fetch(self, number: int, content_hash: str) -> Manifest:
        """Brings a version into the store and returns its manifest.

        Raises:
            DeadlineExpired: the publisher sent nothing in time.
            RunFailed: it was corrupt `FETCH_TRIES` times, or the publisher does not have it.
        """
        for _ in range(FETCH_TRIES):
            self._request += 1  # what still arrives of an earlier, failed request is told apart by it
            try:
                manifest = await self._receive(number, self._request)
                if manifest.version.content_hash != content_hash:
                    raise CorruptWeights(f"version {number} is not the one that was announced")
                return manifest
            except CorruptWeights as error:
                self.corrupt += 1
                log.warning("fetching again: %s", error)
        raise RunFailed(f"weight version {number} arrived corrupt {FETCH_TRIES} times")

    async def _receive(self, number: int, request: int) -> Manifest:
        await self.link.send("fetch", {"number": number, "request": request})
        manifest: Manifest | None = None
        buffer = None
        missing = 0
        async with self.link.waits.deadline(f"the publisher to send weight version {number}", self.limit_s):
            while manifest is None or missing > 0:
                delivery = await self.link.receive()
                delivery.ack()
                if delivery.body.get("request") != request:
                    log.warning("relay ignores %r of another request", delivery.kind)
                elif delivery.kind == "no_version":
                    raise RunFailed(f"the publisher has no weight version {number}: {delivery.body.get('available')}")
                elif delivery.kind == "manifest":
                    manifest = Manifest.from_dict(delivery.body["manifest"])
                    buffer = self.store.begin(manifest)
                    missing = manifest.nbytes
                elif delivery.kind == "chunk" and buffer is not None:
                    data, offset = delivery.arrays["data"], int(delivery.body["offset"])
                    if data.dtype != buffer.dtype or not 0 <= offset <= buffer.nbytes - data.nbytes:
                        raise CorruptWeights(f"a chunk of version {number} lies outside its buffer")
                    buffer[offset : offset + data.nbytes] = data
                    missing -= data.nbytes
        assert buffer is not None
        await asyncio.to_thread(self.store.commit, manifest, buffer)
        return manifest
