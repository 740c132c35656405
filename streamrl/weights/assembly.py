"""Construction of both ends of a run's weight path: the trainer's side, and that of the sites that generate."""

from __future__ import annotations

from streamrl.config.cluster import SiteLink
from streamrl.machine.model_files import resolve_model
from streamrl.runtime.process_context import RoleContext
from streamrl.runtime.process_plan import plan_processes
from streamrl.runtime.processes import this_host
from streamrl.runtime.site_connections import weight_chunk
from streamrl.transport.endpoint import Hub, Link
from streamrl.weights.backends.base import Compute, WeightBackend, weight_path
from streamrl.weights.backends.streamed import StreamedBackend
from streamrl.weights.publisher import WeightPublisher
from streamrl.weights.site_relay import WeightRelay
from streamrl.weights.version_store import WeightStore


def make_backend(context: RoleContext, hub: Hub, compute: Compute) -> WeightBackend:
    """Make the trainer's side of the weight path; sites fetch from `hub`."""
    if weight_path(context.run, context.cluster).fetched:
        return StreamedBackend(make_publisher(context, hub), compute)
    from streamrl.weights.backends.nccl import NcclBackend  # loads torch

    return NcclBackend(context, compute)


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


def make_relay(context: RoleContext, link: Link) -> WeightRelay:
    """Make a site's relay. Over a link it accepts only weights of this site's model, whose files may seed its store."""
    chosen = context.run.weights.encoding
    encoding = ("delta" if context.remote else "raw") if chosen == "auto" else chosen
    limit_s = context.run.deadlines.weights_s + (context.cluster.absence_s if context.remote else 0.0)
    store = WeightStore(context.weights_folder, context.one_machine)
    if not context.remote:
        return WeightRelay(link, store, limit_s, encoding, host=this_host())
    from streamrl.weights.local_model import expected_tensors, initial_version  # loads torch and transformers

    model = resolve_model(context.run.model.path)
    types = context.wire_type, context.run.weights.generation_dtype
    expected = expected_tensors(model, *types)
    relay = WeightRelay(link, store, limit_s, encoding, expected)
    if encoding == "delta" and (known := initial_version(model, expected, *types)) is not None:
        relay.seed(*known)
    return relay
