"""Members of a gloo group that die while a tensor is half on its way, of which gloo itself tells nobody."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from streamrl.weights.backends.communicator import GroupBroken, join, lead, open_meeting
from streamrl.weights.backends.gloo import GlooCommunicator
from tests.waiting import scaled

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
        """As the site's service does."""
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
