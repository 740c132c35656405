"""What a peer says as it connects, and whether it may have the name that it says. Pure functions; `hub.py` asks them.

A name belongs to the inside or to one site, whichever said hello first, until it says bye; no other site can take it.
A connection is that of one name for as long as it lasts.

A hello with a new session is a new life of the peer, and ends the one before it. A first hello may be late, and come
after that of the process that has replaced its sender: it says when its process began, and is refused while one that
began later is heard; it may ask again, as a clock that was set back makes a successor look late.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from streamrl.transport import endpoint_base
from streamrl.transport.peer import Peer, PeerRoute
from streamrl.transport.wire import MalformedMessage, Message, is_finite, is_name, is_natural, is_plain

Admit = Callable[[str, str, dict[str, Any], str | None], str | None]
"""Decides on a hello by name, role, meta and the owner of the connection's key: returns None, or why it is refused."""


@dataclass(frozen=True)
class Hello:
    """What a peer says as it connects."""

    name: str
    role: str
    meta: dict[str, Any]
    session: str
    first: int
    """Number of its first message that is not acknowledged."""
    begun: float
    """When its process began by its own clock, in unix seconds."""


def read_hello(message: Message, now: float) -> Hello:
    """Return what a hello says; its sender's process began `now` if it does not say when.

    Raises:
        MalformedMessage: it is no hello.
    """
    name, role, meta = message.body.get("name"), message.body.get("role"), message.body.get("meta")
    if not is_name(name) or not is_name(role) or not isinstance(meta, dict) or not is_plain(meta):
        raise MalformedMessage("a hello without a name, a role or its meta")
    first, begun = first_open(message), message.body.get("begun", now)
    if not is_finite(begun):
        raise MalformedMessage(f"a hello of a process that began at {begun!r:.99}")
    return Hello(name, role, meta, message.session, first, begun)


def first_open(message: Message) -> int:
    """Return the number of the sender's first message that is not acknowledged, in a hello or a heartbeat.

    Raises:
        MalformedMessage: it is no number of a message.
    """
    first = message.body.get("first", 1)
    if not is_natural(first):
        raise MalformedMessage(f"a {message.kind} whose first message is {first!r}")
    return first


def site_of(hello: Hello, route: PeerRoute) -> Any:
    """Return the site that a hello names; None: it is one of inside, or names none."""
    return hello.meta.get("site") if route.door.outside else None


def wrong_with_claim(
    hello: Hello, route: PeerRoute, owner: str | None, spoken: Peer | None, known: Peer | None
) -> str | None:
    """Return why a connection cannot be that of the name and the site in its hello; None: it can.

    Args:
        hello: the hello.
        route: its connection.
        owner: has the connection's key: a site, or at an inner door a process; None: no key is asked for.
        spoken: the peer that has said hello over this connection before.
        known: the peer that has the name.
    """
    name, site = hello.name, site_of(hello, route)
    if route.door.outside and not is_name(site):
        return "a peer from outside must name its site in meta['site']"
    if route.door.outside and route.door.keys is not None and site != owner:
        return f"the key is that of site {owner!r}, the hello is of site {site!r}"
    if spoken is not None and spoken.name != name:
        return f"this connection is that of {spoken.name!r}, it cannot be that of {name!r}"
    if known is not None and known.site != site:
        where = "inside this site" if known.site is None else f"at site {known.site!r}"
        return f"the name {name!r} belongs to a peer {where}"
    return None


def is_late(hello: Hello, known: Peer | None, silent_s: float) -> bool:
    """Return whether a hello is of a process that began before the one that has the name, and is heard.

    Args:
        hello: the hello.
        known: the peer that has the name.
        silent_s: seconds since it was last heard.
    """
    if known is None or known.session == hello.session or hello.begun >= known.begun:
        return False
    return silent_s < endpoint_base.heard_s()
