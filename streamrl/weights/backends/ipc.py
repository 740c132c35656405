"""The group of the weight path `ipc`: memory that the processes of one machine share.

Rank 0 makes two slots of memory, the others open them (`shared_slots.py`), and every tensor goes through them in chunks
(`shared_ring.py` has the order in which they are filled and copied). Each other rank has a Unix socket to rank 0, over
which it gets the slots, and over which both then say how far they are:

    rank 0                                     rank r
    waits until a slot is free
    copies a chunk in, settles, announces --->  waits for the announcement
                                                copies the chunk out, settles
    hears that the slot may be filled  <------  says so

**Order of memory.** An announcement is sent after the chunk is in memory and received before it is read, and likewise
for the answer. Sending and receiving are system calls with locks of the kernel between them, which order all that was
written before the one and is read after the other, on every CPU; on GPUs `settle` has waited for the copy itself.

**Who waits for whom** is in `shared_ring.py`: no wait can be part of a circle. Each has the limit of a broadcast, ends
when the group is aborted, and, as with gloo, when the process that it waits for is gone: its socket closes with it,
however it dies. Rank 0 looks at the sockets of all whenever it waits for one. Others learn from rank 0 that some other
member is lost: it leaves the group, which closes its end.

**Who may open the memory**: whoever reaches rank 0's socket, which is in a folder of this user alone, and only until
all have come. Others take it from a process of their own user alone, as the kernel tells them: its path comes from the
meeting's store, to which any user of this machine may speak. On GPUs a whole run has used it, with one GPU for all
(`shared_slots.py`).
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Self

import msgspec
import torch
import torch.distributed as dist

from streamrl.scratch_folders import ScratchFolder
from streamrl.weights.backends.communicator import MEET_S, POLL_S, Communicator, GroupBroken, GroupStore, asked
from streamrl.weights.backends.shared_ring import Ring
from streamrl.weights.backends.shared_slots import SharedSlots, SlotsOffer, kind_here

SLOTS = 2
"""One is filled while the other is copied out."""
SLOT = 64 * 2**20
"""Bytes of a slot: a parcel (`parcels.PARCEL`) with the tensor by which it is larger, if that is not a huge one."""
DOOR = "ipc"
"""Key of the store that has the path of rank 0's socket."""
RANK = struct.Struct("<I")
"""What a member says first: its rank. Rank 0 answers with the bytes of its offer, their number first."""
STEP = struct.Struct("<QQ")
"""What is said of each chunk, by rank 0 when it is in its slot and by the others when they have it: number, bytes."""
CREDENTIALS = struct.Struct("=iII")
"""Process, user and group at the other end of a Unix socket, as Linux tells them (`SO_PEERCRED`)."""


class _Line:
    """The socket to one other process of the group."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        connection.setblocking(False)
        self.connection, self.name = connection, name
        self._read = bytearray()

    def say(self, chunk: int, nbytes: int) -> None:
        """Tell about a chunk. There is room for it: at most as many are unanswered as there are slots.

        Raises:
            GroupBroken: the other end is closed.
        """
        try:
            self.connection.sendall(STEP.pack(chunk, nbytes), socket.MSG_NOSIGNAL)
        except OSError as error:
            raise self._gone() from error

    def heard(self) -> Iterator[tuple[int, int]]:
        """Yield what has been said so far.

        Raises:
            GroupBroken: the other end is closed, and all that it had said has been yielded.
        """
        closed = False
        try:
            while not closed:
                part = self.connection.recv(4096)
                self._read += part
                closed = not part
        except BlockingIOError:
            pass
        except ConnectionError:
            closed = True
        while len(self._read) >= STEP.size:
            step: tuple[int, int] = STEP.unpack_from(self._read)
            del self._read[: STEP.size]
            yield step
        if closed:
            raise self._gone()

    def _gone(self) -> GroupBroken:
        return GroupBroken(f"{self.name} is gone")


class IpcCommunicator(Communicator):
    """Shared memory of a machine's processes, and their sockets to rank 0."""

    def __init__(self, slots: SharedSlots, lines: Mapping[int, socket.socket], limit_s: float) -> None:
        """
        Args:
            slots: the slots that all have open.
            lines: connected sockets by rank of the other end: of all others at rank 0, of rank 0 at the others.
            limit_s: seconds that one broadcast may take.
        """
        super().__init__(limit_s)
        self.device, self._slots = slots.device, slots
        self._lines = {rank: _Line(one, f"rank {rank}" if rank else "the trainer") for rank, one in lines.items()}
        self._sends = 0 not in lines
        self._ring = Ring(len(slots.slots), lines)
        self._coming: deque[torch.Tensor] = deque()
        """Where the next chunks go, if this process receives."""
        self._announced: deque[tuple[int, int]] = deque()
        """Chunks that are in their slots and have not been copied, if this process receives."""
        self._begun = self._copied = 0
        """Chunks of the broadcasts that this process has begun, and those that it has, if it receives."""
        self._poll = select.poll()
        for one in lines.values():
            self._poll.register(one, select.POLLIN)

    @classmethod
    def connect(
        cls, met: GroupStore, host: str, rank: int, world: int, limit_s: float, stopped: Callable[[], str]
    ) -> Self:
        """Share the slots: rank 0 makes them, the others get them over their sockets."""
        other = "the trainer" if rank else "a member that had connected"
        try:
            if rank:
                return cls(*_opened(os.fsdecode(asked(lambda: met.store.get(DOOR), stopped)), rank), limit_s)
            slots = kind_here().make(SLOTS, SLOT)
            return cls(slots, _let_in(met.store, slots, world, stopped), limit_s)
        except TimeoutError as error:
            raise GroupBroken(f"waited {MEET_S:.0f} s for {other}") from error
        except ConnectionError as error:
            raise GroupBroken(f"{other} is gone") from error
        except OSError as error:
            raise GroupBroken(error) from error

    def _begin(self, tensor: torch.Tensor) -> Callable[[], None]:
        flat = tensor.reshape(-1).view(torch.uint8)
        chunks = flat.split(len(self._slots.slots[0])) if len(flat) else ()
        return self._send(chunks) if self._sends else self._receive(chunks)

    def close(self) -> None:
        """Close all connections and unmap the slots; the memory is freed once all have."""
        self.abort("closed")
        self._slots.close()
        for line in self._lines.values():
            line.connection.close()

    # -- at rank 0

    def _send(self, chunks: Iterable[torch.Tensor]) -> Callable[[], None]:
        """Fill slots with all chunks, as they get free; the tensor is not needed afterwards."""
        end = time.monotonic() + self._limit_s
        for chunk in chunks:
            self._hear_answers()
            while behind := self._ring.waits_for:
                self._look_again(end, ", ".join(self._lines[rank].name for rank in behind))
                self._hear_answers()
            self._slots.slots[self._ring.slot][: len(chunk)].copy_(chunk)
            self._slots.settle()
            number = self._ring.chunk
            self._ring.filled()
            for line in self._lines.values():
                line.say(number, len(chunk))
        return lambda: None

    def _hear_answers(self) -> None:
        for rank, line in self._lines.items():
            for number, _ in line.heard():
                self._ring.copied(rank, number)

    # -- at the others

    def _receive(self, chunks: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Return what copies all chunks out of their slots, and those of broadcasts that were begun before."""
        self._coming.extend(chunks)
        self._begun += len(chunks)
        last = self._begun

        def wait() -> None:
            end = time.monotonic() + self._limit_s
            while self._copied < last:
                self._copy_next(end)

        return wait

    def _copy_next(self, end: float) -> None:
        (line,) = self._lines.values()
        while not self._announced:
            self._hear_announcements(line)
            if not self._announced:
                self._look_again(end, line.name)
        number, nbytes = self._announced.popleft()
        place = self._coming.popleft()
        if (number, nbytes) != (self._copied, len(place)):
            raise GroupBroken(
                f"{line.name} sends chunk {number} of {nbytes} bytes; expected {self._copied} of {len(place)} bytes"
            )
        place.copy_(self._slots.slots[number % len(self._slots.slots)][:nbytes])
        self._slots.settle()
        self._copied += 1
        with suppress(GroupBroken):  # rank 0 may leave once it has announced its last chunk; the next wait tells
            line.say(number, nbytes)

    def _hear_announcements(self, line: _Line) -> None:
        try:
            self._announced.extend(line.heard())
        except GroupBroken:
            if not self._announced:
                raise

    # -- at all

    def _look_again(self, end: float, whom: str) -> None:
        """Return when somebody has said something, or after a moment.

        Raises:
            GroupBroken: the group was aborted, or the time is over.
        """
        if self.aborted:
            raise GroupBroken(self.aborted)
        if (left_s := end - time.monotonic()) <= 0:
            raise GroupBroken(f"waited {self._limit_s:.0f} s for {whom}")
        self._poll.poll(1000 * min(left_s, POLL_S))


def _let_in(store: dist.Store, slots: SharedSlots, world: int, stopped: Callable[[], str]) -> dict[int, socket.socket]:
    """Give the slots to all other ranks, as they come; return their sockets.

    The socket is gone once all have come.

    Raises:
        GroupBroken: they have not come in time, one is gone again, or `stopped`.
        OSError: the socket cannot be made, or one is gone again.
    """
    offer, descriptors = slots.offer()
    packed = msgspec.msgpack.encode(offer)
    end = time.monotonic() + MEET_S
    come: dict[int, socket.socket] = {}
    with (
        ExitStack() as undone,
        socket.socket(socket.AF_UNIX) as door,
        ScratchFolder() as folder,
    ):
        path = str(folder / "door")
        door.bind(path)
        door.listen(world)
        store.set(DOOR, path)
        while missing := set(range(1, world)) - come.keys():

            def late(missing: set[int] = missing) -> None:
                if why := stopped():
                    raise GroupBroken(why)
                if time.monotonic() > end:
                    raise GroupBroken(f"waited {MEET_S:.0f} s for ranks {sorted(missing)} to connect")

            door.settimeout(10 * POLL_S)
            try:
                connection, _ = door.accept()
            except TimeoutError:
                late()
                continue
            undone.callback(connection.close)
            connection.settimeout(10 * POLL_S)
            (rank,) = RANK.unpack(_exactly(connection, RANK.size, late))
            connection.settimeout(max(end - time.monotonic(), POLL_S))
            if rank not in missing:
                connection.close()
                continue
            socket.send_fds(connection, [RANK.pack(len(packed))], descriptors)
            connection.sendall(packed)
            come[rank] = connection
        undone.pop_all()
    return come


def _opened(path: str, rank: int) -> tuple[SharedSlots, dict[int, socket.socket]]:
    """Get the slots from rank 0, as another rank; return them and the socket.

    Raises:
        GroupBroken: this process computes elsewhere than rank 0, or cannot open `path`, or that is another user's.
        OSError, RuntimeError: rank 0 is gone, or the slots cannot be opened.
    """
    with ExitStack() as undone:
        connection = undone.enter_context(socket.socket(socket.AF_UNIX))
        connection.settimeout(MEET_S)
        try:
            connection.connect(path)
        except OSError as error:
            why = f"weights.backend: ipc needs all members on one machine, with one network and one user: {error}"
            raise GroupBroken(why) from error
        _, user, _ = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
        if user != os.geteuid():
            raise GroupBroken(f"user {user} offers the weights; expected {os.geteuid()}, the user of this process")
        connection.sendall(RANK.pack(rank))
        said, descriptors, _, _ = socket.recv_fds(connection, RANK.size, SLOTS, socket.MSG_CMSG_CLOEXEC)
        try:
            said += _exactly(connection, RANK.size - len(said))
            offer = msgspec.msgpack.decode(_exactly(connection, *RANK.unpack(said)), type=SlotsOffer)
            kind = kind_here()
            if offer.kind != kind.kind:
                raise GroupBroken(f"the trainer offers {offer.kind} memory, and rank {rank} needs {kind.kind} memory")
            slots = kind.opened(offer, descriptors)
        finally:
            for one in descriptors:
                os.close(one)
        undone.pop_all()
    return slots, {0: connection}


def _exactly(connection: socket.socket, nbytes: int, late: Callable[[], object] | None = None) -> bytes:
    """Read a number of bytes.

    Args:
        connection: where they come from.
        nbytes: their number.
        late: called whenever none has come within the connection's timeout; it raises to stop waiting. None: one
            timeout is the end.

    Raises:
        OSError: the other end is closed, or sends nothing.
    """
    found = b""
    while len(found) < nbytes:
        try:
            part = connection.recv(nbytes - len(found))
        except TimeoutError:
            if late is None:
                raise
            late()
            continue
        if not part:
            raise ConnectionError("the other end is closed")
        found += part
    return found
