"""ZeroMQ endpoints: a `Hub` (ROUTER, binds) that many `Link`s (DEALER, connect) talk to.

Both give reliable messages with credits and acknowledgements (`delivery.py`) and heartbeats that carry the peer's
state. A message comes out of `receive()` as a `Delivery`; whoever handles it calls `ack()` once it is committed.

Kinds handled in here: hello, welcome, unknown, heartbeat, ack, bye. All others go to the owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Self

import zmq
import zmq.asyncio

from streamrl.errors import RunFailed
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.delivery import Inbox, Outbox
from streamrl.transport.wire import Arrays, MalformedMessage, Message, decode, encode

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
RESEND_S = 20.0
"""Unacknowledged for this long: sent again. Above any commit's time; a reconnect resends at once."""
DEFAULT_CREDITS = 256
LINGER_MS = 500


@dataclass(frozen=True)
class Outgoing:
    """A reliable message until it is acknowledged."""

    kind: str
    body: dict[str, Any]
    arrays: Arrays
    on_ack: Callable[[], None] | None = None
    """Called when the receiver has committed it."""

    def frames(self, session: str, number: int) -> list[bytes | memoryview]:
        """Encoded frames."""
        return encode(Message(self.kind, session, number, self.body, dict(self.arrays)))


class PeerLost(RunFailed):
    """A peer has been silent for longer than the limit."""


class _Endpoint:
    """What Hub and Link share: one socket, a reader task, a heartbeat task, a queue of deliveries."""

    def __init__(self, name: str, waits: WaitRegistry, lost_after_s: float, credits: int) -> None:
        self.name = name
        self.session = secrets.token_hex(8)
        self.waits = waits
        self.lost_after_s = lost_after_s
        self.credits = credits
        self.malformed = 0
        """Messages refused because they were not of this protocol."""
        self.unknown = 0
        """Well-formed messages from peers that had not said hello."""
        self.state: Callable[[], dict[str, Any]] = dict
        """Called for every heartbeat: what this process tells of itself."""
        self._inbox: asyncio.Queue[Delivery | BaseException] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._context = zmq.asyncio.Context.instance()
        self._sends: set[asyncio.Task[None]] = set()
        self._closed = False

    def _start(self, *loops: Any) -> None:
        for loop in loops:
            task = asyncio.ensure_future(loop)
            task.add_done_callback(self._task_done)
            self._tasks.append(task)

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a short send in the background (the loop itself keeps no reference to a task)."""
        task = asyncio.ensure_future(work)
        self._sends.add(task)
        task.add_done_callback(self._sends.discard)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._closed:
            self._inbox.put_nowait(error)

    def _refuse(self, error: MalformedMessage) -> None:
        """Counts a malformed message; logs the 1st, 10th, 100th ..., so that a flood of them is no flood of lines."""
        self.malformed += 1
        if str(self.malformed).strip("0") == "1":
            log.warning("refused %d malformed messages so far; this one: %s", self.malformed, error)

    async def receive(self) -> Delivery:
        """The next message for the owner. Idle waiting is watched by heartbeats: it ends with PeerLost.

        Raises:
            PeerLost: a peer fell silent.
        """
        item = await self._inbox.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def receive_now(self) -> Delivery | None:
        """A message that is already here, or None."""
        if self._inbox.empty():
            return None
        item = self._inbox.get_nowait()
        if isinstance(item, BaseException):
            raise item
        return item

    async def _close(self, socket: zmq.asyncio.Socket) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        socket.close(LINGER_MS)


@dataclass
class Peer:
    """A Hub's view of one Link."""

    name: str
    role: str
    meta: dict[str, Any]
    session: str
    outbox: Outbox[Outgoing]
    inbox: Inbox = field(default_factory=Inbox)
    last_seen: float = 0.0
    """Monotonic seconds."""
    state: dict[str, Any] = field(default_factory=dict)
    lost: bool = False
    credit: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class Delivery:
    """A message for the owner, with the way to acknowledge it."""

    peer: str
    kind: str
    body: dict[str, Any]
    arrays: Arrays
    ack: Callable[[], None]
    """To be called once, after the commit."""


def _name(identity: bytes) -> str:
    """A peer's name; ZeroMQ's own random identities need not be UTF-8, and must map back."""
    return identity.decode("utf-8", "surrogateescape")


def _identity(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _acknowledged(outbox: Outbox[Outgoing], ack: Message) -> Outgoing | None:
    number = ack.body.get("n")
    return outbox.acknowledged(number) if isinstance(number, int) else None


class Hub(_Endpoint):
    """Binds a ROUTER; peers are known by the name in their hello."""

    def __init__(
        self, name: str, waits: WaitRegistry, lost_after_s: float = 60.0, credits: int = DEFAULT_CREDITS
    ) -> None:
        super().__init__(name, waits, lost_after_s, credits)
        self.peers: dict[str, Peer] = {}
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # credits bound what is under way
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._joined = asyncio.Condition()

    def bind(self, address: str) -> Self:
        """Binds e.g. 'tcp://127.0.0.1:5555' and starts serving; needs a running event loop.

        Raises:
            RunFailed: the address cannot be bound.
        """
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise RunFailed(f"{self.name} cannot listen on {address}: {error}") from error
        self._start(self._read(), self._beat())
        return self

    async def wait_for(self, names: set[str], limit_s: float) -> None:
        """Waits until all these peers have said hello.

        Raises:
            DeadlineExpired: naming who is missing.
        """
        while missing := names - self.peers.keys():
            async with self.waits.deadline(f"{', '.join(sorted(missing))} to start", limit_s), self._joined:
                known = len(self.peers)
                await self._joined.wait_for(functools.partial(self._has_grown, known))

    def _has_grown(self, known: int) -> bool:
        return len(self.peers) > known

    async def send(
        self,
        peer: str,
        kind: str,
        body: dict[str, Any] | None = None,
        arrays: Arrays | None = None,
        limit_s: float = 300,
        on_ack: Callable[[], None] | None = None,
    ) -> None:
        """Sends one reliable message, waiting for a credit if needed; `on_ack` is called once it is committed there.

        Raises:
            DeadlineExpired: the peer acknowledged nothing for `limit_s` seconds.
        """
        target = self.peers[peer]
        while not target.outbox.has_credit:
            target.credit.clear()
            async with self.waits.deadline(f"{peer} to acknowledge messages", limit_s):
                await target.credit.wait()
        message = Outgoing(kind, body or {}, arrays or {}, on_ack)
        await self._transmit(target, target.outbox.send(message, time.monotonic()), message)

    async def _transmit(self, peer: Peer, number: int, message: Outgoing) -> None:
        frames = message.frames(self.session, number)
        # an unreachable peer is not an error here: the message stays in the outbox, heartbeats judge the peer
        with contextlib.suppress(zmq.ZMQError):
            await self._socket.send_multipart([_identity(peer.name), *frames], copy=len(frames) == 1)

    async def _read(self) -> None:
        while True:
            identity, *frames = await self._socket.recv_multipart()
            name = _name(identity)
            try:
                message = decode(frames)
            except MalformedMessage as error:
                self._refuse(error)
                continue
            if message.kind == "hello":
                await self._hello(name, message)
                continue
            peer = self.peers.get(name)
            if peer is None or peer.session != message.session:
                self.unknown += 1
                await self._transmit_control(name, "unknown")
                continue
            peer.last_seen, peer.lost = time.monotonic(), False
            await self._handle(peer, message)

    async def _handle(self, peer: Peer, message: Message) -> None:
        if message.kind == "ack":
            if (sent := _acknowledged(peer.outbox, message)) is not None:
                peer.credit.set()
                if sent.on_ack is not None:
                    sent.on_ack()
        elif message.kind == "heartbeat":
            peer.state = message.body
            await self._transmit_control(peer.name, "heartbeat", self.state())
        elif message.kind == "bye":
            self.peers.pop(peer.name, None)
            self._inbox.put_nowait(Delivery(peer.name, "bye", message.body, {}, lambda: None))
        elif message.number == 0:
            self._inbox.put_nowait(Delivery(peer.name, message.kind, message.body, message.arrays, lambda: None))
        else:
            verdict = peer.inbox.receive(message.session, message.number)
            if verdict == "new":
                ack = self._ack_function(peer, message.session, message.number)
                self._inbox.put_nowait(Delivery(peer.name, message.kind, message.body, message.arrays, ack))
            elif verdict == "committed":
                await self._transmit_control(peer.name, "ack", {"n": message.number})

    def _ack_function(self, peer: Peer, session: str, number: int) -> Callable[[], None]:
        def ack() -> None:
            if peer.inbox.commit(session, number):
                self._soon(self._transmit_control(peer.name, "ack", {"n": number}))

        return ack

    async def _hello(self, name: str, message: Message) -> None:
        role, meta = message.body.get("role"), message.body.get("meta", {})
        if not isinstance(role, str) or not isinstance(meta, dict):
            self.malformed += 1
            return
        known = self.peers.get(name)
        if known is None or known.session != message.session:
            known = self.peers[name] = Peer(name, role, meta, message.session, Outbox(self.credits))
        known.last_seen, known.lost = time.monotonic(), False
        await self._transmit_control(name, "welcome", {"hub": self.name})
        for number, unacknowledged in known.outbox.to_resend(time.monotonic(), 0.0):
            await self._transmit(known, number, unacknowledged)
        async with self._joined:
            self._joined.notify_all()

    async def _transmit_control(self, name: str, kind: str, body: dict[str, Any] | None = None) -> None:
        with contextlib.suppress(zmq.ZMQError):
            await self._socket.send_multipart([_identity(name), *encode(Message(kind, self.session, 0, body or {}))])

    async def _beat(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            now = time.monotonic()
            stalled = now - last - HEARTBEAT_S
            last = now
            for peer in list(self.peers.values()):
                # if this very process stood still, peers' beats lie unread in the socket: that is not their silence
                peer.last_seen += max(0.0, stalled)
                if now - peer.last_seen > self.lost_after_s and not peer.lost:
                    peer.lost = True
                    self._inbox.put_nowait(
                        PeerLost(f"{peer.name} has been silent for {now - peer.last_seen:.0f} s (seen by {self.name})")
                    )
                for number, message in peer.outbox.to_resend(now, RESEND_S):
                    await self._transmit(peer, number, message)

    async def close(self) -> None:
        """Stops serving."""
        await self._close(self._socket)


class Link(_Endpoint):
    """Connects a DEALER to a Hub under a name."""

    def __init__(
        self,
        name: str,
        role: str,
        waits: WaitRegistry,
        meta: dict[str, Any] | None = None,
        lost_after_s: float = 60.0,
        credits: int = DEFAULT_CREDITS,
    ) -> None:
        super().__init__(name, waits, lost_after_s, credits)
        self.role = role
        self.meta = meta or {}
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, name.encode())
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._outbox: Outbox[Outgoing] = Outbox(credits)
        self._inbox_state = Inbox()
        self._credit = asyncio.Event()
        self._all_acknowledged = asyncio.Event()
        self._welcome = asyncio.Event()
        self._last_seen = time.monotonic()
        self._address = ""
        self.hub_state: dict[str, Any] = {}
        """What the hub's last heartbeat said."""

    async def connect(self, address: str, limit_s: float = 300) -> Self:
        """Connects and says hello until the hub answers.

        Raises:
            DeadlineExpired: no answer in time.
        """
        self._address = address
        self._socket.connect(address)
        self._start(self._read())
        async with self.waits.deadline(f"an answer of the hub at {address}", limit_s):
            while not self._welcome.is_set():
                await self._say_hello()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._welcome.wait(), 1.0)
        self._start(self._beat())
        return self

    async def send(
        self,
        kind: str,
        body: dict[str, Any] | None = None,
        arrays: Arrays | None = None,
        limit_s: float = 300,
        on_ack: Callable[[], None] | None = None,
    ) -> None:
        """Sends one reliable message, waiting for a credit if needed; `on_ack` is called once it is committed there.

        Raises:
            DeadlineExpired: the hub acknowledged nothing for `limit_s` seconds.
        """
        while not self._outbox.has_credit:
            self._credit.clear()
            async with self.waits.deadline(f"the hub at {self._address} to acknowledge messages", limit_s):
                await self._credit.wait()
        message = Outgoing(kind, body or {}, arrays or {}, on_ack)
        self._all_acknowledged.clear()
        await self._transmit(self._outbox.send(message, time.monotonic()), message)

    async def flush(self, limit_s: float) -> None:
        """Waits until everything sent is acknowledged."""
        async with self.waits.deadline(f"the hub at {self._address} to acknowledge all messages", limit_s):
            while self._outbox.pending:
                await self._all_acknowledged.wait()

    async def _transmit(self, number: int, message: Outgoing) -> None:
        frames = message.frames(self.session, number)
        await self._socket.send_multipart(frames, copy=len(frames) == 1)

    async def _say_hello(self) -> None:
        hello = {"role": self.role, "meta": self.meta}
        await self._socket.send_multipart(encode(Message("hello", self.session, 0, hello)))

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                message = decode(frames)
            except MalformedMessage as error:
                self._refuse(error)
                continue
            self._last_seen = time.monotonic()
            await self._handle(message)

    async def _handle(self, message: Message) -> None:
        if message.kind == "welcome":
            self._welcome.set()
            for number, unacknowledged in self._outbox.to_resend(time.monotonic(), 0.0):
                await self._transmit(number, unacknowledged)
        elif message.kind == "unknown":
            await self._say_hello()  # the hub was restarted or never heard of us
        elif message.kind == "heartbeat":
            self.hub_state = message.body
        elif message.kind == "ack":
            if (sent := _acknowledged(self._outbox, message)) is not None:
                self._credit.set()
                if sent.on_ack is not None:
                    sent.on_ack()
                if not self._outbox.pending:
                    self._all_acknowledged.set()
        elif message.number == 0:
            self._inbox.put_nowait(Delivery("hub", message.kind, message.body, message.arrays, lambda: None))
        else:
            verdict = self._inbox_state.receive(message.session, message.number)
            if verdict == "new":
                ack = self._ack_function(message.session, message.number)
                self._inbox.put_nowait(Delivery("hub", message.kind, message.body, message.arrays, ack))
            elif verdict == "committed":
                await self._ack(message.number)

    def _ack_function(self, session: str, number: int) -> Callable[[], None]:
        def ack() -> None:
            if self._inbox_state.commit(session, number):
                self._soon(self._ack(number))

        return ack

    async def _ack(self, number: int) -> None:
        await self._socket.send_multipart(encode(Message("ack", self.session, 0, {"n": number})))

    async def _beat(self) -> None:
        last = time.monotonic()
        while True:
            state = self.state() | {"waits": self.waits.snapshot(), "malformed": self.malformed}
            await self._socket.send_multipart(encode(Message("heartbeat", self.session, 0, state)))
            await asyncio.sleep(HEARTBEAT_S)
            now = time.monotonic()
            self._last_seen += max(0.0, now - last - HEARTBEAT_S)  # our own standstill is not the hub's silence
            last = now
            if now - self._last_seen > self.lost_after_s:
                raise PeerLost(f"the hub at {self._address} has been silent for {now - self._last_seen:.0f} s")
            for number, message in self._outbox.to_resend(now, RESEND_S):
                await self._transmit(number, message)

    async def close(self) -> None:
        """Says goodbye and closes."""
        if self._welcome.is_set() and not self._closed:
            await self._socket.send_multipart(encode(Message("bye", self.session, 0, {})))
        await self._close(self._socket)
