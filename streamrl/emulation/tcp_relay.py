"""Relay TCP connections over a shaped link: sockets and timers around `shaping.Wire`.

    client socket -> Lane -> Pipe (Wire, shared) -> Lane's delay line -> home's socket, and the same the other way round

`relay_lanes.py` has the lanes and pipes. Nothing here runs unless a socket or a timer wakes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from random import Random

from streamrl.emulation.relay_lanes import End, Lane, Pipe
from streamrl.emulation.settings import LinkSettings
from streamrl.emulation.shaping import MAX_CHUNK, MIN_WINDOW, QUEUE_S, LinkShape, Wire

log = logging.getLogger(__name__)

CONNECT_S = 10.0
"""Seconds to reach home's port, which is on this machine."""
MAX_SOCKET_BUFFER = 512 * 1024
_read_buffer = memoryview(bytearray(MAX_CHUNK))
"""Buffer shared by all sockets: bytes are copied out before the next read."""


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
        if self._transport is None or self.lost or self._eof or self._transport.is_closing():
            return
        if wanted and not self._transport.is_reading():
            self._transport.resume_reading()
        elif not wanted and self._transport.is_reading():
            self._transport.pause_reading()

    def write(self, data: bytes) -> None:
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
            to_home = Lane(self._link.to_home, self.remote, self.home, lambda end: self.arrived(end, self.home))
            from_home = Lane(self._link.from_home, self.home, self.remote, lambda end: self.arrived(end, self.remote))
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
