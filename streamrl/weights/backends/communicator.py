"""A group of the trainer and the instances' workers: how its processes meet, and how the trainer's tensors reach them.

Rank 0 is the trainer's, and the only one that sends. Its store listens on one address and no other; the processes tell
each other there that they have come, so that nobody enters a call that cannot be ended before all others are there.
While they wait for a broadcast they ask it whether rank 0 is still in the group: gloo tells nobody that a process is
gone whose tensor is half on its way.
"""

from __future__ import annotations

import concurrent.futures
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any, Self, TypeVar

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


@dataclass(frozen=True)
class GroupStore:
    """Rank 0's store, through which a group meets, as one process reaches it: by two connections.

    Both are there before any begins: from then on rank 0 may be gone at any moment, and torch tries until its limit to
    connect to a store that is.
    """

    store: dist.Store
    """The connection for requests that may wait for another process."""
    asks: dist.Store
    """That for requests that are answered at once; they wait for none of the other's."""


class Communicator(ABC):
    """The connection of one process to its group."""

    device: torch.device
    """Where tensors must be that are sent and received."""

    def __init__(self, limit_s: float, met: GroupStore | None = None, rank: int = 0) -> None:
        """
        Args:
            limit_s: seconds that one broadcast may take.
            met: what all have met through; None: others notice by other means that rank 0 has left.
            rank: rank of this process.
        """
        self._limit_s, self._rank, self._why = limit_s, rank, ""
        self._met = met

    @classmethod
    @abstractmethod
    def connect(
        cls, met: GroupStore, host: str, rank: int, world: int, limit_s: float, stopped: Callable[[], str]
    ) -> Self:
        """Connect to all others, which do the same now.

        Args:
            met: what all of them have met through.
            host: address of the trainer's node, as others reach it.
            rank: rank of this process.
            world: number of ranks.
            limit_s: seconds that one broadcast may take.
            stopped: returns why to stop waiting, '' as long as there is no reason.

        Raises:
            GroupBroken: they have not connected within `MEET_S`, or `stopped`.
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

    def _wait_until(self, done: Callable[[], bool]) -> None:
        """Wait for the end of a broadcast by looking, and not in a library, from which a broken one would not return.

        Args:
            done: returns whether it has ended, or failed.

        Raises:
            GroupBroken: the group was aborted, rank 0 has left it, or the time is over.
        """
        assert self._met is not None
        left = left_by_rank_0(self._met.asks, self._limit_s) if self._rank else nothing_wrong
        wait_until(done, self._limit_s, "a broadcast", lambda: self.aborted or left(), POLL_S / 10)

    def _leave(self) -> None:
        """Have the others know that rank 0 leaves, if this process is rank 0."""
        if self._rank == 0 and self._met is not None:
            tell_left(self._met.asks)
        self._met = None

    def _guarded(self, work: Callable[[], T]) -> T:
        if self._why:
            raise GroupBroken(self._why)
        try:
            return work()
        except GroupBroken:
            raise
        except RuntimeError as error:
            raise GroupBroken(self._why or error) from error


def another_connection(store: dist.Store) -> dist.Store:
    """Return a store with a connection of its own, on which a request waits for none of the other's.

    Raises:
        GroupBroken: the store has not answered within `MEET_S`.
        RuntimeError: it is gone.
    """
    untyped: Any = store  # torch's type stubs leave it out
    found: dist.Store = asked(untyped.clone)
    return found


def asked(request: Callable[[], T], stopped: Callable[[], str] = nothing_wrong) -> T:
    """Return what the trainer's store answers.

    A request has no limit of its own: a store on a machine that is gone neither answers nor refuses.

    Args:
        request: asks the store.
        stopped: returns why to stop waiting, '' as long as there is no reason.

    Raises:
        GroupBroken: it has not answered within `MEET_S`, or `stopped`.
    """
    return within(MEET_S, request, "the trainer's store", stopped)


def tell_left(store: dist.Store) -> None:
    """Have all know that rank 0 has left the group."""
    with suppress(RuntimeError):
        store.set(LEFT, "")


def left_by_rank_0(store: dist.Store, limit_s: float) -> Callable[[], str]:
    """Return what tells another rank that waits why to stop, '' as long as rank 0 is in the group.

    It may be called as often as one likes, and asks rank 0's store every `LOOK_S`. It raises `GroupBroken` if that has
    not answered `limit_s` seconds from now, and RuntimeError if it is gone.
    """
    end, due = time.monotonic() + limit_s, time.monotonic() + LOOK_S

    def why() -> str:
        nonlocal due
        if (now := time.monotonic()) < due:
            return ""
        left = within(max(end - now, LOOK_S), lambda: store.check([LEFT]), "the trainer's store")
        due = time.monotonic() + LOOK_S
        return "the trainer has left it" if left else ""

    return why


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
    with errors_break_it():
        wait_until(lambda: store.check(here), limit_s, f"{world - 1} workers to meet", stopped)
        met = GroupStore(store, another_connection(store))
        store.set(START, "")
        try:
            return kind.connect(met, host, 0, world, limit_s, stopped)
        except RuntimeError:
            tell_left(met.asks)
            raise


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
    except OSError as error:
        raise GroupBroken(error) from error

    def connected() -> dist.Store:
        limit = timedelta(seconds=MEET_S)
        return dist.TCPStore(host, port, world, is_master=False, timeout=limit, wait_for_workers=False)

    with errors_break_it():
        store = asked(connected)
        met = GroupStore(store, another_connection(store))
        asked(partial(store.set, f"here/{rank}", ""))
        begins = partial(wait_until, lambda: store.check([START]), limit_s, "the trainer to meet")
        within(limit_s + LOOK_S, begins, "the trainer's store")
        return kind.connect(met, host, rank, world, limit_s, left_by_rank_0(met.asks, MEET_S)), store


@contextmanager
def errors_break_it() -> Iterator[None]:
    """Raise `GroupBroken` for what torch raises where a store or a member is gone."""
    try:
        yield
    except GroupBroken:
        raise
    except RuntimeError as error:
        raise GroupBroken(error) from error


def within(limit_s: float, work: Callable[[], T], what: str, stopped: Callable[[], str] = nothing_wrong) -> T:
    """Do work that nothing can end, in a thread of its own, and wait for it.

    Args:
        limit_s: seconds to wait; the thread is left alone then, and ends with its process at the latest.
        work: what is done.
        what: what it is, in words.
        stopped: returns why to stop waiting, '' as long as there is no reason.

    Raises:
        GroupBroken: it has not ended in time, or `stopped`.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name=what, daemon=True).start()
    ended = lambda: bool(concurrent.futures.wait([done], 10 * POLL_S).done)  # noqa: E731
    wait_until(ended, limit_s, what, stopped, 0.0)
    return done.result()


def wait_until(
    done: Callable[[], bool],
    limit_s: float,
    what: str,
    stopped: Callable[[], str] = nothing_wrong,
    pause_s: float = POLL_S,
) -> None:
    """Look again and again whether something is done, until it is.

    Args:
        done: returns whether it is.
        limit_s: seconds to wait.
        what: what is waited for, in words.
        stopped: returns why to stop waiting, '' as long as there is no reason.
        pause_s: seconds between two looks.

    Raises:
        GroupBroken: it is not in time, or `stopped`.
    """
    end = time.monotonic() + limit_s
    while not done():
        if why := stopped():
            raise GroupBroken(why)
        if time.monotonic() > end:
            raise GroupBroken(f"waited {limit_s:.0f} s for {what}")
        time.sleep(pause_s)
