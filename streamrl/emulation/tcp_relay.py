"""Relay TCP connections over a shaped link: sockets and timers around `shaping.Wire`.

    client socket -> Lane -> Pipe (Wire, shared) -> Lane's delay line -> home's socket, and the same the other way round

A `Pipe` is one direction of a link. Lanes with bytes to send take turns at it, one chunk each. A `Lane` is one
direction of a connection: it reads a chunk, waits for its turn, keeps the chunk until it has arrived, and writes it to
the other socket. While its window is full it reads nothing, which bounds memory and passes back-pressure to the sender.

Ends travel like bytes: a half-close or a reset reaches the other side after everything sent before it.

Nothing here runs unless a socket or a timer wakes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import struct
from collections import deque
from enum import Enum
from random import Random

from streamrl.emulation.settings import LinkSettings
from streamrl.emulation.shaping import MAX_CHUNK, MIN_WINDOW, QUEUE_S, SEGMENT, LinkShape, ShapedFlow, Wire

log = logging.getLogger(__name__)

CONNECT_S = 10.0
"""Seconds to reach home's port, which is on this machine."""
MAX_SOCKET_BUFFER = 512 * 1024
REST_S = 0.002
"""Seconds that a lane rests after reading full packets, but less than a chunk, twice within the same time.

The kernel's token bucket passes single packets; resting saves four fifths of the wake-ups, at this much more delay.
"""

_read_buffer = memoryview(bytearray(MAX_CHUNK))
"""Buffer shared by all sockets: bytes are copied out before the next read."""


class End(Enum):
    """The ways in which one direction of a connection ends."""

    CLOSED = "closed"
    RESET = "reset"


class Pipe:
    """One direction of a link."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.frozen = False
        self.bytes = 0
        """Bytes delivered so far."""
        self.loop = asyncio.get_running_loop()
        self._waiting: deque[Lane] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def offer(self, lane: Lane) -> None:
        """Queue a lane that has a chunk for the wire."""
        self._waiting.append(lane)
        if self._timer is None:
            self.admit()

    def admit(self) -> None:
        """Let lanes onto the wire, in turn, while its queue has room."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting and not self.frozen:
            now = self.loop.time()
            if (ready := self.wire.ready_at(now)) > now:
                self._timer = self.loop.call_at(ready, self.admit)
                return
            self._waiting.popleft().enter(now)


class Lane:
    """One direction of a connection."""

    def __init__(self, pipe: Pipe, relay: Relay, source: RelayEndpoint, sink: RelayEndpoint) -> None:
        self._pipe = pipe
        self._relay = relay
        self._source = source
        self._sink = sink
        self._flow = ShapedFlow()
        self._next: bytes | None = None
        self._line: deque[tuple[float, bytes | End]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._read_at = -math.inf
        self._resting = False
        self._started = False
        self._ended = False
        self.finished = False
        """Whether its end has arrived."""

    @property
    def chunk(self) -> int:
        """Most bytes to read at once."""
        return self._pipe.wire.shape.chunk

    def start(self) -> None:
        """Begin to read."""
        self._started = True
        self.update_reading()

    def update_reading(self) -> None:
        """Read from the source only while there is room for its bytes."""
        self._source.read(
            self._started
            and not self._ended
            and not self._pipe.frozen
            and not self._resting
            and self._next is None
            and self._pipe.wire.may_read(self._flow)
        )

    def received(self, data: bytes) -> None:
        """Take bytes that the source has sent."""
        self._next = data
        if not self._pipe.wire.paced and SEGMENT <= len(data) < self.chunk:
            now = self._pipe.loop.time()
            if now < self._read_at + REST_S:
                self._resting = True
                self._pipe.loop.call_at(now + REST_S, self._rested)
            self._read_at = now
        self._pipe.offer(self)
        self.update_reading()

    def _rested(self) -> None:
        self._resting = False
        self.update_reading()

    def enter(self, now: float) -> None:
        """Put this lane's chunk on the wire; it is its turn."""
        if self._next is None:  # reset meanwhile
            return
        data, self._next = self._next, None
        self._line.append((self._pipe.wire.send(now, len(data), self._flow).arrives, data))
        self.deliver()

    def end(self, how: End) -> None:
        """Record that the source has ended; bytes that have not entered the wire are lost."""
        self._ended = True
        self._next = None
        arrives = max(self._pipe.loop.time() + self._pipe.wire.shape.delay_s, self._flow.arrives)
        self._flow.arrives = arrives
        self._line.append((arrives, how))
        self.update_reading()
        self.deliver()

    def discard(self) -> None:
        """Drop everything: the receiver is gone."""
        self._ended = True
        self._next = None
        self._line.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.update_reading()

    def deliver(self) -> None:
        """Write what has arrived, as far as the sink takes it, and set a timer for the rest."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._line and not self._pipe.frozen and self._sink.writable:
            arrives, what = self._line[0]
            if arrives > self._pipe.loop.time():
                self._timer = self._pipe.loop.call_at(arrives, self.deliver)
                break
            self._line.popleft()
            if isinstance(what, End):
                self.finished = True
                self._relay.arrived(what, self._sink)
                return
            self._sink.write(what)
            self._flow.delivered(len(what))
            self._pipe.bytes += len(what)
        self.update_reading()


class RelayEndpoint(asyncio.BufferedProtocol):
    """One of the two sockets of a relayed connection; it reads only when `read` allows it."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._transport: asyncio.Transport | None = None
        self.outgoing: Lane | None = None
        """Lane that takes the bytes read from this socket."""
        self.incoming: Lane | None = None
        """Lane that brings the bytes of the other socket."""
        self.writable = True
        self.lost = False
        self._eof = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport and wait; reset it if the relay is already closing."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._relay.closing:
            self.reset()
            return
        transport.set_write_buffer_limits(high=0)  # what the socket does not take waits in the lane, which counts it
        transport.pause_reading()

    @property
    def open(self) -> bool:
        """Whether its socket is open."""
        return self._transport is not None and not self.lost

    def read(self, wanted: bool) -> None:
        """Start or stop reading."""
        if self._transport is None or self.lost or self._eof or self._transport.is_closing():
            return
        if wanted and not self._transport.is_reading():
            self._transport.resume_reading()
        elif not wanted and self._transport.is_reading():
            self._transport.pause_reading()

    def write(self, data: bytes) -> None:
        """Write bytes to the socket."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def write_end(self) -> None:
        """Close the sending half; the peer may still send."""
        if self._transport is not None and not self._transport.is_closing():
            try:
                self._transport.write_eof()
            except OSError:  # the peer has reset the connection while reading was paused
                self._transport.abort()

    def close(self) -> None:
        """Close the socket once everything is written."""
        if self._transport is not None:
            self._transport.close()

    def reset(self) -> None:
        """Close the connection with a reset to the peer."""
        if self._transport is not None and not self.lost:
            _close_by_reset(self._transport.get_extra_info("socket"))
            self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the shared buffer, at most a chunk of it."""
        return _read_buffer[: self.outgoing.chunk if self.outgoing else 1]

    def buffer_updated(self, nbytes: int) -> None:
        """Hand the bytes read to the outgoing lane."""
        assert self.outgoing is not None
        self.outgoing.received(bytes(_read_buffer[:nbytes]))

    def eof_received(self) -> bool:
        """Pass on the peer's half-close."""
        self._eof = True
        if self.outgoing is not None:
            self.outgoing.end(End.CLOSED)
        return True  # keeps the other direction open

    def pause_writing(self) -> None:
        """Note that the socket takes no more bytes."""
        self.writable = False

    def resume_writing(self) -> None:
        """Deliver what has waited for the socket."""
        self.writable = True
        if self.incoming is not None:
            self.incoming.deliver()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the relay that the socket is gone."""
        self.lost = True
        self._relay.lost(self)


class Relay:
    """One connection from a remote site to a port of home."""

    def __init__(self, link: RelayLink, accepted: socket.socket) -> None:
        self._link = link
        self._accepted = accepted
        self._task: asyncio.Task[None] | None = None
        self.closing = False
        self.remote = RelayEndpoint(self)
        self.home = RelayEndpoint(self)
        self.lanes: tuple[Lane, ...] = ()

    def begin(self, connect: tuple[str, int]) -> None:
        """Open the connection to home, and relay from then on."""
        self._link.relays.add(self)
        self._task = asyncio.get_running_loop().create_task(self._open(connect))
        self._task.add_done_callback(_raise_error)

    async def _open(self, connect: tuple[str, int]) -> None:
        """Open as TCP's handshake would: home learns of it after one delay, the remote site may send after two."""
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: self.remote, self._accepted)
            await self._cross()
            outward = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                outward.setblocking(False)
                set_buffers(outward, self._link.shape)
                async with asyncio.timeout(CONNECT_S):
                    await loop.sock_connect(outward, connect)
                    await loop.create_connection(lambda: self.home, sock=outward)
            except BaseException:
                outward.close()
                raise
            to_home = Lane(self._link.to_home, self, self.remote, self.home)
            from_home = Lane(self._link.from_home, self, self.home, self.remote)
            self.remote.outgoing = self.home.incoming = to_home
            self.home.outgoing = self.remote.incoming = from_home
            self.lanes = (to_home, from_home)
            from_home.start()
            await self._cross()
            to_home.start()
        except OSError as error:  # TimeoutError is one
            log.info("link %s: home's port %s cannot be reached: %s", self._link.name, connect, error)
            await self._cross()
            self.reset()
        except asyncio.CancelledError:
            if not self.closing:
                raise

    async def _cross(self) -> None:
        """Wait for one trip over the link without data; a cut link holds it up."""
        await asyncio.sleep(self._link.shape.delay_s)
        await self._link.up.wait()

    def arrived(self, end: End, at: RelayEndpoint) -> None:
        """Handle an end that has crossed the link."""
        if end is End.RESET:
            self.reset()
            return
        at.write_end()
        if all(lane.finished for lane in self.lanes):
            self.closing = True
            self.remote.close()
            self.home.close()

    def lost(self, endpoint: RelayEndpoint) -> None:
        """Handle the loss of one of the sockets."""
        if not self.closing and endpoint.outgoing and endpoint.incoming:
            endpoint.incoming.discard()
            endpoint.outgoing.end(End.RESET)
        elif not self.closing:
            self.reset()
        if not self.remote.open and not self.home.open:
            self._link.relays.discard(self)

    def reset(self) -> None:
        """Reset both sockets at once; bytes in flight are lost."""
        self.closing = True
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        for lane in self.lanes:
            lane.discard()
        if self.remote.open or self.home.open:
            self.remote.reset()
            self.home.reset()
        else:
            _close_by_reset(self._accepted)
            self._accepted.close()
            self._link.relays.discard(self)


class RelayLink:
    """A link: two pipes, and the connections over them."""

    def __init__(self, name: str, settings: LinkSettings, seed: int) -> None:
        self.name = name
        self.relays: set[Relay] = set()
        self.opened = 0
        self.resets = 0
        self.up = asyncio.Event()
        self.up.set()
        self._reset = settings.reset
        self.to_home, self.from_home = (
            Pipe(Wire(settings.shape, Random(f"{seed}/{name}/{way}"), settings.paced))
            for way in ("to_home", "from_home")
        )
        self.apply(settings)

    @property
    def shape(self) -> LinkShape:
        """The link's current shape."""
        return self.to_home.wire.shape

    def accept(self, accepted: socket.socket, connect: tuple[str, int]) -> None:
        """Relay a remote site's connection to a port of home."""
        self.opened += 1
        Relay(self, accepted).begin(connect)

    def apply(self, settings: LinkSettings) -> None:
        """Apply settings to the link."""
        for pipe in (self.to_home, self.from_home):
            pipe.wire.reshape(pipe.loop.time(), settings.shape)
            pipe.frozen = settings.down
        if settings.reset > self._reset:
            self._reset = settings.reset
            self.resets += 1
            for relay in list(self.relays):
                relay.reset()
        if settings.down:
            self.up.clear()
        else:
            self.up.set()
        for pipe in (self.to_home, self.from_home):
            pipe.admit()
        for relay in list(self.relays):
            for lane in relay.lanes:
                lane.deliver()

    def close(self) -> None:
        """Reset all connections."""
        for relay in list(self.relays):
            relay.reset()

    def stats(self) -> dict[str, int | bool]:
        """Return the bytes delivered in each direction, and counts of connections and resets."""
        return {
            "to_home": self.to_home.bytes,
            "from_home": self.from_home.bytes,
            "connections": len(self.relays),
            "opened": self.opened,
            "resets": self.resets,
            "down": not self.up.is_set(),
        }


def set_buffers(sock: socket.socket, shape: LinkShape) -> None:
    """Limit the kernel's buffers to a queue's worth each, instead of megabytes between a sender and its link."""
    size = MAX_SOCKET_BUFFER
    if shape.bandwidth_bytes_per_s is not None:
        size = min(size, max(MIN_WINDOW, int(QUEUE_S * shape.bandwidth_bytes_per_s)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)


def _raise_error(task: asyncio.Task[None]) -> None:
    """Pass an unexpected error to the event loop's handler at once."""
    if not task.cancelled():
        task.result()


def _close_by_reset(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
