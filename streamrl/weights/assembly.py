"""Construction of both ends of a run's weight path: the trainer's side, and that of the sites that generate."""

from __future__ import annotations

from importlib import import_module

from streamrl.machine.model_files import resolve_model
from streamrl.runtime.process_context import RoleContext
from streamrl.runtime.processes import this_host
from streamrl.transport.endpoint import Hub, Link
from streamrl.weights.backends.base import Compute, WeightBackend
from streamrl.weights.site_relay import WeightRelay
from streamrl.weights.version_store import WeightStore


def make_backend(context: RoleContext, hub: Hub, compute: Compute) -> WeightBackend:
    """Make the trainer's side of the weight path; sites fetch from `hub`."""
    backend: WeightBackend = import_module(context.run.weights.path.module).make_backend(context, hub, compute)
    return backend


def make_relay(context: RoleContext, link: Link) -> WeightRelay:
    """Make a site's relay, with a store that begins with what deltas can start from, else empty.

    Over a link it accepts only weights of this site's model. Deltas start from the newest version that an earlier
    relay has left, or from the model's files.

    Raises:
        RunFailed: the store's folder belongs to another user, or others can write to it.
    """
    chosen = context.run.weights.encoding
    near = context.one_machine and not context.remote  # between nodes a delta costs less than encrypting all bytes
    encoding = ("raw" if near else "delta") if chosen == "auto" else chosen
    limit_s = context.run.deadlines.weights_s + (context.cluster.absence_s if context.remote else 0.0)
    store = WeightStore(context.weights_folder, context.one_machine)
    held = store.claim(keep_newest=encoding == "delta")
    if not context.remote:
        return WeightRelay(link, store, limit_s, encoding, host=this_host())
    from streamrl.weights.local_model import expected_tensors, initial_version  # loads torch and transformers

    model = resolve_model(context.run.model.path)
    types = context.wire_type, context.run.weights.generation_dtype
    expected = expected_tensors(model, *types)
    relay = WeightRelay(link, store, limit_s, encoding, expected)
    if encoding == "delta" and held is None and (known := initial_version(model, expected, *types)) is not None:
        relay.seed(*known)
    return relay
