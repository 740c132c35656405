"""Connections between the processes of a run: inside a site, and encrypted, measured and patient over a link.

Inside a site on one machine they are Unix sockets, inside one that is spread over machines TCP. Each process has keys
of its own for them (`runtime/inside_keys.py`).

Other sites connect to the trainer's site. Its controller and publisher each have two addresses: one for their own site,
one for other sites, which are admitted by their keys and by the files they were started with.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from streamrl.config.cluster import SiteLink
from streamrl.protocol.speakers import HubKind, role_at
from streamrl.runtime.handshake import disagreement
from streamrl.runtime.inside_keys import inside_admission, inside_roles
from streamrl.runtime.process_context import RoleContext
from streamrl.runtime.process_plan import plan_processes, rank_name
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.delivery import Inbox
from streamrl.transport.endpoint import Hub, Link
from streamrl.transport.flow import Flow
from streamrl.transport.peer import stranger_inbox

CONTROLLER, PUBLISHER = "controller", "publisher"
"""Hub names at the trainer's site."""
BATCH_BYTES = 256 * 1024
"""Largest batch of samples sent over a link."""
MOST_GIVEN_BYTES = 4 * 2**20
"""Most bytes of several groups in a message to a site, a quarter of what a message may have beside its arrays."""
CHUNK_S = 0.25
"""Longest time for which one chunk of weights occupies a link, so that samples behind it do not wait long."""
MIN_CHUNK_BYTES = 64 * 1024
SLOWER = 4
"""How many times slower than declared a link may be and still carry the largest message before it is taken for dead."""


def to_home(context: RoleContext, role: str, waits: WaitRegistry) -> Link:
    """Create a connection from a site's process to the controller or publisher; not yet connected."""
    return _link(context, role, waits, context.link)


async def connect_inside(context: RoleContext, link: Link, hub: str, address: str) -> None:
    """Connect a link to a hub of its own site.

    Raises:
        DeadlineExpired: no answer in time.
        UserError: the keys of this site and launch are missing, or other users can read them.
    """
    process = rank_name(0) if hub == PUBLISHER else hub
    await link.connect(address, context.startup_s, context.inside_client_security(process), hub)


async def connect_home(context: RoleContext, link: Link, hub: str, address: str) -> None:
    """Connect a link made by `to_home` to the hub CONTROLLER or PUBLISHER.

    Raises:
        DeadlineExpired: no answer in time.
        Refused: the trainer's site does not admit this one.
        UserError: a key is missing, or other users can read the secret key.
    """
    if context.remote:
        await link.connect(address, context.startup_s, context.client_security(), hub)
    else:
        await connect_inside(context, link, hub, address)


def home_hub(context: RoleContext, name: str, waits: WaitRegistry, near: Flow) -> Hub:
    """Create a hub of the trainer's site; not yet bound.

    Args:
        name: CONTROLLER or PUBLISHER.
        near: flow settings to processes of its own site.
    """
    return _hub(context, name, waits, near, context.cluster.remote_sites)


def relay_hub(context: RoleContext, waits: WaitRegistry) -> Hub:
    """Create the hub at which other sites fetch weights from this site, which does not train; not yet bound."""
    linked = [site for site in context.cluster.remote_sites if context.cluster.link_between(site, context.site)]
    return _hub(context, f"relay-{context.site}", waits, context.local_flow, linked)


def _hub(context: RoleContext, name: str, waits: WaitRegistry, near: Flow, others: Collection[str]) -> Hub:
    """Create a hub that admits other sites' processes if they are in the plan and were started with the same files."""
    plan = {spec.name: spec for spec in plan_processes(context.cluster, context.run, context.run_dir)}
    sites = {spec.name: spec.site for spec in plan.values()}
    mine = context.agreement if others else {}
    kind: HubKind = "controller" if name == CONTROLLER else "publisher"

    def flow_to(peer: str) -> Flow:
        link = context.cluster.link_between(sites.get(peer, context.site), context.site)
        if link is None:
            return near
        if name == CONTROLLER:  # no window, in which it would wait for one site while it could serve the others
            over = context.link_flow(link, MOST_GIVEN_BYTES)
            return Flow(resend_s=over.resend_s, lost_after_s=over.lost_after_s, lost_key=over.lost_key)
        return context.link_flow(link, weight_chunk(context, link))

    def admit(peer: str, role: str, meta: dict[str, Any], key_site: str | None) -> str | None:
        site = meta["site"]
        if site not in others:
            return f"the cluster file has no site {site!r} that would connect"
        if sites.get(peer) != site:
            return f"site {site} has no process {peer!r}"
        if role != role_at(kind, plan[peer].role):
            return f"process {peer!r} of site {site} is no {role!r:.99} here"
        return disagreement(mine, meta.get("agreement"), context.site, site)

    hub = Hub(name, waits, flow=near, flows=flow_to)
    hub.admit = admit
    hub.admit_inside = inside_admission(inside_roles(context.cluster, context.run, context.site), kind)
    return hub


def bind_home(context: RoleContext, hub: Hub, address: str, outside: str) -> None:
    """Open a hub of the trainer's site to its own processes and, unless `outside` is '', to other sites.

    Raises:
        RunFailed: an address cannot be bound.
        UserError: a key is missing, or other users can read the secret key.
    """
    hub.bind(address, context.inside_server_security())
    if outside:
        hub.bind_outside(outside, context.server_security())


def weight_chunk(context: RoleContext, link: SiteLink | None) -> int:
    """Return the size of one message of weights, in bytes."""
    most = int(context.run.weights.chunk_mb * 2**20)
    return most if link is None else int(min(most, max(MIN_CHUNK_BYTES, link.bytes_per_s * CHUNK_S)))


async def connect_relay(context: RoleContext, link: Link, site: str) -> None:
    """Connect a link made by `to_relay`; raises like `connect_home`."""
    security = context.client_security(site)
    await link.connect(context.addresses.relays[site], context.startup_s, security, f"the relay of site {site}")


def to_relay(context: RoleContext, site: str, waits: WaitRegistry) -> Link:
    """Create a connection to the weight relay of another generating site; not yet connected.

    That site is trusted with nothing but bytes, so what its relay may queue here has an end.
    """
    return _link(context, "relay", waits, context.cluster.link_between(context.site, site), stranger_inbox())


def _link(
    context: RoleContext, role: str, waits: WaitRegistry, over: SiteLink | None, inbox: Inbox | None = None
) -> Link:
    if over is None:
        return Link(context.name, role, waits, {"site": context.site}, flow=context.local_flow)
    about = {"site": context.site, "agreement": context.agreement}
    flow, largest_s = context.link_flow(over, BATCH_BYTES), SLOWER * MOST_GIVEN_BYTES / over.bytes_per_s
    return Link(context.name, role, waits, about, flow=flow, inbox=inbox, outside=True, largest_s=largest_s)
