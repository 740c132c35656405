"""Common base of hubs and links: deliveries, errors, counters, tasks."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio

from streamrl.errors import RunFailed
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.delivery import Inbox, Outbox
from streamrl.transport.flow import Flow
from streamrl.transport.refusals import Refusals
from streamrl.transport.wire import Arrays, MalformedMessage, Message, encode, is_finite, is_plain

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
HEARD_BEATS = 5
"""Heartbeats without a word after which a process that began earlier may take a peer's name all the same: the clock of
another machine may be behind, or one may have been set back. A link's hub counts as silent after as many."""
LINGER_MS = 500
YIELD_EVERY = 32
"""Messages after which a reader lets other tasks run; one that always finds another message never would."""

PARSED = 64
"""Bytes of memory that a byte of an envelope can become: an empty list is one byte there."""

Frames = list[bytes | memoryview]


def heard_s() -> float:
    """Return the seconds without a word up to which a peer counts as heard."""
    return HEARD_BEATS * HEARTBEAT_S


@dataclass(frozen=True)
class Speaker:
    """The sender of a message, as its connection was admitted."""

    name: str
    role: str
    site: str | None = None
    """Its site; None: the same as the receiver's."""


Reads = Callable[[Speaker, str, dict[str, Any]], Any]
"""Function (sender, kind, body) -> message; raises MalformedMessage if the body does not fit, NotAllowed if the sender
may not send the kind."""
HUB = Speaker("hub", "hub")


class PeerLost(RunFailed):
    """Raised when a peer has been silent for longer than the limit."""


class Refused(RunFailed):
    """Raised when a hub refuses this process; the message names the hub and its reason."""


@dataclass(frozen=True)
class Delivery:
    """A message for the owner, and the function that acknowledges it."""

    peer: str
    kind: str
    body: Any
    """The message, as the endpoint's `reads` has made it; a dict of the fields where there is none."""
    arrays: Arrays
    ack: Callable[[], None]
    """Acknowledges the message; to be called once, after the commit."""


@dataclass(frozen=True)
class Outgoing:
    """A reliable message that is not acknowledged yet."""

    frames: Frames
    on_ack: Callable[[], None] | None = None
    """Called when the receiver has committed it."""


def size_of(frames: list[Any]) -> int:
    """Return the bytes of all frames of a message."""
    return sum(map(len, frames))


def cost_of(frames: list[Any]) -> int:
    """Return the bytes that an open message takes at most: those of its arrays, and what its envelope becomes."""
    return size_of(frames) + PARSED * len(frames[0])


def take_ack(outbox: Outbox[Outgoing], session: str, ack: Message) -> bool:
    """Forget the message that the peer has committed, and call its `on_ack`; return False if it was not pending.

    Raises:
        MalformedMessage: the acknowledgement names no message.
    """
    number, of = ack.body.get("n"), ack.body.get("s")
    if not isinstance(number, int) or isinstance(number, bool) or not isinstance(of, str):
        raise MalformedMessage("an acknowledgement names no message")
    # the peer may commit late what an earlier session of this process sent, under a number that is in use again
    sent = outbox.acknowledged(number, time.monotonic()) if of == session else None
    if sent is not None and sent.on_ack is not None:
        sent.on_ack()
    return sent is not None


def take_state(message: Message) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the sender's state and the times in a heartbeat; the link's own figures are no state.

    Raises:
        MalformedMessage: the state contains something that a status file cannot hold.
    """
    state = dict(message.body)
    times = state.pop("clock", {})
    state.pop("first", None)
    if not isinstance(times, dict) or not is_plain(state):
        raise MalformedMessage("a heartbeat's state is not plain")
    return state, times


def echo_of(heartbeat: Message, now: float) -> dict[str, Any]:
    """Return the times in the answer to a heartbeat, by which its sender compares clocks; {}: it tells no time."""
    times = heartbeat.body.get("clock")
    sent = times.get("sent") if isinstance(times, dict) else None
    return {"clock": {"sent": sent, "hub": now}} if is_finite(sent) else {}


class Endpoint:
    """One process's end of the transport: tasks, a queue of deliveries, counters."""

    def __init__(self, name: str, waits: WaitRegistry, flow: Flow | None, clock: Callable[[], float]) -> None:
        self.name = name
        self.session = secrets.token_hex(8)
        self.waits = waits
        self.flow = flow or Flow()
        self.refusals = Refusals()
        """What was refused from peers, by cause and peer."""
        self.malformed = 0
        """Messages dropped because they did not follow the protocol."""
        self.unknown = 0
        """Well-formed messages from peers that had not said hello."""
        self.reads: Reads | None = None
        """Turns bodies into messages; a message that it refuses is acknowledged and counted as malformed."""
        self.state: Callable[[], dict[str, Any]] = dict
        """Returns the state that this process reports; called for every heartbeat."""
        self._clock = clock
        self._inbox: asyncio.Queue[Delivery | BaseException] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._context = zmq.asyncio.Context.instance()
        self._closed = False

    def beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work of the owner until this end is closed; an error in it is raised by `receive`."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(self._task_done)
        self._tasks.append(task)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._closed:
            self._inbox.put_nowait(error)

    def _deliver(self, peer: Speaker, message: Message, ack: Callable[[], None]) -> None:
        """Hand a message to the owner.

        Raises:
            MalformedMessage: `reads` refuses it. It is acknowledged all the same, because a resend would not help.
        """
        body: Any = message.body
        if self.reads is not None:
            try:
                body = self.reads(peer, message.kind, message.body)
            except MalformedMessage:
                ack()
                raise
        self._inbox.put_nowait(Delivery(peer.name, message.kind, body, message.arrays, ack))

    def _accept(
        self, inbox: Inbox, peer: Speaker, message: Message, size: int, put: Callable[[Frames], object]
    ) -> None:
        """Hand a peer's message to the owner once; `put` sends the acknowledgement after the commit.

        Args:
            size: bytes that it counts as while it is open (`cost_of`).

        Raises:
            MalformedMessage: it has no number, or `reads` refuses it.
        """
        number, session = message.number, message.session  # what waits for the commit holds on to nothing else

        def acknowledge() -> None:
            put(self._control("ack", {"n": number, "s": session}))

        def commit() -> None:
            if inbox.commit(session, number):
                acknowledge()

        if number == 0:
            raise MalformedMessage(f"a message {message.kind!r:.99} without a number")
        if (verdict := inbox.receive(session, number, size)) == "new":
            self._deliver(peer, message, commit)
        elif verdict == "full":
            self.refusals.count("too many", peer.name, f"{len(inbox.open)} messages, {inbox.open_bytes} bytes are open")
        elif verdict == "committed":
            acknowledge()

    def refused(self) -> dict[str, dict[str, int]]:
        """Return the numbers of all refusals, by cause and peer."""
        return self.refusals.by_cause()

    def _refuse(self, error: MalformedMessage, peer: str) -> None:
        """Count a malformed message, or one that its sender may not send."""
        self.malformed += 1
        self.refusals.count(error.cause, peer, error)

    def _control(self, kind: str, body: dict[str, Any] | None = None) -> Frames:
        """Return the frames of a message that is neither kept nor acknowledged."""
        return encode(Message(kind, self.session, 0, body or {}))

    def _outgoing(
        self,
        outbox: Outbox[Outgoing],
        kind: str,
        body: dict[str, Any] | None,
        arrays: Arrays | None,
        on_ack: Callable[[], None] | None,
    ) -> Outgoing:
        """Put a reliable message into the outbox, and return it."""
        frames = encode(Message(kind, self.session, outbox.next_number, body or {}, dict(arrays or {})))
        outgoing = Outgoing(frames, on_ack)
        outbox.send(outgoing, time.monotonic(), size_of(frames))
        return outgoing

    async def receive(self) -> Delivery:
        """Return the next message for the owner, waiting for one if needed.

        There is no limit: heartbeats end the wait with PeerLost if a peer is gone.

        Raises:
            PeerLost: a peer fell silent.
            Refused: the hub refuses this process.
        """
        item = await self._inbox.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def wake(self) -> None:
        """Let `receive` return a delivery of kind "wake", so that its caller looks at what has changed."""
        self._inbox.put_nowait(Delivery(self.name, "wake", {}, {}, lambda: None))

    def receive_now(self) -> Delivery | None:
        """Return a message that has already arrived, or None."""
        if self._inbox.empty():
            return None
        item = self._inbox.get_nowait()
        if isinstance(item, BaseException):
            raise item
        return item

    async def _stop(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def send_now(socket: zmq.asyncio.Socket, frames: Frames) -> bool:
    """Hand a message to libzmq; return False if it has no connection to the peer now, and has dropped the message.

    Never waits: sockets have no high-water mark, and credits bound what is in flight.
    """
    small = max(map(len, frames)) < zmq.COPY_THRESHOLD
    sent: asyncio.Future[Any] = asyncio.ensure_future(socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=small))
    if not sent.done():
        return True  # queued by pyzmq behind a hello that waits for the connection
    error = sent.exception()
    if error is not None and not isinstance(error, zmq.ZMQError):
        raise error
    return error is None
