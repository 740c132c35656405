"""One direction of a link, and of each connection over it: which bytes enter the wire, wait, and arrive.

A `Pipe` is one direction of a link. Lanes with bytes to send take turns at it, one chunk each. A `Lane` is one
direction of a connection: it reads a chunk, waits for its turn, keeps the chunk until it has arrived, and writes it to
the other socket. While its window is full it reads nothing, which bounds memory and passes back-pressure to the sender.

Ends travel like bytes: a half-close or a reset reaches the other side after everything sent before it.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from streamrl.emulation.shaping import SEGMENT, ShapedFlow, Wire

REST_S = 0.002
"""Seconds that a lane rests after reading full packets, but less than a chunk, twice within the same time.

The kernel's token bucket passes single packets; resting saves four fifths of the wake-ups, at this much more delay.
"""


class End(Enum):
    """The ways in which one direction of a connection ends."""

    CLOSED = "closed"
    RESET = "reset"


class LaneEnd(Protocol):
    """A socket at one end of a lane."""

    writable: bool

    def read(self, wanted: bool) -> None:
        """Read from it, or stop reading."""

    def write(self, data: bytes) -> None:
        """Write to it."""


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
    """One direction of a connection; it calls `arrived` with the end that has crossed it."""

    def __init__(self, pipe: Pipe, source: LaneEnd, sink: LaneEnd, arrived: Callable[[End], None]) -> None:
        self._pipe = pipe
        self._source, self._sink, self._arrived = source, sink, arrived
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
        return self._pipe.wire.shape.chunk

    def start(self) -> None:
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
        self._line.append((self._pipe.wire.send(now, len(data), self._flow), data))
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
                self._arrived(what)
                return
            self._sink.write(what)
            self._flow.in_flight -= len(what)
            self._pipe.bytes += len(what)
        self.update_reading()
