"""What agent workers and their owner say to each other over the worker's standard input and output.

A frame is its length (4 bytes, big-endian) and a msgpack-encoded struct. The worker writes frames from several threads.
"""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import msgspec

from streamrl.agents.episode import EpisodeOrder, EpisodeOutcome
from streamrl.runtime.processes import end_copy

MARK = "STREAMRL_AGENT_WORKER"
"""Variable with a random value, by which the owner of a worker finds all that its agents have started."""
LENGTH_BYTES = 4
MOST_BYTES = 64 * 2**20
"""Most bytes of a frame."""


class _Frame(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The base of all frames."""


class Begin(_Frame, frozen=True, kw_only=True):
    """The first frame to a worker."""

    tasks: list[dict[str, Any]]
    """The run's agent tasks, as in the run file."""


class Play(_Frame, frozen=True, kw_only=True):
    """Play an episode."""

    order: EpisodeOrder
    base_url: str
    api_key: str
    """Key of its session, by which all other frames name it: an episode that is played again has another."""


class GiveUp(_Frame, frozen=True, kw_only=True):
    """End an episode without an outcome: nobody waits for it any more."""

    api_key: str


class Ready(_Frame, frozen=True, kw_only=True):
    """The worker has imported all agents, or says why it cannot."""

    problem: str


class WorkerAlive(_Frame, frozen=True, kw_only=True):
    """A thread of the worker runs; sent every `ALIVE_S` seconds."""


class Doing(_Frame, frozen=True, kw_only=True):
    """The tools that an episode waits for from now on."""

    api_key: str
    tools: str
    """Their names; '': none."""
    since: float
    """Unix seconds."""


class Played(_Frame, frozen=True, kw_only=True):
    """The outcome of an episode, sent when its agent has ended; `CleanedUp` follows."""

    api_key: str
    outcome: EpisodeOutcome


class Spoiled(_Frame, frozen=True, kw_only=True):
    """The worker should get no further episodes; it comes before the outcome of an episode that ended void for it."""

    why: str
    """The threads or coroutines that do not end."""


class CleanedUp(_Frame, frozen=True, kw_only=True):
    """What an agent has left behind has ended, or never will; the last frame of its episode."""

    api_key: str


class Blocked(_Frame, frozen=True, kw_only=True):
    """An agent has not awaited anything for too long, so no episode of the worker goes on."""

    api_key: str
    """Key of its episode's session; '': unknown."""
    where: str
    """Where its code is: 'agents.py:12 in run'."""
    seconds: float


ToWorker = Begin | Play | GiveUp
FromWorker = Ready | WorkerAlive | Doing | Played | Spoiled | CleanedUp | Blocked
TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
ALIVE_S = 1.0
"""Seconds between two `WorkerAlive`."""


def packed(frame: ToWorker | FromWorker) -> bytes:
    """Encode a frame with its length.

    Raises:
        ValueError: it has more than `MOST_BYTES`.
        TypeError: it holds something that cannot be sent.
    """
    body = msgspec.msgpack.encode(frame)
    if len(body) > MOST_BYTES:
        raise ValueError(f"a frame of {len(body):,} bytes: at most {MOST_BYTES:,} can be sent")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


async def next_frame(reader: asyncio.StreamReader) -> FromWorker | None:
    """Read a worker's next frame; None: it has closed its output.

    Raises:
        ValueError: what was read is no frame.
    """
    try:
        length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
        if length > MOST_BYTES:
            raise ValueError(f"a frame of {length:,} bytes")
        return FROM_WORKER.decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


class FramePipe:
    """A worker's end of both pipes; any thread may write, and no process that an agent has forked."""

    def __init__(self, read: int, write: int) -> None:
        """
        Args:
            read: file descriptor that frames come from.
            write: file descriptor that frames go to.
        """
        self._read, self._write = read, write
        self._writing = threading.Lock()
        self._pid = os.getpid()

    def next(self) -> ToWorker | None:
        """Read the next frame, blocking; None: the owner has closed the pipe."""
        head = self._exactly(LENGTH_BYTES)
        body = self._exactly(int.from_bytes(head, "big")) if head else b""
        return TO_WORKER.decode(body) if body else None

    def send(self, frame: FromWorker) -> None:
        """Write a frame whole, blocking; a copy of the process ends instead.

        Raises:
            OSError: the owner has closed the pipe.
        """
        end_copy(self._pid)
        data = memoryview(packed(frame))
        with self._writing:
            while data:
                data = data[os.write(self._write, data) :]

    def _exactly(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            part = os.read(self._read, count - len(found))
            if not part:
                return b""
            found += part
        return found
