"""The streamed weight path: the trainer lays a version out in shared memory, sites fetch it, whole or as a delta."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.config.cluster import SiteLink
from streamrl.runtime.process_context import RoleContext
from streamrl.runtime.process_plan import plan_processes
from streamrl.runtime.site_connections import weight_chunk
from streamrl.transport.endpoint import Hub
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

    async def publish(self, model: PublishedModel, number: int, controller: Link, behind: bool = False) -> Published:
        """Lay the version out, all ranks together; rank 0 makes it available to relays."""
        manifest, buffer = await self._compute(model.lay_out, number)
        if model.rank == 0:
            await self.publisher.publish(manifest, buffer)
        return Published(number, manifest.version.content_hash, manifest.nbytes)


def make_backend(context: RoleContext, hub: Hub, compute: Compute) -> StreamedBackend:
    """Make the backend of a trainer rank; sites fetch from `hub`."""
    return StreamedBackend(make_publisher(context, hub), compute)


def make_publisher(context: RoleContext, hub: Hub) -> WeightPublisher:
    """Make a publisher that keeps each link's budget: the trainer's, or that of a site that passes weights on.

    The latter makes deltas from the start, because another site may come to it at any version.
    """
    sites = {spec.name: spec.site for spec in plan_processes(context.cluster, context.run, context.run_dir)}

    def link_to(peer: str) -> SiteLink | None:
        return context.cluster.link_between(sites.get(peer, context.site), context.site)

    def rate(peer: str) -> float | None:
        link = link_to(peer)
        return None if link is None else link.bytes_per_s * link.weight_share

    return WeightPublisher(
        hub,
        lambda peer: weight_chunk(context, link_to(peer)),
        rate,
        context.run.weights.anchor_every,
        eager=context.remote,
    )
