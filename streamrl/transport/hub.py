"""The end that binds: it knows its peers by the names in their hellos, and admits them.

A connection is anonymous until its hello is accepted; from then on it speaks for that name only. A link that reconnects
says hello again with its session: its messages are then routed to the new connection, and unacknowledged ones are
resent there. A hello with a new session is a new life of the peer, which starts with no state. The life before it has
ended: if its process is still there (a site launched twice, a machine that was suspended), its next hello is refused.
`hello.py` has the rules by which a connection may have a name.

There are two doors. Peers of the hub's own site use the inner one, a Unix socket or TCP, with keys of the site's
processes. Those of other sites use the outer one, with their site's key. libzmq admits only connections that have
proved to own a key of the door. Each door has its own socket, so no connection from outside can have the routing id of
one inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Self

import zmq
import zmq.asyncio

from streamrl.errors import RunFailed
from streamrl.transport import endpoint_base
from streamrl.transport.budgets import Budget, Repeated
from streamrl.transport.curve import ServerSecurity, stays_on_machine, unguard
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.delivery import Outbox
from streamrl.transport.endpoint_base import (
    Delivery,
    Endpoint,
    Frames,
    Outgoing,
    PeerLost,
    Speaker,
    cost_of,
    send_now,
    size_of,
)
from streamrl.transport.flow import Flow
from streamrl.transport.hello import Admit, Hello, first_open, is_late, read_hello, site_of, wrong_with_claim
from streamrl.transport.ip_addresses import needs_ipv6
from streamrl.transport.peer import Door, HeldMessage, Peer, PeerRoute, check_size, key_of, make_door, stranger_inbox
from streamrl.transport.refusals import STRANGER
from streamrl.transport.wire import (
    MAX_ENVELOPE_BYTES,
    MAX_STATE_BYTES,
    Arrays,
    MalformedMessage,
    Message,
    OtherVersion,
    decode,
)

log = logging.getLogger(__name__)

FORGOTTEN_AFTER_S = 60.0
"""Seconds of silence after which a peer that comes and goes is forgotten."""
MOST_ENDED = 1000
"""Ended sessions that a hub remembers."""
LOOK_AGAIN_S = 0.1
"""Seconds after which a message that was held is looked at again."""
MOST_TOLD = 200
"""Characters of an unexpected error that a refused peer gets to know."""


class Hub(Endpoint):
    """The end that binds ROUTER sockets and serves many links.

    Args:
        name: the hub's name, for peers and in errors.
        flow: flow to every peer, unless `flows` is given.
        flows: returns the flow to the peer of a name; called at its hello.
        clock: returns unix seconds, with which links compare their clocks.
    """

    def __init__(
        self,
        name: str,
        waits: WaitRegistry,
        *,
        flow: Flow | None = None,
        flows: Callable[[str], Flow] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(name, waits, flow, clock)
        self.peers: dict[str, Peer] = {}
        self.flows = flows
        self.admit: Admit | None = None
        """Decides on each hello from outside: returns None, or the reason for refusing it.

        Its arguments are name, role, meta (`meta["site"]` is the site of the key, or as claimed if there are no keys)
        and the site of the key (None: no keys).
        """
        self.admit_inside: Admit | None = None
        """Decides on each hello from inside, by name, role, meta and the process that has the key (None: no keys)."""
        self.read_state: Callable[[Speaker, dict[str, Any]], dict[str, Any]] | None = None
        """Returns what is kept of the state in a heartbeat; one for which it raises `MalformedMessage` is refused."""
        self.can_lose: Callable[[Speaker], bool] = lambda speaker: False
        """Says whether the owner can do without a peer that has fallen silent; if so, its silence ends nothing."""
        self.passing: Callable[[Speaker], bool] = lambda speaker: False
        """Says whether a peer comes and goes, as a command does, and is forgotten if it falls silent."""
        self.forwards_hellos = False
        """Whether the owner gets a delivery of kind "hello" for each new session of a peer."""
        self.refused_peers = 0
        """Hellos that were refused."""
        self.misplaced = 0
        """Messages dropped because the connection's key was not the one with which its peer had said hello."""
        self._budgets: dict[tuple[Repeated, str | None], Budget] = {}
        """What other sites may still send of each kind, by the site of the key (None: there are no keys)."""
        self._doors: list[Door] = []
        self._routes: dict[PeerRoute, Peer] = {}
        self._ended: deque[tuple[str, str]] = deque(maxlen=MOST_ENDED)
        """Names and sessions of forgotten peers: what was in flight to them is lost, so none may go on."""
        self._left: dict[str, tuple[int, int]] = {}
        """Bytes from and to forgotten peers of other sites, by name: whoever has the name next counts on from there."""
        self._joined = asyncio.Event()
        self._beat_at = time.monotonic()
        """Last time the peers were checked, in monotonic seconds."""

    @property
    def refused_keys(self) -> int:
        """Handshakes with an unknown key."""
        return sum(door.keys.refused for door in self._doors if door.keys is not None)

    def refused(self) -> dict[str, dict[str, int]]:
        """Return the numbers of all refusals, by cause and peer."""
        keys = {"unknown key": {STRANGER: self.refused_keys}} if self.refused_keys else {}
        return keys | self.refusals.by_cause()

    def bind(self, address: str, security: ServerSecurity | None = None) -> Self:
        """Bind an address such as 'ipc:///tmp/x' for peers inside the site; needs a running event loop.

        Without `security` nothing is encrypted, and whoever reaches the address is inside; so only Unix sockets and the
        loopback interface do without.

        Raises:
            RunFailed: the address cannot be bound, or others reach it and there is no `security`.
        """
        if security is None and not stays_on_machine(address):
            raise RunFailed(f"{self.name} cannot listen on {address} without keys: other machines could reach it")
        return self._open(address, security)

    def bind_outside(self, address: str, security: ServerSecurity | None) -> Self:
        """Bind an address for peers of other sites.

        Without `security` nothing is encrypted, and the sites that peers claim are believed.

        Raises:
            RunFailed: the address cannot be bound, or there is an outer door already.
        """
        if any(door.outside for door in self._doors):
            raise RunFailed(f"{self.name} listens to the outside already, it cannot at {address}")
        return self._open(address, security, outside=True)

    def _open(self, address: str, security: ServerSecurity | None, outside: bool = False) -> Self:
        door = make_door(self._context, f"{self.session}-{len(self._doors)}", security, outside)
        try:
            with contextlib.suppress(OSError):  # the name of a network interface, which libzmq knows; or an error there
                door.socket.setsockopt(zmq.IPV6, needs_ipv6(address))
            door.socket.bind(address)
        except zmq.ZMQError as error:
            door.socket.close(0)
            if door.keys is not None:
                unguard(self._context, door.domain)
            raise RunFailed(f"{self.name} cannot listen on {address}: {error}") from error
        if not self._doors:
            self.beside(self._beat())
        self._doors.append(door)
        self.beside(self._read(door))
        return self

    async def wait_for(
        self, names: set[str], limit_s: float, missing_are: Callable[[list[str]], None] = lambda missing: None
    ) -> None:
        """Wait until all these peers have said hello, at most `limit_s` seconds for each next one.

        Other peers that come, such as commands of the operator, do not renew the wait. `missing_are` gets the missing
        names at the start and after each arrival of one, while there are any.

        Raises:
            DeadlineExpired: no further peer came in time; the message names those missing.
        """
        while missing := names - self.peers.keys():
            missing_are(sorted(missing))
            async with self.waits.deadline(f"{', '.join(sorted(missing))} to start", limit_s):
                while missing.isdisjoint(self.peers):
                    self._joined.clear()
                    await self._joined.wait()

    def silent_for(self, name: str) -> float:
        """Return the seconds since the last message of a peer, less those in which this process itself stood still.

        Messages that came during a standstill lie unread in the socket.
        """
        now = time.monotonic()
        return max(0.0, now - self.peers[name].last_seen - self._stalled(now))

    def _stalled(self, now: float) -> float:
        """Return the seconds by which the next check of the peers is overdue."""
        return max(0.0, now - self._beat_at - endpoint_base.HEARTBEAT_S)

    async def send(
        self,
        peer: str,
        kind: str,
        body: dict[str, Any] | None = None,
        arrays: Arrays | None = None,
        limit_s: float | None = None,
        on_ack: Callable[[], None] | None = None,
    ) -> None:
        """Send one reliable message, waiting for a credit if needed; `on_ack` is called once the peer has committed it.

        Raises:
            DeadlineExpired: the peer acknowledged nothing for `limit_s` seconds (by default 300, or as long as it may
                be away, if that is more).
            KeyError: there is no such peer.
        """
        while not (target := self.peers[peer]).outbox.has_credit:
            target.credit.clear()
            limit = target.flow.send_limit_s if limit_s is None else limit_s
            async with self.waits.deadline(f"{peer} to acknowledge messages", limit):
                await target.credit.wait()
        self._to(target, self._outgoing(target.outbox, kind, body, arrays, on_ack).frames)

    def _to(self, peer: Peer, frames: Frames) -> None:
        """Send frames to a peer; an unreachable one is no error, as the outbox keeps what matters."""
        if peer.route is not None and self._answer(peer.route, frames):
            peer.bytes_out += size_of(frames)

    def _answer(self, route: PeerRoute, frames: Frames) -> bool:
        return send_now(route.door.socket, [route.routing_id, *frames])

    async def _read(self, door: Door) -> None:
        for count in itertools.count(1):
            if count % endpoint_base.YIELD_EVERY == 0:
                await asyncio.sleep(0)
            if door.keys is None:
                routing_id, *frames = await door.socket.recv_multipart()
                self._arrived(PeerRoute(door, routing_id), frames, None)
            else:
                first, *others = await door.socket.recv_multipart(copy=False)
                owner = door.keys.owner_of(first)
                self._arrived(PeerRoute(door, first.bytes), [frame.buffer.toreadonly() for frame in others], owner)

    def _arrived(self, route: PeerRoute, frames: list[Any], owner: str | None) -> None:
        """Handle one message of any form; `owner` has the connection's key: a site, or at an inner door a process."""
        peer = self._routes.get(route)
        if route.door.keys is not None and (owner is None or (peer is not None and peer.owner != owner)):
            self.misplaced += 1
            at = "a connection without a name" if peer is None else f"the connection of {peer.name!r}"
            self.refusals.count("wrong key", key_of(route, owner) or STRANGER, f"a message on {at}")
            return
        if peer is not None:
            peer.bytes_in += size_of(frames)
        if peer is not None and route.door.outside and (peer.held or not self._may_unpack(frames, peer.site)):
            self._hold(peer, HeldMessage(route, frames, owner))
        elif peer is None and route.door.outside and not self._may_unpack(frames, owner):
            self._too_soon(frames, key_of(route, owner) or STRANGER)
        else:
            self._take(route, frames, owner, peer)

    def _too_soon(self, frames: list[Any], sender: str) -> None:
        size = len(frames[0]) if frames else 0
        self.refusals.count("too many", sender, f"an envelope of {size} bytes so soon after others")

    def _hold(self, peer: Peer, message: HeldMessage) -> None:
        """Keep a message of a peer of another site until its envelope may be unpacked, and all after it.

        Its sender would repeat it only much later, and what it has sent since would be taken before it.
        """
        peer.last_seen = time.monotonic()
        if not peer.held.put(message):
            self._too_soon(message.frames, peer.name)
        elif len(peer.held) == 1:
            asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._take_held, peer)

    def _take_held(self, peer: Peer) -> None:
        """Take what a peer was held up with, as far as it may be unpacked by now."""
        while peer.held and not self._closed and self.peers.get(peer.name) is peer:
            if not self._may_unpack(peer.held.first.frames, peer.site):
                asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._take_held, peer)
                return
            held = peer.held.pop()
            try:
                self._take(held.route, held.frames, held.owner, peer)
            except Exception as error:  # as one in the reading of a door: `receive` raises it
                self._inbox.put_nowait(error)
                return

    def _take(self, route: PeerRoute, frames: list[Any], owner: str | None, peer: Peer | None) -> None:
        """Unpack and handle a message; `peer` is the one of its connection."""
        try:
            if route.door.outside:
                check_size(frames, MAX_STATE_BYTES if peer is None else MAX_ENVELOPE_BYTES)
            message = decode(frames)
            if message.kind == "hello":
                self._take_hello(route, message, owner, size_of(frames))
                if peer is None and (new := self._routes.get(route)) is not None:
                    new.bytes_in += size_of(frames)
            elif peer is None or peer.session != message.session:
                self.unknown += 1
                self._answer(route, self._control("unknown"))
            else:
                peer.last_seen, peer.lost, peer.empty_connections = time.monotonic(), False, 0
                self._handle(peer, message, frames)
        except MalformedMessage as error:
            if peer is None and isinstance(error, OtherVersion):  # a link that cannot read this knows why as well
                self._answer(route, self._control("refused", {"hub": self.name, "reason": str(error)}))
            self._refuse(error, peer.name if peer is not None else key_of(route, owner) or STRANGER)

    def _handle(self, peer: Peer, message: Message, frames: list[Any]) -> None:
        if message.kind == "ack":
            if endpoint_base.take_ack(peer.outbox, self.session, message):
                peer.credit.set()
        elif message.kind == "heartbeat":
            self._heartbeat(peer, message, size_of(frames))
        elif message.kind == "bye":
            self._forget(peer)
            self._inbox.put_nowait(Delivery(peer.name, "bye", message.body, {}, lambda: None))
        else:
            self._accept(peer.inbox, peer.speaker, message, cost_of(frames), lambda answer: self._to(peer, answer))

    def _heartbeat(self, peer: Peer, message: Message, size: int) -> None:
        """Take a heartbeat, and answer it even if it is refused: its sender would take this end for dead."""
        kept = size <= MAX_STATE_BYTES
        if kept and peer.site is not None and not self.covered("heartbeat", peer.site, size):
            self.refusals.count("too many", peer.name, f"a heartbeat of {size} bytes so soon after others")
            return
        self._to(peer, self._control("heartbeat", self.state() | endpoint_base.echo_of(message, self._clock())))
        if not kept:
            raise MalformedMessage(f"heartbeat of {size} bytes, at most {MAX_STATE_BYTES}")
        peer.inbox.begin_at(message.session, first_open(message))
        state, _ = endpoint_base.take_state(message)
        peer.state = state if self.read_state is None else self.read_state(peer.speaker, state)

    def _may_unpack(self, frames: list[Any], site: str | None) -> bool:
        """Charge the envelope of a message of another site; return whether it may be unpacked now.

        One that is larger than any is not charged, as it is refused without being unpacked.
        """
        size = len(frames[0]) if frames else 0
        return size > MAX_ENVELOPE_BYTES or self.covered("envelope", site, size)

    def covered(self, kind: Repeated, site: str | None, size: int) -> bool:
        """Charge a site's message of `size` bytes; return whether it may send it now."""
        return self._budgets.setdefault((kind, site), Budget(kind)).spend(size, time.monotonic())

    def _take_hello(self, route: PeerRoute, message: Message, owner: str | None, size: int) -> None:
        """Welcome or refuse the sender of a hello; `owner` as for `_arrived`.

        Raises:
            MalformedMessage: it is no hello.
        """
        if size > MAX_STATE_BYTES:
            raise MalformedMessage(f"hello of {size} bytes, at most {MAX_STATE_BYTES}")
        hello = read_hello(message, self._clock())
        sender = key_of(route, owner) or hello.name
        if route.door.outside and not self.covered("hello", owner, size):
            self.refusals.count("too many", sender, f"a hello of {size} bytes so soon after others")
            return
        flow = self._judge(route, hello, owner)
        known = self.peers.get(hello.name)
        silent_s = self.silent_for(hello.name) if known is not None else 0.0
        late = not isinstance(flow, str) and is_late(hello, known, silent_s)
        if late:
            flow = f"another process of this name has come, which began later, and {self.name} hears it"
        if isinstance(flow, str):
            self.refused_peers += 1
            self.refusals.count("hello", sender, flow)
            self._answer(route, self._control("refused", {"hub": self.name, "reason": flow, "late": late}))
            return
        peer = known
        if peer is None or peer.session != hello.session:
            peer = self._begin_session(route, hello, owner, flow)
        peer.inbox.begin_at(hello.session, hello.first)
        before, peer.last_seen, peer.lost = peer.route, time.monotonic(), False
        if before is not None:
            self._routes.pop(before, None)
        peer.route, self._routes[route] = route, peer
        self._to(peer, self._control("welcome", {"hub": self.name}))
        if before != route:
            peer.empty_connections += 1
            self._resend(peer, 0.0)
        if known is None:
            self._joined.set()

    def _begin_session(self, route: PeerRoute, hello: Hello, owner: str | None, flow: Flow) -> Peer:
        """Return a peer with no state, in place of the one that had its name before."""
        outbox: Outbox[Outgoing] = Outbox(flow.credits, flow.window_bytes)
        site = site_of(hello, route)
        peer = Peer(hello.name, hello.role, hello.meta, hello.session, outbox, flow, site, owner, hello.begun)
        if route.door.outside:
            peer.inbox = stranger_inbox()
        if (known := self.peers.get(hello.name)) is not None:
            self._forget(known)
        peer.bytes_in, peer.bytes_out = self._left.pop(hello.name, (0, 0))
        self.peers[hello.name] = peer
        if self.forwards_hellos:
            self._inbox.put_nowait(Delivery(hello.name, "hello", {"session": hello.session}, {}, lambda: None))
        return peer

    def _judge(self, route: PeerRoute, hello: Hello, owner: str | None) -> Flow | str:
        """Return the flow to the peer of a hello, or why it is refused; `owner` as for `_arrived`."""
        spoken, known = self._routes.get(route), self.peers.get(hello.name)
        if (wrong := wrong_with_claim(hello, route, owner, spoken, known)) is not None:
            return wrong
        name, role, meta = hello.name, hello.role, hello.meta
        try:
            admit = self.admit if route.door.outside else self.admit_inside
            if admit is not None and (reason := admit(name, role, meta, owner)) is not None:
                return reason
            if (name, hello.session) in self._ended:
                return f"another process of this name has come since, or {self.name} has taken this one for dead"
            return self.flow if self.flows is None else self.flows(name)
        except Exception as error:  # no message of a stranger may end the hub
            log.exception("cannot judge the hello of %r", name)
            return f"the hello cannot be judged: {type(error).__name__}: {str(error)[:MOST_TOLD]}"

    def drop(self, name: str) -> None:
        """Forget a peer that is known to be dead, and everything in flight to it; if alive, it will be refused."""
        if (peer := self.peers.get(name)) is not None:
            self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        """End a peer's session for good; senders that wait for its credit look it up again."""
        self._ended.append((peer.name, peer.session))
        if peer.site is not None:
            self._left[peer.name] = peer.bytes_in, peer.bytes_out
        if self.peers.get(peer.name) is peer:
            del self.peers[peer.name]
        if peer.route is not None:
            self._routes.pop(peer.route, None)
            peer.route = None
        peer.credit.set()

    async def _beat(self) -> None:
        self._beat_at = time.monotonic()
        while True:
            await asyncio.sleep(endpoint_base.HEARTBEAT_S)
            now = time.monotonic()
            stalled, self._beat_at = self._stalled(now), now
            for peer in list(self.peers.values()):
                peer.last_seen += stalled
                silent = now - peer.last_seen
                if silent > FORGOTTEN_AFTER_S and self.passing(peer.speaker):  # it was killed before its goodbye
                    self._forget(peer)
                    continue
                if silent > peer.flow.lost_after_s and not peer.lost:
                    peer.lost = True
                    lost = f"{peer.name} {peer.flow.silence(silent)} (seen by {self.name})"
                    if self.can_lose(peer.speaker):
                        log.warning("%s; it is not needed", lost)
                    else:
                        self._inbox.put_nowait(PeerLost(lost))
                if silent < peer.flow.resend_s:  # a silent peer gets no repeats: they would pile up
                    self._resend(peer, peer.flow.resend_s)

    def _resend(self, peer: Peer, older_than: float) -> None:
        for _, message in peer.outbox.to_resend(time.monotonic(), older_than):
            self._to(peer, message.frames)

    async def close(self) -> None:
        """Stop serving and close all sockets; then another hub can listen on the same addresses."""
        await self._stop()
        for door in self._doors:
            await door.stop_listening()
            door.socket.close(endpoint_base.LINGER_MS)
            if door.keys is not None:
                unguard(self._context, door.domain)
