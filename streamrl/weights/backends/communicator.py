"""A group of the trainer and the instances' workers: how its processes meet, and how the trainer's tensors reach them.

Rank 0 is the trainer's, and the only one that sends. Its store listens on one address and no other; the processes tell
each other there that they have come, so that nobody enters a call that cannot be ended before all others are there.
While they wait for a broadcast they ask it whether rank 0 is still in the group: gloo tells nobody that a process is
gone whose tensor is half on its way.
"""

from __future__ import annotations

import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from typing import Self, TypeVar

import torch
import torch.distributed as dist

from streamrl.config.weight_sync import WEIGHT_PATHS
from streamrl.runtime.meeting_store import listening_store

T = TypeVar("T")

POLL_S = 0.005
"""Seconds between two looks at who has come."""
MEET_S = 30.0
"""Seconds for processes that have all come to connect to each other."""
START = "start"
"""Key of the store that lets all begin."""
LEFT = "left"
"""Key of the store that has all know that rank 0 has left the group."""
LOOK_S = 0.25
"""Seconds of waiting after which another rank looks whether rank 0 is still in the group."""


class GroupBroken(RuntimeError):
    """Raised when a group cannot be formed, or a member of it is gone: it is of no more use to anybody."""

    def __init__(self, why: object) -> None:
        super().__init__(f"the weight group is broken: {why}")


def communicator_of(engine: str) -> type[Communicator]:
    """Return the communicator of a weight path, by the name of its engine in vLLM."""
    (path,) = (path for path in WEIGHT_PATHS.values() if path.engine == engine)
    assert path.communicator is not None
    kind: type[Communicator] = getattr(import_module(path.communicator[0]), path.communicator[1])
    return kind


def nothing_wrong() -> str:
    """Return why to stop waiting: never."""
    return ""


class Communicator(ABC):
    """The connection of one process to its group."""

    device: torch.device
    """Where tensors must be that are sent and received."""

    def __init__(self, limit_s: float) -> None:
        """
        Args:
            limit_s: seconds that one broadcast may take.
        """
        self._limit_s = limit_s
        self._why = ""

    @classmethod
    @abstractmethod
    def connect(cls, store: dist.Store, host: str, rank: int, world: int, limit_s: float) -> Self:
        """Connect to all others, which do the same now.

        Args:
            store: what all of them have met through.
            host: address of the trainer's node, as others reach it.
            rank: rank of this process.
            world: number of ranks.
            limit_s: seconds that one broadcast may take.

        Raises:
            GroupBroken: a member is gone.
        """

    @abstractmethod
    def _begin(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Begin to broadcast; return what waits for its end."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections; the others notice."""

    def begin(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Begin to broadcast rank 0's tensor (contiguous, on `device`) into that of each other rank.

        Returns:
            What waits for its end; until then the tensor belongs to the group. Raises `GroupBroken`.

        Raises:
            GroupBroken: a member is gone, or the group was aborted.
        """
        wait = self._guarded(lambda: self._begin(tensor))
        return lambda: self._guarded(wait)

    def abort(self, why: str) -> None:
        """Have what is under way, and all that follows, raise `GroupBroken`; for any thread."""
        self._why = self._why or why

    @property
    def aborted(self) -> str:
        """Why the group was aborted; '': it was not."""
        return self._why

    def _wait_until(self, done: Callable[[], bool], rank_0_left: Callable[[], bool]) -> None:
        """Wait for the end of a broadcast by looking, and not in a library, from which a broken one would not return.

        Args:
            done: returns whether it has ended, or failed.
            rank_0_left: returns whether rank 0 is no longer in the group; RuntimeError says so, too.

        Raises:
            GroupBroken: the group was aborted, rank 0 has left it, or the time is over.
        """
        now = time.monotonic()
        end, look = now + self._limit_s, now + LOOK_S
        while not done():
            if self.aborted:
                raise GroupBroken(self.aborted)
            if (now := time.monotonic()) > end:
                raise GroupBroken(f"waited {self._limit_s:.0f} s for a broadcast")
            if now > look:
                if rank_0_left():
                    raise GroupBroken("the trainer has left it")
                look = now + LOOK_S
            time.sleep(POLL_S / 10)

    def _guarded(self, work: Callable[[], T]) -> T:
        if self._why:
            raise GroupBroken(self._why)
        try:
            return work()
        except GroupBroken:
            raise
        except RuntimeError as error:
            raise GroupBroken(self._why or error) from error


class RankZero:
    """What the others know of rank 0, by the store that it keeps as long as it is in the group."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        """
        Args:
            store: what all have met through.
            rank: rank of this process.
        """
        self._store: dist.Store | None = store
        self._rank = rank

    def left(self) -> bool:
        """Return whether rank 0 has left; False at rank 0.

        Raises:
            RuntimeError: its store is gone.
        """
        return self._rank > 0 and self._store is not None and self._store.check([LEFT])

    def leave(self) -> None:
        """Tell the others that this process leaves, if it is rank 0."""
        if self._rank == 0 and self._store is not None:
            with suppress(RuntimeError):
                self._store.set(LEFT, "")
        self._store = None


def open_meeting(host: str, world: int, limit_s: float) -> tuple[dist.Store, int]:
    """Open the store that a group meets through, on one address of this machine; return it and its port."""
    store = listening_store(host, 0, world, limit_s)
    return store, int(store.port)


def lead(
    kind: type[Communicator],
    store: dist.Store,
    host: str,
    world: int,
    limit_s: float,
    stopped: Callable[[], str] = nothing_wrong,
) -> Communicator:
    """Wait for all others and connect to them, as rank 0.

    Args:
        kind: the communicator.
        store: the store of `open_meeting`.
        host: address of this node, as others reach it.
        world: number of ranks.
        limit_s: seconds for the others to come, and later for one broadcast.
        stopped: returns why to stop waiting, '' as long as there is no reason.

    Raises:
        GroupBroken: they have not come in time, or `stopped`.
    """
    here = [f"here/{rank}" for rank in range(1, world)]
    _wait(store, here, limit_s, stopped, f"{world - 1} workers")
    store.set(START, "")
    return _connected(kind, store, host, 0, world, limit_s)


def join(
    kind: type[Communicator], host: str, port: int, rank: int, world: int, limit_s: float
) -> tuple[Communicator, dist.Store]:
    """Come to a meeting, wait for all others and connect to them, as a rank above 0.

    Raises:
        GroupBroken: the trainer is not there, or the others have not come in time.
    """
    try:
        # refused: the meeting is over, as another member was lost; torch's store would try again until its limit
        socket.create_connection((host, port), MEET_S).close()
        limit = timedelta(seconds=MEET_S)
        store = dist.TCPStore(host, port, world, is_master=False, timeout=limit, wait_for_workers=False)
        store.set(f"here/{rank}", "")
    except (OSError, RuntimeError) as error:
        raise GroupBroken(error) from error
    _wait(store, [START], limit_s, nothing_wrong, "the trainer")
    return _connected(kind, store, host, rank, world, limit_s), store


def _connected(
    kind: type[Communicator], store: dist.Store, host: str, rank: int, world: int, limit_s: float
) -> Communicator:
    try:
        return kind.connect(store, host, rank, world, limit_s)
    except GroupBroken:
        raise
    except RuntimeError as error:
        raise GroupBroken(error) from error


def within(limit_s: float, work: Callable[[], T], what: str) -> T:
    """Do work that nothing can end, in a thread of its own, and wait for it.

    Args:
        limit_s: seconds to wait; the thread is left alone then, and ends with its process at the latest.
        work: what is done.
        what: what it is, in words.

    Raises:
        GroupBroken: it has not ended in time.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name=what, daemon=True).start()
    try:
        return done.result(limit_s)
    except TimeoutError as error:
        if done.done():  # just now, or it has raised this itself
            return done.result()
        raise GroupBroken(f"waited {limit_s:.0f} s for {what}") from error


def _wait(store: dist.Store, keys: list[str], limit_s: float, stopped: Callable[[], str], whom: str) -> None:
    """Wait until a store has all of these keys.

    Raises:
        GroupBroken: it has not in time, it is gone, or `stopped`.
    """
    end = time.monotonic() + limit_s
    try:
        while not store.check(keys):
            if why := stopped():
                raise GroupBroken(why)
            if time.monotonic() > end:
                raise GroupBroken(f"waited {limit_s:.0f} s for {whom} to meet")
            time.sleep(POLL_S)
    except GroupBroken:
        raise
    except RuntimeError as error:
        raise GroupBroken(error) from error
