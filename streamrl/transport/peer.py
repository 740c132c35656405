"""A hub's record of each peer: the connection by which it is reached, and what is in flight to and from it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import zmq
import zmq.asyncio

from streamrl.transport.curve import KeyCheck, ServerSecurity, guard
from streamrl.transport.delivery import Inbox, Outbox
from streamrl.transport.endpoint_base import Outgoing, Speaker, size_of
from streamrl.transport.flow import Flow
from streamrl.transport.wire import MAX_FRAME_BYTES, MalformedMessage

MOST_OPEN = 8192
"""Messages of a peer of another site that may be open at once, and wait to be read: far above any credits."""
MOST_OPEN_BYTES = 1 << 31
"""Open bytes of such a peer, as `cost_of` counts them, from which on nothing more is taken from it."""
MOST_HELD_BYTES = 1 << 28
"""Bytes of messages of such a peer that wait to be unpacked, from which on further ones are dropped."""
MOST_UNREAD = 1024
"""Messages to such a peer that wait until it reads them. It may acknowledge what it has not read, so credits alone
bound nothing."""
STRANGERS_HANDSHAKE_MS = 10_000
"""Limit of a handshake between sites, in milliseconds, at both ends. Strangers reach an outer door, and what they begin
takes files and memory until it is closed. As many peers as there are sites come there."""
HANDSHAKE_MS = 60_000
"""Limit of a handshake between processes of a site, in milliseconds: of a thousand that come at once to a busy machine
the last ones wait half a minute, and one that is cut off begins again behind the others. Who holds handshakes open
there is in the site's own network; each costs a file, of up to 65,536 of a process."""
BACKLOG = 4096
"""Connections that the system holds until a door takes them; Linux drops further ones, which try again ever later."""
CLOSING_MS = 5_000
"""Limit of closing a listening socket, in milliseconds."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Door:
    """A bound socket."""

    socket: zmq.asyncio.Socket
    outside: bool = False
    keys: KeyCheck | None = None
    """Keys that the door admits; None: it asks for none."""
    domain: str = ""
    """Name under which libzmq asks about its clients; each door has its own, as other keys open it."""

    async def stop_listening(self) -> None:
        """Give the address back, and return when the system has it.

        A thread of libzmq closes the listening socket at some later time; until then nobody else can listen there.
        """
        address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        events = self.socket.get_monitor_socket(zmq.EVENT_CLOSED)
        self.socket.unbind(address)
        if not await events.poll(CLOSING_MS):
            log.warning("%s is not free %d s after it was closed", address, CLOSING_MS // 1000)
        self.socket.disable_monitor()
        events.close(0)


def make_door(context: zmq.asyncio.Context, domain: str, security: ServerSecurity | None, outside: bool) -> Door:
    """Make a socket that is not bound yet; with `security` in a running event loop."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.BACKLOG, BACKLOG)
    # inside, credits bound what is in flight; a peer from outside that sends faster than it is read, or does not read
    # what it is answered, waits or goes without
    socket.setsockopt(zmq.SNDHWM, MOST_UNREAD if outside else 0)
    socket.setsockopt(zmq.RCVHWM, MOST_OPEN if outside else 0)
    if outside or security is not None:
        # libzmq allocates memory for a frame of any announced size before it has authenticated the sender
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, STRANGERS_HANDSHAKE_MS if outside else HANDSHAKE_MS)
    if security is None:
        return Door(socket, outside)
    keys = KeyCheck(security)
    guard(socket, domain, keys)
    return Door(socket, outside, keys, domain)


def stranger_inbox() -> Inbox:
    """Return the receiver's side of a peer of another site, with its limits."""
    return Inbox(most_open=MOST_OPEN, most_bytes=MOST_OPEN_BYTES)


@dataclass(frozen=True)
class PeerRoute:
    """A connection: its door, and the routing id that ROUTER gave it."""

    door: Door
    routing_id: bytes


@dataclass(frozen=True)
class HeldMessage:
    """A message that has arrived and is not unpacked yet; its fields are those of `Hub._arrived`."""

    route: PeerRoute
    frames: list[Any]
    owner: str | None


class HeldMessages:
    """Messages that wait to be unpacked, in order; of a limited number and size in all."""

    def __init__(self) -> None:
        self._messages: deque[HeldMessage] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def first(self) -> HeldMessage:
        """The one that waits longest."""
        return self._messages[0]

    def put(self, message: HeldMessage) -> bool:
        """Add a message; return False, and drop it, if too many wait."""
        size = size_of(message.frames)
        if self._messages and (len(self) >= MOST_OPEN or self._bytes + size > MOST_HELD_BYTES):
            return False
        self._messages.append(message)
        self._bytes += size
        return True

    def pop(self) -> HeldMessage:
        """Remove and return the first one."""
        message = self._messages.popleft()
        self._bytes -= size_of(message.frames)
        return message


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
    owner: str | None = None
    """Owner of the key with which it said hello, a site or at an inner door a process; None: the door asks for none."""
    begun: float = 0.0
    """When its process began by its own clock, in unix seconds."""
    route: PeerRoute | None = None
    inbox: Inbox = field(default_factory=Inbox)
    held: HeldMessages = field(default_factory=HeldMessages)
    """Messages of another site's peer that wait, in order, until its site may have more unpacked (`budgets.py`)."""
    last_seen: float = 0.0
    """Time of the last message from it, in monotonic seconds."""
    state: dict[str, Any] = field(default_factory=dict)
    lost: bool = False
    empty_connections: int = 0
    """Connections in a row over which it has said hello and nothing else."""
    credit: asyncio.Event = field(default_factory=asyncio.Event)
    bytes_in: int = 0
    """Bytes of all frames from it; of another site's, over all sessions of its name."""
    bytes_out: int = 0
    """Bytes of all frames handed to libzmq for it, in the same way."""

    @property
    def speaker(self) -> Speaker:
        """The peer as the sender of its messages."""
        return Speaker(self.name, self.role, self.site)


def key_of(route: PeerRoute, owner: str | None) -> str | None:
    """Return whom a connection has proved to be, as refusals name it: a process, 'site west', or None without keys.

    A name in a hello is only claimed, and could put the blame on somebody else.
    """
    return f"site {owner}" if owner is not None and route.door.outside else owner


def check_size(frames: list[Any], most: int) -> None:
    """Check the envelope of a message of another site before it is unpacked.

    Raises:
        MalformedMessage: it has more than `most` bytes.
    """
    if frames and len(frames[0]) > most:
        raise MalformedMessage(f"envelope of {len(frames[0])} bytes from another site, at most {most}")
