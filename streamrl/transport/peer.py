"""A hub's record of each peer: the connection by which it is reached, and what is in flight to and from it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import zmq.asyncio

from streamrl.transport.curve import KeyCheck
from streamrl.transport.delivery import Inbox, Outbox
from streamrl.transport.endpoint_base import Outgoing, Speaker
from streamrl.transport.flow import Flow


@dataclass(frozen=True, eq=False)
class Door:
    """A bound socket."""

    socket: zmq.asyncio.Socket
    outside: bool = False
    keys: KeyCheck | None = None
    """Keys that the door admits; None: it asks for none."""
    domain: str = ""
    """Name under which libzmq asks about its clients; each door has its own, as other keys open it."""


@dataclass(frozen=True)
class PeerRoute:
    """A connection: its door, and the routing id that ROUTER gave it."""

    door: Door
    routing_id: bytes


@dataclass
class Peer:
    """A hub's view of one link."""

    name: str
    role: str
    meta: dict[str, Any]
    session: str
    outbox: Outbox[Outgoing]
    flow: Flow = field(default_factory=Flow)
    site: str | None = None
    """Its site, if it came through the outer door."""
    route: PeerRoute | None = None
    inbox: Inbox = field(default_factory=Inbox)
    last_seen: float = 0.0
    """Time of the last message from it, in monotonic seconds."""
    state: dict[str, Any] = field(default_factory=dict)
    lost: bool = False
    credit: asyncio.Event = field(default_factory=asyncio.Event)
    bytes_in: int = 0
    """Bytes of all frames from it, over all its sessions."""
    bytes_out: int = 0
    """Bytes of all frames handed to libzmq for it."""

    @property
    def speaker(self) -> Speaker:
        """The peer as the sender of its messages."""
        return Speaker(self.name, self.role, self.site)
