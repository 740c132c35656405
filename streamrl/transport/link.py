"""The end that connects, and connects again when the connection breaks.

Sends go to a connection that is there, or nowhere: what is not acknowledged stays in the outbox. A broken connection is
made anew by libzmq. The hub does not know the new one and says so at the first message; the link then says hello
again, and when it is welcome sends what is unacknowledged, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable
from typing import Any, Self

import zmq
import zmq.asyncio

from streamrl.transport import endpoint_base
from streamrl.transport.clock import ClockSync
from streamrl.transport.curve import ClientSecurity
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.delivery import Inbox, Outbox
from streamrl.transport.endpoint_base import Endpoint, Frames, Outgoing, PeerLost, Refused, send_now, size_of
from streamrl.transport.flow import Flow
from streamrl.transport.wire import Arrays, MalformedMessage, Message, decode, is_time

HELLO_S = 1.0
"""An unanswered hello is repeated after this long."""
FIRST_BEATS = 10
"""Heartbeats that come ten times as often, so that clocks are compared well before the first sample is timed."""
PING_S = 5.0
"""ZMTP pings, answered by the hub's I/O thread however busy its process is."""
DEAD_AFTER_S = 30.0
"""No answer to a ping for so long (or as long as a full window may take): the connection is made anew. A firewall that
has forgotten a connection does not end it."""
LONGEST_DEAD_S = 6500.0
"""ZMTP carries a time to live in 16 bits of deciseconds."""
RECONNECT_MAX_MS = 2000
"""Attempts to reach another site, or to be let in there, are at most this far apart."""


class Link(Endpoint):
    """Connects a DEALER to a Hub under a name.

    Args:
        name, role, meta: what the hello says; `meta["site"]` is needed at the outer door of a hub.
        waits: where waits are registered.
        lost_after_s, credits: of the flow to the hub, unless `flow` is given.
        clock: Unix seconds; compared with the hub's.
    """

    def __init__(
        self,
        name: str,
        role: str,
        waits: WaitRegistry,
        meta: dict[str, Any] | None = None,
        lost_after_s: float = 60.0,
        credits: int = 256,
        *,
        flow: Flow | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(name, waits, flow or Flow(credits=credits, lost_after_s=lost_after_s), clock)
        self.role = role
        self.meta = meta or {}
        self.clock = ClockSync()
        """The hub's clock against this process's."""
        self.bytes_in = 0
        """Bytes of all frames from the hub."""
        self.bytes_out = 0
        """Bytes of all frames handed to libzmq."""
        self.on_new_hub: Callable[[], None] | None = None
        """Called when the hub is another process than before, ere anything is sent to it or received from it."""
        self.hub_state: dict[str, Any] = {}
        """What the hub's last heartbeat said."""
        self._socket = self._context.socket(zmq.DEALER)
        self._outbox: Outbox[Outgoing] = Outbox(self.flow.credits, self.flow.window_bytes)
        self._inbox_state = Inbox()
        self._credit = asyncio.Event()
        self._all_acknowledged = asyncio.Event()
        self._answered = asyncio.Event()
        """The first hello was answered, one way or the other."""
        self._refusal: Refused | None = None
        self._hub_session = ""
        self._hello_at: float | None = 0.0
        """When the hello was said that the hub has not answered (monotonic seconds); None: it has."""
        self._last_seen = time.monotonic()
        self._address = ""

    @property
    def silent_for(self) -> float:
        """Seconds since the last sign of life of the hub."""
        return time.monotonic() - self._last_seen

    async def connect(self, address: str, limit_s: float = 300, security: ClientSecurity | None = None) -> Self:
        """Connects, encrypted if there is `security`, and says hello until the hub answers.

        Raises:
            DeadlineExpired: no answer in time.
            Refused: the hub does not let this process in.
        """
        self._address = address
        self._configure(security)
        self._socket.connect(address)
        self._start(self._read())
        hint = " (it answers only if each side has the other's present key)" if security is not None else ""
        async with self.waits.deadline(f"an answer of the hub at {address}{hint}", limit_s):
            while not self._answered.is_set():
                hello = self._hello()
                await self._socket.send_multipart(hello)  # waits until there is a connection
                self.bytes_out += size_of(hello)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._answered.wait(), HELLO_S)
        if self._refusal is not None:
            raise self._refusal
        self._last_seen = time.monotonic()
        self._start(self._beat())
        return self

    def _configure(self, security: ClientSecurity | None) -> None:
        dead_ms = int(min(max(DEAD_AFTER_S, self.flow.resend_s), LONGEST_DEAD_S) * 1000)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a connection that is not there
        self._socket.setsockopt(zmq.SNDHWM, 0)  # credits bound what is under way
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, int(PING_S * 1000))
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, dead_ms)
        self._socket.setsockopt(zmq.HEARTBEAT_TTL, dead_ms)  # so the hub drops its half, and what is queued there
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
        """Sends one reliable message, waiting for a credit if needed; `on_ack` is called once it is committed there.

        Raises:
            DeadlineExpired: the hub acknowledged nothing for `limit_s` seconds (by default 300, or as long as it may
                be away, if that is more).
            Refused: the hub no longer lets this process in.
        """
        limit = self.flow.send_limit_s if limit_s is None else limit_s
        while not self._outbox.has_credit and self._refusal is None:
            self._credit.clear()
            async with self.waits.deadline(f"the hub at {self._address} to acknowledge messages", limit):
                await self._credit.wait()
        if self._refusal is not None:
            raise self._refusal
        self._all_acknowledged.clear()
        _, message = self._outgoing(self._outbox, kind, body, arrays, on_ack)
        self._transmit(message)

    def forget_sent(self) -> None:
        """Gives up on what is not acknowledged: it was meant for another process."""
        self._outbox.forget()
        self._credit.set()
        self._all_acknowledged.set()

    async def flush(self, limit_s: float) -> None:
        """Waits until everything sent is acknowledged.

        Raises:
            DeadlineExpired: it was not in time.
            Refused: the hub no longer lets this process in.
        """
        async with self.waits.deadline(f"the hub at {self._address} to acknowledge all messages", limit_s):
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
        return self._control("hello", {"name": self.name, "role": self.role, "meta": self.meta})

    async def _read(self) -> None:
        for count in itertools.count(1):
            if count % endpoint_base.YIELD_EVERY == 0:
                await asyncio.sleep(0)
            self._arrived(await self._socket.recv_multipart())

    def _arrived(self, frames: list[Any]) -> None:
        """Handles one message, whatever it is.

        Raises:
            Refused: the hub does not let this process in.
        """
        self.bytes_in += size_of(frames)
        try:
            message = decode(frames)
            self._last_seen = time.monotonic()
            if message.kind in ("welcome", "unknown", "refused"):
                self._met(message)
            elif message.session != self._hub_session:
                self.unknown += 1  # of an earlier life of the hub
            else:
                self._handle(message)
        except MalformedMessage as error:
            self._refuse(error)

    def _met(self, message: Message) -> None:
        """What a hub says to a connection of which it knows nothing, or that has just said hello."""
        if message.kind == "welcome":
            if self._hello_at is None:
                return  # of a hello that was repeated
            another = self._hub_session not in ("", message.session)
            self._hello_at, self._hub_session = None, message.session
            if another and self.on_new_hub is not None:
                self.on_new_hub()
            self._answered.set()
            for _, unacknowledged in self._outbox.to_resend(time.monotonic(), 0.0):
                self._transmit(unacknowledged)
        elif message.kind == "unknown":
            if self._hello_at is None or time.monotonic() - self._hello_at > HELLO_S:
                self._put(self._hello())  # the hub was restarted, or this is a new connection
        else:
            hub, reason = message.body.get("hub"), message.body.get("reason")
            self._refusal = Refused(f"{hub} at {self._address} refuses {self.name}: {reason}")
            for event in (self._answered, self._credit, self._all_acknowledged):
                event.set()
            for task in self._tasks[1:]:
                task.cancel()  # no beats to a hub that does not want them
            raise self._refusal

    def _handle(self, message: Message) -> None:
        if message.kind == "heartbeat":
            self.hub_state, times = endpoint_base.take_state(message)
            sent, hub = times.get("sent"), times.get("hub")
            if is_time(sent) and is_time(hub):
                self.clock.add(sent, hub, self._clock())
        elif message.kind == "ack":
            if endpoint_base.take_ack(self._outbox, self.session, message):
                self._credit.set()
                if not self._outbox.pending:
                    self._all_acknowledged.set()
        elif message.number == 0:
            self._deliver("hub", "hub", message, lambda: None)
        else:
            verdict = self._inbox_state.receive(message.session, message.number)
            if verdict == "new":
                ack = self._ack_function(message.session, message.number)
                self._deliver("hub", "hub", message, ack)
            elif verdict == "committed":
                self._put(self._ack(message.session, message.number))

    def _ack(self, session: str, number: int) -> Frames:
        return self._control("ack", {"n": number, "s": session})

    def _ack_function(self, session: str, number: int) -> Callable[[], None]:
        def ack() -> None:
            if self._inbox_state.commit(session, number):
                self._put(self._ack(session, number))

        return ack

    async def _beat(self) -> None:
        last = time.monotonic()
        for beat in itertools.count():
            pause = endpoint_base.HEARTBEAT_S / (1 if beat >= FIRST_BEATS else 10)
            own = {"waits": self.waits.snapshot(), "malformed": self.malformed}
            clocks = {"clock_offset_s": self.clock.offset_s, "rtt_s": self.clock.rtt_s}
            self._put(self._control("heartbeat", self.state() | own | clocks | {"clock": {"sent": self._clock()}}))
            await asyncio.sleep(pause)
            now = time.monotonic()
            self._last_seen += max(0.0, now - last - pause)  # our own standstill is not the hub's silence
            last = now
            silent = now - self._last_seen
            if silent > self.flow.lost_after_s:
                raise PeerLost(f"the hub at {self._address} has been silent for {silent:.0f} s")
            if silent < self.flow.resend_s:  # into silence nothing is repeated: it would pile up
                for _, message in self._outbox.to_resend(now, self.flow.resend_s):
                    self._transmit(message)

    async def close(self) -> None:
        """Says goodbye and closes."""
        if self._answered.is_set() and self._refusal is None and not self._closed:
            self._put(self._control("bye"))
        await self._stop()
        self._socket.close(endpoint_base.LINGER_MS)
