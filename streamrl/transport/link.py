"""The end that connects, and reconnects when the connection breaks.

A message goes to an existing connection or nowhere: unacknowledged messages stay in the outbox. libzmq replaces a
broken connection. The hub does not know the new one and answers the first message with `unknown`; the link then says
hello again, and after the welcome resends everything unacknowledged, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable
from typing import Any, NoReturn, Self

import zmq
import zmq.asyncio

from streamrl.errors import SEE_DOCS, ErrorCode
from streamrl.transport import endpoint_base
from streamrl.transport.clock import ClockSync
from streamrl.transport.curve import ClientSecurity
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.delivery import Inbox, Outbox
from streamrl.transport.endpoint_base import Endpoint, Frames, Outgoing, PeerLost, Refused, cost_of, send_now, size_of
from streamrl.transport.flow import Flow
from streamrl.transport.ip_addresses import needs_ipv6
from streamrl.transport.name_lookup import NameLookup
from streamrl.transport.peer import HANDSHAKE_MS, STRANGERS_HANDSHAKE_MS
from streamrl.transport.refusals import merged
from streamrl.transport.wire import MAX_FRAME_BYTES, Arrays, MalformedMessage, Message, OtherVersion, decode, is_finite

log = logging.getLogger(__name__)

HELLO_S = 1.0
"""Seconds after which an unanswered hello is repeated."""
FIRST_BEATS = 10
"""First heartbeats, sent ten times as often, so that clocks are compared well before the first sample is timed."""
PING_S = 5.0
"""Seconds between ZMTP pings, which the hub's I/O thread answers however busy its process is."""
DEAD_AFTER_S = 30.0
"""Seconds without an answer to a ping (or as long as a full window may take) after which libzmq reconnects. Nothing
counts as one before it has arrived as a whole.

A firewall that has forgotten a connection does not close it.
"""
LONGEST_DEAD_S = 6500.0
"""Largest time to live in seconds: ZMTP carries it in 16 bits of deciseconds."""
RECONNECT_MAX_MS = 2000
"""Most milliseconds between two attempts to connect to another site."""
CONNECT_MS = 5000
"""Limit of an attempt to connect by TCP, in milliseconds. The system repeats an unanswered attempt ever later, so that
it would notice up to a minute late that a link is back."""
LOOK_UP_S = 5.0
"""Seconds between two look-ups of the name of a silent hub."""
LOOK_UP_LIMIT_S = 10.0
"""Seconds after which a name server that has not answered counts as silent; resolvers try for up to a minute."""


class Link(Endpoint):
    """The end that connects a DEALER socket to a hub, under a name.

    Args:
        name, role, meta: contents of the hello; `meta["site"]` is required at the outer door of a hub.
        waits: where waits are registered.
        flow: flow to the hub.
        clock: returns unix seconds; compared with the hub's.
        inbox: limits of what the hub may have open here; None: there are none.
        outside: whether the hub is at another site.
        largest_s: seconds that the largest message may take to arrive.
    """

    def __init__(
        self,
        name: str,
        role: str,
        waits: WaitRegistry,
        meta: dict[str, Any] | None = None,
        *,
        flow: Flow | None = None,
        clock: Callable[[], float] = time.time,
        inbox: Inbox | None = None,
        outside: bool = False,
        largest_s: float = 0.0,
    ) -> None:
        super().__init__(name, waits, flow, clock)
        self._outside, self._largest_s = outside, largest_s
        self.role = role
        self.meta = meta or {}
        self._begun = clock()
        self.clock = ClockSync()
        """Estimate of the hub's clock relative to this process's."""
        self.bytes_in = 0
        """Bytes of all frames from the hub."""
        self.bytes_out = 0
        """Bytes of all frames handed to libzmq."""
        self.empty_connections = 0
        """Connections in a row over which the hub has answered the hello, and nothing else has come."""
        self.on_new_hub: Callable[[], None] | None = None
        """Called when the hub is a new process, before anything is sent to it or received from it.

        An error that it raises ends this link, and the hub gets nothing of what was sent.
        """
        self.reports: list[Endpoint] = [self]
        """Endpoints of this process whose refusals its heartbeats report."""
        self.hub_state: dict[str, Any] = {}
        """State in the hub's last heartbeat."""
        self._socket = self._context.socket(zmq.DEALER)
        self._outbox: Outbox[Outgoing] = Outbox(self.flow.credits, self.flow.window_bytes)
        self._inbox_state = inbox or Inbox()
        self._credit = asyncio.Event()
        self._all_acknowledged = asyncio.Event()
        self._answered = asyncio.Event()
        """Set once the first hello has been answered, by a welcome or a refusal."""
        self._refusal: Refused | None = None
        self._late_until = 0.0
        """Monotonic seconds until which the hub is asked again if it takes this process for a late one."""
        self._hub_session = ""
        self._hello_at: float | None = 0.0
        """Time of the unanswered hello (monotonic seconds); None: the hub has answered."""
        self._last_seen = time.monotonic()
        self._address = ""
        self._dialled = ""
        """What libzmq connects to: the address with an IP address in place of a name."""
        self._names = NameLookup("")
        self._hub = ""
        """Name and address of the hub, for errors and waits."""

    @property
    def silent_for(self) -> float:
        """Seconds since the last message of the hub."""
        return time.monotonic() - self._last_seen

    @property
    def unresolved(self) -> str:
        """Why the name of a silent hub has no IP address, in words; '': it has one, or the hub is heard."""
        return self._names.trouble if self._is_silent else ""

    @property
    def _is_silent(self) -> bool:
        return self.silent_for > endpoint_base.heard_s()

    def hub_time(self) -> float:
        """Return the hub's clock now, in unix seconds; this process's own until they have been compared."""
        return self.clock.to_hub_time(self._clock())

    async def connect(
        self, address: str, limit_s: float = 300, security: ClientSecurity | None = None, hub: str = "the hub"
    ) -> Self:
        """Connect, encrypted if `security` is given, and say hello until the hub answers.

        Args:
            address: address of the hub.
            limit_s: seconds to wait for its answer.
            security: the keys of both ends.
            hub: what errors and waits call the hub.

        Raises:
            DeadlineExpired: no answer in time.
            Refused: the hub refuses this process.
        """
        self._address, self._hub = address, f"{hub} at {address}"
        self._configure(security)
        hint = f" (it answers only if each side has the other's present key; {SEE_DOCS}{ErrorCode.KEYS})"
        # a predecessor that has just died, and began later by a clock that was set back since, is silent by then
        self._late_until = time.monotonic() + min(2 * endpoint_base.heard_s(), limit_s / 2)
        waiting_for = ""
        async with self.waits.deadline(lambda: waiting_for, limit_s):
            waiting_for = f"the name of {self._hub} to have an IP address"
            self._names = NameLookup(address)
            while (numeric := await self._names.numeric(LOOK_UP_LIMIT_S)) is None:
                await asyncio.sleep(HELLO_S)
            waiting_for = f"an answer of {self._hub}{hint if security is not None else ''}"
            self._dial(numeric)
            self.beside(self._read())
            if self._names.needed:
                self.beside(self._follow_name())
            while not self._answered.is_set():
                hello = self._hello()
                await self._socket.send_multipart(hello)  # waits until there is a connection
                self.bytes_out += size_of(hello)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._answered.wait(), HELLO_S)
        if self._refusal is not None:
            raise self._refusal
        self._last_seen = time.monotonic()
        self.beside(self._beat())
        return self

    def _dial(self, numeric: str) -> None:
        """Let libzmq connect to this address, in place of another one if there is any."""
        if self._dialled:
            self._socket.disconnect(self._dialled)
        if numeric.startswith("tcp://"):
            self._socket.setsockopt(zmq.IPV6, needs_ipv6(numeric))
        self._socket.connect(numeric)
        self._dialled = numeric

    async def _follow_name(self) -> None:
        """Look the name of a silent hub up again and again, and connect to its new IP address if it has another one.

        If the look-up fails, the old address may still be the right one.
        """
        named = False
        while True:
            await asyncio.sleep(LOOK_UP_S)
            if not self._is_silent:
                named = False
                continue
            numeric = await self._names.numeric(LOOK_UP_LIMIT_S)
            if self._names.trouble and not named:  # once in each silence, as the reasons of resolvers change
                log.warning("%s is silent, and %s", self._hub, self._names.trouble)
                named = True
            if numeric not in (None, self._dialled) and self._is_silent:
                log.warning("%s is silent, and now has the address %s", self._hub, numeric)
                self._dial(numeric)

    def _configure(self, security: ClientSecurity | None) -> None:
        dead_ms = int(min(max(DEAD_AFTER_S, self.flow.resend_s, self._largest_s), LONGEST_DEAD_S) * 1000)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a connection that does not exist yet
        self._socket.setsockopt(zmq.LINGER, endpoint_base.LINGER_MS)  # also of a connection to an earlier address
        self._socket.setsockopt(zmq.SNDHWM, 0)  # credits bound what is in flight
        most = self._inbox_state.most_open
        self._socket.setsockopt(zmq.RCVHWM, int(most) if math.isfinite(most) else 0)
        if self._address.startswith("tcp://"):  # as at a hub's doors
            self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            self._socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, int(PING_S * 1000))
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, dead_ms)
        self._socket.setsockopt(zmq.HEARTBEAT_TTL, dead_ms)  # so that the hub drops its half, and what it has queued
        if self._outside or security is not None:
            self._socket.setsockopt(zmq.HANDSHAKE_IVL, STRANGERS_HANDSHAKE_MS if self._outside else HANDSHAKE_MS)
        if security is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, security.server)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, security.own.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, security.own.secret)
            self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)

    async def send(
        self,
        kind: str,
        body: dict[str, Any] | None = None,
        arrays: Arrays | None = None,
        limit_s: float | None = None,
        on_ack: Callable[[], None] | None = None,
    ) -> None:
        """Send one reliable message, waiting for a credit if needed; `on_ack` is called once the hub has committed it.

        Raises:
            DeadlineExpired: the hub acknowledged nothing for `limit_s` seconds (by default 300, or as long as it may
                be away, if that is more).
            Refused: the hub now refuses this process.
        """
        limit = self.flow.send_limit_s if limit_s is None else limit_s
        while not self._outbox.has_credit and self._refusal is None:
            self._credit.clear()
            async with self.waits.deadline(f"{self._hub} to acknowledge messages", limit):
                await self._credit.wait()
        if self._refusal is not None:
            raise self._refusal
        self._all_acknowledged.clear()
        self._transmit(self._outgoing(self._outbox, kind, body, arrays, on_ack))

    def forget_sent(self) -> None:
        """Give up on everything unacknowledged: it was meant for another process."""
        self._outbox.forget()
        self._credit.set()
        self._all_acknowledged.set()

    async def flush(self, limit_s: float) -> None:
        """Wait until everything sent is acknowledged.

        Raises:
            DeadlineExpired: the hub did not acknowledge everything in time.
            Refused: the hub now refuses this process.
        """
        async with self.waits.deadline(f"{self._hub} to acknowledge all messages", limit_s):
            while self._outbox.pending and self._refusal is None:
                await self._all_acknowledged.wait()
        if self._refusal is not None:
            raise self._refusal

    def _transmit(self, message: Outgoing) -> None:
        if self._hello_at is None:  # else the welcome sends it
            self._put(message.frames)

    def _put(self, frames: Frames) -> None:
        if send_now(self._socket, frames):
            self.bytes_out += size_of(frames)

    def _hello(self) -> Frames:
        self._hello_at = time.monotonic()
        about = {"name": self.name, "role": self.role, "meta": self.meta, "begun": self._begun}
        return self._control("hello", about | {"first": self._outbox.first})

    async def _read(self) -> None:
        for count in itertools.count(1):
            if count % endpoint_base.YIELD_EVERY == 0:
                await asyncio.sleep(0)
            self._arrived(await self._socket.recv_multipart())

    def _arrived(self, frames: list[Any]) -> None:
        """Handle one message of any form.

        Raises:
            Refused: the hub refuses this process.
        """
        self.bytes_in += size_of(frames)
        try:
            message = decode(frames)
            self._last_seen = time.monotonic()
            if message.kind in ("welcome", "unknown", "refused"):
                self._met(message)
            elif message.session != self._hub_session:
                self.unknown += 1  # from an earlier session of the hub
            else:
                self.empty_connections = 0
                self._handle(message, cost_of(frames))
        except MalformedMessage as error:
            self._refuse(error, "hub")
            if isinstance(error, OtherVersion):
                self._met_another_version(error)

    def _met(self, message: Message) -> None:
        """Handle a hub's answer to a hello, or to a connection that it does not know."""
        if message.kind == "welcome":
            if self._hello_at is None:
                return  # the answer to a repeated hello
            another = self._hub_session not in ("", message.session)
            self._hub_session = message.session
            self.empty_connections = 1 if another else self.empty_connections + 1
            if another and self.on_new_hub is not None:
                self.on_new_hub()
            self._hello_at = None
            self._answered.set()
            for _, unacknowledged in self._outbox.to_resend(time.monotonic(), 0.0):
                self._transmit(unacknowledged)
        elif message.kind == "unknown":
            if self._hello_at is None or time.monotonic() - self._hello_at > HELLO_S:
                self._put(self._hello())  # the hub was restarted, or this is a new connection
        elif not message.body.get("late") or time.monotonic() > self._late_until:  # else `connect` says hello again
            hub, reason = message.body.get("hub"), message.body.get("reason")
            self._end(f"{hub} at {self._address} refuses {self.name}: {reason}")

    def _met_another_version(self, error: OtherVersion) -> None:
        """Handle a message of a hub of another version of the protocol.

        Raises:
            Refused: it is the answer to a hello.
        """
        if self._hello_at is not None:
            self._end(ErrorCode.SITES.refer(f"{self._hub} and {self.name} need the same streamrl: {error}"))
        self._put(self._hello())  # as to one that does not know this connection

    def _end(self, why: str) -> NoReturn:
        """End this link for good.

        Raises:
            Refused: always, with the reason.
        """
        self._refusal = Refused(why)
        for event in (self._answered, self._credit, self._all_acknowledged):
            event.set()
        for task in self._tasks[1:]:
            task.cancel()  # no heartbeats to a hub that refuses them
        raise self._refusal

    def _handle(self, message: Message, size: int) -> None:
        if message.kind == "heartbeat":
            self.hub_state, times = endpoint_base.take_state(message)
            sent, hub = times.get("sent"), times.get("hub")
            if is_finite(sent) and is_finite(hub):
                self.clock.add(sent, hub, self._clock())
        elif message.kind == "ack":
            if endpoint_base.take_ack(self._outbox, self.session, message):
                self._credit.set()
                if not self._outbox.pending:
                    self._all_acknowledged.set()
        else:
            self._accept(self._inbox_state, endpoint_base.HUB, message, size, self._put)

    async def _beat(self) -> None:
        last = time.monotonic()
        for beat in itertools.count():
            pause = endpoint_base.HEARTBEAT_S / (1 if beat >= FIRST_BEATS else 10)
            told = self.state()
            waits = [*self.waits.snapshot(), *told.get("waits", ())]
            waits = [wait | {"since": self.clock.to_hub_time(wait["since"])} for wait in waits]
            own = {"waits": waits, "malformed": self.malformed}
            own["refused"] = merged(one.refused() for one in self.reports)
            clocks = {"clock_offset_s": self.clock.offset_s, "rtt_s": self.clock.rtt_s}
            links = {"clock": {"sent": self._clock()}, "first": self._outbox.first}
            self._put(self._control("heartbeat", told | own | clocks | links))
            await asyncio.sleep(pause)
            now = time.monotonic()
            self._last_seen += max(0.0, now - last - pause)  # a standstill of this process is not silence of the hub
            last = now
            silent = now - self._last_seen
            if silent > self.flow.lost_after_s:
                unresolved = f"; {self.unresolved}" if self.unresolved else ""
                raise PeerLost(f"{self._hub} {self.flow.silence(silent)}{unresolved}")
            if silent < self.flow.resend_s:  # a silent hub gets no repeats: they would pile up
                for _, message in self._outbox.to_resend(now, self.flow.resend_s):
                    self._transmit(message)

    async def close(self) -> None:
        """Say goodbye and close."""
        if self._answered.is_set() and self._refusal is None and not self._closed:
            self._put(self._control("bye"))
        await self._stop()
        self._socket.close(endpoint_base.LINGER_MS)
