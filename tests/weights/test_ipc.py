"""Tensors through memory that processes share, some of which are slow, or die, or do not belong there."""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import os
import re
import select
import socket
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from streamrl.weights.backends import ipc
from streamrl.weights.backends.communicator import (
    START,
    Communicator,
    GroupBroken,
    GroupStore,
    join,
    lead,
    nothing_wrong,
    open_meeting,
)
from streamrl.weights.backends.ipc import DOOR, RANK, IpcCommunicator
from streamrl.weights.backends.shared_slots import CudaHandle, HostSlots
from tests.security.another_user import NOBODY, as_nobody
from tests.waiting import holds, scaled, wait_for

HERE, LIMIT_S, SLOT = "127.0.0.1", 30.0, 1500
"""The limit is in seconds on an idle machine."""
Form = tuple[str, tuple[int, ...]]
"""Type and shape of a tensor."""


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def member(orders: Connection) -> None:
    """Another process of the group: does as it is told, and answers with what came of it."""
    group: Communicator | None = None
    while True:
        try:
            order, *values = orders.recv()
        except EOFError:
            return
        try:
            if order == "join":
                group, _ = join(IpcCommunicator, HERE, *values)
                orders.send(f"joined as rank {values[1]}")
            elif order == "lead":
                ipc.SLOT = SLOT
                store, port = open_meeting(HERE, 2, scaled(LIMIT_S))
                orders.send(port)
                group = lead(IpcCommunicator, store, HERE, 2, scaled(LIMIT_S))
            else:
                assert group is not None
                found = [torch.full(shape, 7, dtype=torch.uint8).view(getattr(torch, kind)) for kind, shape in values]
                for tensor in found:
                    group.begin(tensor)()
                orders.send([raw(tensor) for tensor in found])
        except GroupBroken as error:
            orders.send(str(error))


class Group:
    """Rank 0 in this process, and members in processes of their own."""

    def __init__(self) -> None:
        self.processes: list[Any] = []
        self.orders: list[Connection] = []
        self.pool = ThreadPoolExecutor()
        self.zero: Communicator

    def start(self) -> Connection:
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        self.processes.append(context.Process(target=member, args=(theirs,), daemon=True))
        self.processes[-1].start()
        theirs.close()
        self.orders.append(ours)
        return ours

    def meet(self, members: int, limit_s: float | None = None) -> Communicator:
        """Form a group with rank 0 here."""
        while len(self.processes) < members:
            self.start()
        store, port = open_meeting(HERE, members + 1, scaled(LIMIT_S))
        for rank, orders in enumerate(self.orders[:members], 1):
            orders.send(("join", port, rank, members + 1, scaled(LIMIT_S)))
        self.zero = lead(IpcCommunicator, store, HERE, members + 1, limit_s or scaled(LIMIT_S))
        assert [orders.recv() for orders in self.orders[:members]] == [
            f"joined as rank {n + 1}" for n in range(members)
        ]
        return self.zero

    def send(self, tensors: list[torch.Tensor]) -> Future[None]:
        """Have rank 0 broadcast tensors, in a thread."""

        def work() -> None:
            for tensor in tensors:
                self.zero.begin(tensor)()

        return self.pool.submit(work)

    def end(self) -> None:
        if hasattr(self, "zero"):
            self.zero.close()
        self.pool.shutdown()
        for orders, process in zip(self.orders, self.processes, strict=True):
            orders.close()
            process.kill()
            process.join()


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    multiprocessing.set_forkserver_preload(["tests.weights.test_broadcast"])  # as there: it is started once
    monkeypatch.setattr(ipc, "SLOT", SLOT)
    made = Group()
    yield made
    made.end()


def filled(number: int, nbytes: int = SLOT) -> torch.Tensor:
    return torch.full((nbytes,), number, dtype=torch.uint8)


def forms(tensors: list[torch.Tensor]) -> list[Form]:
    """What `member` makes tensors of the same types and sizes of."""
    return [(str(one.dtype).removeprefix("torch."), (one.numel() * one.itemsize,)) for one in tensors]


def shared_here() -> list[str]:
    """Slots that this process has mapped, and its descriptors of them, by the names of their files."""
    mapped = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    for one in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # it is closed by now
            mapped.append(os.readlink(f"/proc/self/fd/{one}"))
    return [one for one in mapped if "streamrl-slots" in one]


def test_tensors_of_all_types_and_sizes_arrive_in_their_bits_and_nothing_stays(group: Group) -> None:
    assert not shared_here()
    group.meet(2)
    assert shared_here() == ["/memfd:streamrl-slots (deleted)"] * 3  # the mapping has a descriptor of its own
    bits = torch.Generator().manual_seed(1)
    tensors = [
        torch.randint(0, 256, (size,), dtype=torch.uint8, generator=bits)
        for size in (0, 1, SLOT - 1, SLOT, SLOT + 1, 2 * SLOT, 11 * SLOT + 7)
    ]
    for kind in (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.complex128):
        tensors.append(torch.randint(0, 256, (64 * 80,), dtype=torch.uint8, generator=bits).view(kind).reshape(8, -1))
    tensors += [torch.tensor(5, dtype=torch.int64), torch.rand(7, generator=bits) < 0.5]
    for repeat in range(2):
        sent = group.send(tensors)
        for orders in group.orders:
            orders.send(("take", *forms(tensors)))
        for orders in group.orders:
            assert orders.recv() == [raw(one) for one in tensors], repeat
        sent.result()
    group.zero.close()
    assert not shared_here()


def test_what_a_slow_member_has_not_copied_is_not_overwritten(group: Group) -> None:
    group.meet(2)
    tensors = [filled(number) for number in range(6)]
    sent = group.send(tensors)
    fast, slow = group.orders
    fast.send(("take", *forms(tensors[:2])))
    assert fast.recv() == [raw(one) for one in tensors[:2]]  # two slots are full, and one member has them
    asyncio.run(holds(lambda: not sent.done(), 0.3))
    slow.send(("take", *forms(tensors)))
    fast.send(("take", *forms(tensors[2:])))
    assert slow.recv() == [raw(one) for one in tensors]
    assert fast.recv() == [raw(one) for one in tensors[2:]]
    sent.result()


class Held(HostSlots):
    """Slots in which a copy is there only when it is let go, as on a GPU: there `copy_` returns long before."""

    def __init__(self, *values: Any) -> None:
        super().__init__(*values)
        self.copied, self.let_go = threading.Event(), threading.Event()

    def settle(self) -> None:
        self.copied.set()
        assert self.let_go.wait(scaled(LIMIT_S))


def test_neither_end_speaks_of_a_chunk_before_its_copy_is_there() -> None:
    at_zero, at_one = socket.socketpair()
    with ThreadPoolExecutor() as pool, ExitStack() as opened:
        mine = Held.make(2, SLOT)
        theirs = Held.opened(*mine.offer())
        zero, one = (
            IpcCommunicator(mine, {1: at_zero}, scaled(LIMIT_S)),
            IpcCommunicator(theirs, {0: at_one}, scaled(LIMIT_S)),
        )
        opened.callback(one.close)
        opened.callback(zero.close)

        def says(connection: socket.socket, seconds: float = 0.0) -> bool:
            """Whether something has come for this end."""
            return bool(select.select([connection], [], [], seconds)[0])

        sent = pool.submit(zero.begin, filled(4))
        assert mine.copied.wait(scaled(LIMIT_S)) and not says(at_one)
        mine.let_go.set()
        sent.result()
        received = pool.submit(one.begin(found := filled(0)))
        assert theirs.copied.wait(scaled(LIMIT_S)) and not says(at_zero)
        theirs.let_go.set()
        received.result()
        assert says(at_zero, scaled(LIMIT_S)) and found.equal(filled(4))


def test_a_member_that_dies_ends_the_broadcast_at_once_and_the_next_group_has_its_place(group: Group) -> None:
    group.meet(2, limit_s=1e6)
    tensors = [filled(number) for number in range(6)]
    sent = group.send(tensors)
    group.orders[0].send(("take", *forms(tensors)))
    group.processes[1].kill()
    with pytest.raises(GroupBroken, match="rank 2 is gone"):
        sent.result()
    group.zero.close()
    assert "the trainer is gone" in group.orders[0].recv()
    group.processes.pop().join()
    group.orders.pop().close()
    group.meet(2)
    sent = group.send(tensors)
    for orders in group.orders:
        orders.send(("take", *forms(tensors)))
    assert [orders.recv() for orders in group.orders] == [[raw(one) for one in tensors]] * 2
    sent.result()


def test_whoever_waits_for_a_trainer_that_dies_is_told_at_once(group: Group) -> None:
    orders = group.start()
    orders.send(("lead",))
    joined, _ = join(IpcCommunicator, HERE, orders.recv(), 1, 2, 1e6)
    waits = group.pool.submit(joined.begin(filled(0)))
    asyncio.run(holds(lambda: not waits.done(), 0.1))
    group.processes[0].kill()
    with pytest.raises(GroupBroken, match="the trainer is gone"):
        waits.result()
    joined.close()
    assert not shared_here()


def test_a_wait_ends_at_its_limit_or_when_the_group_is_aborted_and_says_for_whom_it_was(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [filled(number) for number in range(3)]
    group.meet(2).close()
    ring, now = group.meet(2)._ring, 0.0  # type: ignore[attr-defined]

    def monotonic() -> float:
        """Time passes once rank 1 has copied all that it can."""
        nonlocal now
        now += 1e6 if ring.waits_for == [2] else 0.0
        return now

    group.orders[0].send(("take", *forms(tensors)))
    with monkeypatch.context() as patched, pytest.raises(GroupBroken, match=r"waited \d+ s for rank 2"):
        patched.setattr(ipc, "time", SimpleNamespace(monotonic=monotonic))
        group.send(tensors).result()
    group.zero.close()
    assert "the trainer is gone" in group.orders[0].recv()
    group.meet(1, limit_s=1e6)
    sent = group.send(tensors)
    asyncio.run(holds(lambda: not sent.done(), 0.1))
    group.zero.abort("a member was lost")
    with pytest.raises(GroupBroken, match="a member was lost"):
        sent.result()


def test_a_receiver_that_expects_another_size_breaks_the_group(group: Group) -> None:
    group.meet(1)
    group.send([filled(1, 100)]).result()
    group.orders[0].send(("take", *forms([filled(1, 99)])))
    assert group.orders[0].recv().endswith("the trainer sends chunk 0 of 100 bytes; expected 0 of 99 bytes")


def test_nobody_but_the_members_gets_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "SLOT", SLOT)
    store, port = open_meeting(HERE, 2, scaled(LIMIT_S))
    theirs = dist.TCPStore(HERE, port, 2, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False)
    with ThreadPoolExecutor() as pool, ExitStack() as opened:
        leads = pool.submit(lead, IpcCommunicator, store, HERE, 2, scaled(LIMIT_S))
        theirs.set("here/1", "")
        wait_for(lambda: theirs.check([START, DOOR]), 20)
        door = Path(theirs.get(DOOR).decode())
        assert stat.S_IMODE(door.parent.stat().st_mode) == 0o700

        def knock() -> socket.socket:
            made = opened.enter_context(socket.socket(socket.AF_UNIX))
            made.connect(str(door))
            return made

        if os.getuid() == 0:
            assert not as_nobody(knock)
        stranger = knock()
        stranger.sendall(RANK.pack(2))  # there is no such rank
        assert stranger.recv(1) == b""
        assert not leads.done()
        joined = IpcCommunicator.connect(GroupStore(theirs, theirs), HERE, 1, 2, scaled(LIMIT_S), nothing_wrong)
        zero = leads.result()
        opened.callback(joined.close)
        opened.callback(zero.close)
        assert not door.parent.exists()
        zero.begin(filled(3))()
        joined.begin(found := filled(0))()
        assert found.equal(filled(3))


@pytest.mark.parametrize(("dies", "says"), [(True, "a member that had connected is gone"), (False, "it stands still")])
def test_a_member_that_connects_and_says_nothing_holds_the_trainer_up_only_until_its_site_tells(
    monkeypatch: pytest.MonkeyPatch, dies: bool, says: str
) -> None:
    monkeypatch.setattr(ipc, "SLOT", SLOT)
    monkeypatch.setattr(ipc, "MEET_S", scaled(LIMIT_S))
    store, _ = open_meeting(HERE, 2, scaled(LIMIT_S))
    store.set("here/1", "")
    told, asked = threading.Event(), threading.Event()

    def stopped() -> str:
        asked.set()
        return "it stands still" if told.is_set() else ""

    with ThreadPoolExecutor() as pool, socket.socket(socket.AF_UNIX) as silent:
        leads = pool.submit(lead, IpcCommunicator, store, HERE, 2, scaled(LIMIT_S), stopped)
        wait_for(lambda: store.check([START, DOOR]), 20)
        silent.connect(store.get(DOOR).decode())
        if dies:
            silent.close()
        else:
            asked.clear()
            assert asked.wait(scaled(10)), "it is deaf"
            told.set()
        with pytest.raises(GroupBroken, match=f"broken: {says}$"):
            leads.result()


@pytest.mark.skipif(os.getuid() != 0, reason="only root may open a door as another user")
def test_a_member_takes_no_memory_from_another_user(tmp_path: Path) -> None:
    store = dist.HashStore()
    store.set(DOOR, str(tmp_path / "door"))
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(tmp_path / "door"))
        os.seteuid(NOBODY)
        try:
            door.listen()  # the kernel keeps the user who does
        finally:
            os.seteuid(0)
        with pytest.raises(GroupBroken, match=f"user {NOBODY} offers the weights; expected 0"):
            IpcCommunicator.connect(GroupStore(store, store), HERE, 1, 2, scaled(LIMIT_S), nothing_wrong)


def test_the_fields_of_a_cuda_handle_are_those_that_torch_exports() -> None:
    exported = re.search(r"\(\s*device,([^()]*)\)\s*= storage\._share_cuda_\(\)", inspect.getsource(reductions))
    assert exported is not None
    names = [name.strip() for name in exported[1].split(",") if name.strip()]
    assert names == [
        *("handle", "storage_size_bytes", "storage_offset_bytes"),
        *("ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync_required"),
    ]
    assert CudaHandle.__struct_fields__ == (
        *("memory", "size", "offset"),
        *("counter", "counter_offset", "event", "event_sync"),
    )
