"""The streamed weight path: the trainer lays a version out in shared memory, sites fetch it, whole or as a delta."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.weights.backends.base import Compute, Published, PublishedModel, WeightBackend
from streamrl.weights.publisher import WeightPublisher

if TYPE_CHECKING:
    from streamrl.transport.endpoint import Link


class StreamedBackend(WeightBackend):
    """The trainer's side of the streamed weight path: a publisher that sites fetch from over ZeroMQ."""

    def __init__(self, publisher: WeightPublisher, compute: Compute) -> None:
        self.publisher, self._compute = publisher, compute

    async def serve(self) -> None:
        """Send versions to the relays that request them."""
        await self.publisher.serve()

    async def publish(self, model: PublishedModel, number: int, controller: Link) -> Published:
        """Lay the version out, all ranks together; rank 0 makes it available to relays."""
        manifest, buffer = await self._compute(model.lay_out, number)
        if model.rank == 0:
            await self.publisher.publish(manifest, buffer)
        return Published(number, manifest.version.content_hash, manifest.nbytes)
