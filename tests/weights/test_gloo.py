"""Members of a gloo group that die while a tensor is half on its way, of which gloo itself tells nobody."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from streamrl.runtime.processes import is_alive
from streamrl.weights.backends import communicator, gloo, ipc
from streamrl.weights.backends.communicator import Communicator, GroupBroken, join, lead, open_meeting
from streamrl.weights.backends.gloo import GlooCommunicator
from streamrl.weights.backends.ipc import IpcCommunicator
from tests.waiting import scaled, wait_for

HERE = "127.0.0.1"
SIZE = 64 * 2**20
"""Bytes of a tensor, far more than sockets hold."""
LIMIT_S = 300.0
"""Seconds that one broadcast may take: nobody here may wait that long."""
SOON_S = 30.0


def member(orders: Connection, rank: int) -> None:
    """Receives tensors until the group breaks, and says why.

    It is told the port of the meeting and, or None, the process that it kills once the first byte of a tensor has come.
    """
    port, killed = orders.recv()
    group, _ = join(GlooCommunicator, HERE, port, rank, 3, LIMIT_S)
    tensor = torch.zeros(SIZE, dtype=torch.uint8)
    try:
        while True:
            wait = group.begin(tensor)
            while killed and not tensor[0]:
                pass
            if killed:
                os.kill(killed, signal.SIGKILL)
            wait()
    except GroupBroken as error:
        orders.send(str(error))
        group.close()


def trainer(orders: Connection) -> None:
    """Rank 0: sends one tensor."""
    store, port = open_meeting(HERE, 3, scaled(SOON_S))
    orders.send(port)
    group = lead(GlooCommunicator, store, HERE, 3, LIMIT_S)
    group.begin(torch.ones(SIZE, dtype=torch.uint8))()


def stands_still(orders: Connection, after: str) -> None:
    """Rank 0 of two, which is stopped once the other has come, or while a tensor is on its way to it."""
    store, port = open_meeting(HERE, 2, scaled(SOON_S))
    orders.send(port)
    store.wait(["here/1"])
    if after == "begun":
        group = lead(GlooCommunicator, store, HERE, 2, LIMIT_S)
        threading.Thread(target=group.begin(torch.ones(SIZE, dtype=torch.uint8)), daemon=True).start()
    os.kill(os.getpid(), signal.SIGSTOP)


def waits_briefly(orders: Connection) -> None:
    """The other rank, which says what became of a tensor that rank 0 is to send."""
    try:
        group, _ = join(GlooCommunicator, HERE, orders.recv(), 1, 2, scaled(2))
        group.begin(torch.zeros(SIZE, dtype=torch.uint8))()
        group.begin(torch.zeros(SIZE, dtype=torch.uint8))()
    except GroupBroken as error:
        orders.send(str(error))


def leads(orders: Connection, kind: type[Communicator]) -> None:
    """Rank 0 of two, which says its port and meets the other."""
    store, port = open_meeting(HERE, 2, scaled(SOON_S))
    orders.send((port, os.getpid()))
    lead(kind, store, HERE, 2, LIMIT_S)


def asks_one_that_stands_still(orders: Connection, what: str) -> None:
    """The other rank, which stops rank 0 as it makes a request to its store, and says what became of that."""
    port, leading = orders.recv()
    communicator.MEET_S = scaled(2)

    def stopping(request: Any) -> Any:
        def made(*arguments: Any, **named: Any) -> Any:
            os.kill(leading, signal.SIGSTOP)
            wait_for(lambda: psutil.Process(leading).status() == psutil.STATUS_STOPPED, SOON_S)
            return request(*arguments, **named)

        return made

    class Connecting(IpcCommunicator):
        connect = classmethod(stopping(IpcCommunicator.connect.__func__))  # type: ignore[attr-defined]

    if what == "a store of its own":
        communicator.dist.TCPStore = stopping(dist.TCPStore)  # type: ignore[misc]
    if what == "another connection":
        communicator.another_connection = stopping(communicator.another_connection)
    try:
        join(Connecting if what == "the door" else GlooCommunicator, HERE, port, 1, 2, LIMIT_S)
    except GroupBroken as error:
        orders.send(str(error))


class Processes:
    """Processes of a test, and what they say."""

    def __init__(self, ended: ExitStack) -> None:
        self._ended = ended
        self._context = multiprocessing.get_context("forkserver")

    def start(self, target: Any, *arguments: object) -> tuple[multiprocessing.process.BaseProcess, Connection]:
        """Start one."""
        orders, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        self._ended.callback(process.join)
        self._ended.callback(process.kill)
        self._ended.callback(orders.close)
        return process, orders


@pytest.fixture
def processes() -> Iterator[Processes]:
    with ExitStack() as ended:
        multiprocessing.set_forkserver_preload(["tests.weights.test_gloo"])
        yield Processes(ended)


def leaves(orders: Connection, kind: type[Communicator], rank: int) -> None:
    """Comes to the meeting, and kills itself once all begin to connect."""
    store = dist.TCPStore(HERE, orders.recv(), 3, is_master=False, wait_for_workers=False)
    store.set(f"here/{rank}", "")
    store.wait([communicator.START])
    os.kill(os.getpid(), signal.SIGKILL)


def connects(orders: Connection, kind: type[Communicator], rank: int) -> None:
    """Joins a group, and says why the group is broken."""
    for module in (communicator, gloo, ipc):
        module.MEET_S = LIMIT_S  # type: ignore[attr-defined]
    try:
        group, _ = join(kind, HERE, orders.recv(), rank, 3, LIMIT_S)
        group.begin(torch.zeros(1))()
    except GroupBroken as error:
        orders.send(str(error))


def begins_late(orders: Connection) -> None:
    """Joins a group, learns that all begin once the trainer's store is gone again, and says why the group is broken."""
    port, wait_until = orders.recv(), communicator.wait_until

    def waits(done: Any, limit_s: float, what: str, *more: Any) -> None:
        wait_until(done, limit_s, what, *more)
        if what == "the trainer to meet":
            orders.send("all begin")
            wait_for(lambda: socket.socket().connect_ex((HERE, port)), SOON_S)

    communicator.MEET_S, communicator.wait_until = LIMIT_S, waits
    try:
        join(GlooCommunicator, HERE, port, 1, 2, LIMIT_S)
    except GroupBroken as error:
        orders.send(str(error))


def answer(orders: Connection) -> str:
    """What a member says, which it must say soon."""
    assert orders.poll(scaled(SOON_S)), "it waits on"
    return str(orders.recv())


def test_the_trainer_leaves_a_member_that_died_with_half_a_tensor_and_the_others_notice(processes: Processes) -> None:
    (_, stays), (dying, dies) = (processes.start(member, rank) for rank in (1, 2))
    store, port = open_meeting(HERE, 3, scaled(SOON_S))
    stays.send((port, None))
    dies.send((port, dying.pid))
    group = lead(GlooCommunicator, store, HERE, 3, LIMIT_S)
    del store

    def tell() -> None:
        """Does what the site's service does once a process has ended."""
        dying.join()
        group.abort("it was killed")

    telling = threading.Thread(target=tell)
    telling.start()
    began = time.monotonic()
    with pytest.raises(GroupBroken):
        for _ in range(2):
            group.begin(torch.ones(SIZE, dtype=torch.uint8))()
    group.close()
    assert "broken" in answer(stays)
    assert time.monotonic() - began < scaled(SOON_S)
    telling.join()


def test_members_notice_a_trainer_that_died_with_half_a_tensor(processes: Processes) -> None:
    (_, one), (_, other), (sending, orders) = (
        processes.start(member, 1),
        processes.start(member, 2),
        processes.start(trainer),
    )
    port = orders.recv()
    one.send((port, sending.pid))
    other.send((port, None))
    assert "broken" in answer(one) and "broken" in answer(other)


@pytest.mark.parametrize("kind", [GlooCommunicator, IpcCommunicator])
def test_a_member_that_dies_while_all_connect_holds_nobody_up(
    processes: Processes, kind: type[Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (communicator, gloo, ipc):
        monkeypatch.setattr(module, "MEET_S", LIMIT_S)
    (_, stays), (dying, dies) = processes.start(connects, kind, 1), processes.start(leaves, kind, 2)
    store, port = open_meeting(HERE, 3, scaled(SOON_S))
    for one in (stays, dies):
        one.send(port)
    killed = lambda: "" if is_alive(dying.pid) else "it was killed"  # noqa: E731
    began = time.monotonic()
    with pytest.raises(GroupBroken, match="it was killed"):
        lead(kind, store, HERE, 3, LIMIT_S, killed)
    del store
    assert "broken" in answer(stays)
    assert time.monotonic() - began < scaled(SOON_S)


def test_a_member_that_begins_as_the_trainer_has_given_up_notices_at_once(processes: Processes) -> None:
    _, late = processes.start(begins_late)
    store, port = open_meeting(HERE, 2, scaled(SOON_S))
    late.send(port)
    store.wait(["here/1"])
    store.set(communicator.START, "")
    assert answer(late) == "all begin"
    del store
    assert "broken" in answer(late)


@pytest.mark.parametrize("after", ["here", "begun"])
def test_a_trainer_that_stands_still_holds_a_member_up_until_its_limit_and_no_longer(
    processes: Processes, after: str
) -> None:
    sending, orders = processes.start(stands_still, after)
    _, waits = processes.start(waits_briefly)
    waits.send(orders.recv())
    assert "waited" in answer(waits)
    assert is_alive(sending.pid)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (GlooCommunicator, "a store of its own"),
        (GlooCommunicator, "another connection"),
        (IpcCommunicator, "the door"),
    ],
)
def test_a_trainer_that_stands_still_leaves_no_request_to_its_store_without_a_limit(
    processes: Processes, kind: type[Communicator], what: str
) -> None:
    _, orders = processes.start(leads, kind)
    _, asks = processes.start(asks_one_that_stands_still, what)
    asks.send(orders.recv())
    assert re.search(r"waited \d+ s for the trainer's store", answer(asks))


def test_a_trainer_that_is_gone_as_all_begin_breaks_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    store, port = open_meeting(HERE, 2, scaled(SOON_S))
    store.set(communicator.START, "")

    def gone(store: dist.Store) -> dist.Store:
        raise RuntimeError("its store refuses connections")

    monkeypatch.setattr(communicator, "another_connection", gone)
    with pytest.raises(GroupBroken, match="its store refuses connections"):
        join(GlooCommunicator, HERE, port, 1, 2, scaled(SOON_S))
